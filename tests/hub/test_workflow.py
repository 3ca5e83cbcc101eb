"""The workflow calls make targets that exist, so that what CI does can be done at home."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_workflow_runs_make_targets():
    commands = re.findall(r"- run: (.+)", (ROOT / ".github/workflows/ci.yml").read_text())
    targets = {command.removeprefix("make ") for command in commands if command.startswith("make ")}
    assert {"lint", "build", "test", "test-matrix"} <= targets
    defined = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert targets <= defined, targets - defined
