"""The kernel from the Hub, over HTTP, with kernels' own functions and commands."""

import json

import pytest

LOAD = """
from kernels import get_kernel
npu = get_kernel("org/npu-fusion", {arguments})
import torch
x = torch.randn(4, 64, device="npu")
torch.testing.assert_close(npu.ops.rms_norm(x).cpu(), npu.ops.rms_norm(x.cpu()))
print(npu.__file__)
"""
TRUST = 'trust_remote_code=["org/npu-fusion"]'


def cli(*arguments: str) -> str:
    return f"import sys; sys.argv = ['kernels', *{arguments!r}]; from kernels.cli import main; main()"


@pytest.mark.parametrize("arguments", ["version=1", "revision='v1'", "revision='{commit}'", "revision='v1.0'"])
def test_get_kernel_by_version_branch_commit_and_tag(hub, online, processes, arguments):
    repository = hub.repositories["org/npu-fusion"]
    commit = repository.branches["v1"]
    repository.tags["v1.0"] = commit
    result = processes.run(LOAD.format(arguments=f"{arguments.format(commit=commit)}, {TRUST}"), **online)
    assert result.returncode == 0, result.stderr
    assert f"snapshots/{commit}/build/torch-npu/__init__.py" in result.stdout


def test_a_file_behind_an_lfs_pointer_is_followed(hub, online, processes):
    hub.lfs_above = 1000
    result = processes.run(LOAD.format(arguments=f"version=1, {TRUST}"), **online)
    assert result.returncode == 0, result.stderr
    assert any(path.startswith("/lfs/") for path in hub.paths()), "no file was large enough: this test tests nothing"


def test_the_second_load_downloads_nothing(hub, online, processes):
    code = LOAD.format(arguments=f"version=1, {TRUST}")
    assert processes.run(code, **online).returncode == 0
    hub.requests.clear()
    assert processes.run(code, **online).returncode == 0
    assert not [path for path in hub.paths() if "/resolve/" in path]


def test_a_trusted_publisher_needs_no_argument(hub, online, processes):
    hub.trusted.add("org")
    result = processes.run(LOAD.format(arguments="version=1"), **online)
    assert result.returncode == 0, result.stderr


def test_the_nested_layout_as_kernels_0_10_imports_it(build, processes):
    """By file path under a name of its own, and it keeps the module that it made, not what is in sys.modules."""
    code = f"""
import importlib.util, sys, torch
spec = importlib.util.spec_from_file_location("npu_fusion_0123", {str(build / "torch-npu/npu_fusion/__init__.py")!r})
npu = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(npu)
assert npu.ops.rms_norm(torch.ones(2, 8, device="npu")).is_npu
print(npu.__file__, npu.ops.__name__)
"""
    result = processes.run(code)
    assert result.stdout == f"{build}/torch-npu/__init__.py npu_fusion_0123.ops\n", result.stderr


def test_has_kernel(hub, online, processes):
    code = f"""
from kernels import has_kernel
print(has_kernel("org/npu-fusion", version=1, {TRUST}))
"""
    assert processes.run(code, **online).stdout == "True\n"
    hub.publish("org/npu-fusion", "v1", {"build/torch-cuda/metadata.json": b"{}"})
    assert processes.run(code, **online).stdout == "False\n"


def test_commands_info_and_versions(online, processes):
    info = processes.run(cli("info", "org/npu-fusion", "--version", "1", "--json"), **online)
    assert info.returncode == 0, info.stderr
    described = json.loads(info.stdout)
    assert (described["name"], described["version"], described["backends"]) == ("npu-fusion", 1, ["npu"])
    versions = processes.run(cli("versions", "org/npu-fusion"), **online)
    assert versions.returncode == 0, versions.stderr
    assert versions.stdout.splitlines() == ["Version 1:", "", "torch-npu compatible, preferred ✅"]


def test_commands_lock_and_download_then_load_without_the_hub(hub, online, offline, processes, tmp_path):
    hub.trusted.add("org")  # `kernels lock` has no way to name one repository as trusted
    (tmp_path / "pyproject.toml").write_text('[tool.kernels.dependencies]\n"org/npu-fusion" = 1\n')
    for command in ("lock", "download"):
        result = processes.run(cli(command, str(tmp_path)), **online)
        assert result.returncode == 0, result.stderr
    commit = hub.repositories["org/npu-fusion"].branches["v1"]
    assert commit in (tmp_path / "kernels.lock").read_text()

    code = f"""
from pathlib import Path
from kernels import load_kernel
print(load_kernel("org/npu-fusion", lockfile=Path({str(tmp_path / "kernels.lock")!r})).__file__)
"""
    # the lock names a commit, not the branch
    hub.publish("org/npu-fusion", "v1", {"build/torch-npu/metadata.json": b"{}"})
    result = processes.run(code, network=False, **offline)
    assert result.returncode == 0, result.stderr
    assert commit in result.stdout
