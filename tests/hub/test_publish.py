"""What publish.py uploads is what get_kernel loads; and what it refuses to upload."""

import runpy
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
GET = """
from kernels import get_kernel
npu = get_kernel("new/npu-fusion", version=1, trust_remote_code=["new/npu-fusion"])
"""


def git(checkout: Path, *arguments: str):
    author = ["-c", "user.name=test", "-c", "user.email=test@example.com", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", *author, *arguments], cwd=checkout, check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path) -> Path:
    """A clean git checkout of what this one holds now, with its build."""
    path = tmp_path / "checkout"
    ignore = shutil.ignore_patterns("__pycache__")
    for name in ("scripts", "torch-ext"):
        shutil.copytree(ROOT / name, path / name, ignore=ignore)
    for name in ("build.toml", "CARD.md", "README.md", ".gitignore"):
        shutil.copy(ROOT / name, path)
    runpy.run_path(str(path / "scripts/build.py"))["build"](path / "build")
    git(path, "init", "--quiet")
    git(path, "add", ".")
    git(path, "commit", "--quiet", "-m", "all")
    return path


@pytest.fixture
def publish(checkout, processes, online):
    def publish(*options: str):
        arguments = ["publish.py", "--repository", "new/npu-fusion", *options]
        script = str(checkout / "scripts/publish.py")
        return processes.run(
            f"import runpy, sys; sys.argv = {arguments!r}; runpy.run_path({script!r}, run_name='__main__')",
            HF_TOKEN="hf_write",
            **online,
        )

    return publish


def test_published_then_loaded(publish, checkout, hub, processes, online, offline):
    result = publish("--upload")
    assert result.returncode == 0, result.stderr
    repository = hub.repositories["new/npu-fusion"]
    commit = repository.branches["v1"]
    assert result.stdout.splitlines()[-1] == f"published {commit}"
    files = [path for path in (checkout / "build").rglob("*") if path.is_file()]
    built = {str(path.relative_to(checkout)): path.read_bytes() for path in files}
    assert repository.commits[commit] == built, "the branch holds the build and nothing else"
    assert list(repository.tags.values()) == [commit]
    assert repository.commits[repository.branches["main"]]["README.md"] == (checkout / "CARD.md").read_bytes()

    loaded = processes.run(f"{GET}\nimport torch; npu.ops.rms_norm(torch.ones(8, device='npu'))", **online)
    assert loaded.returncode == 0, loaded.stderr
    # and from the cache of a node that fetched it by name, without the Hub
    by_name = GET.replace("version=1", "revision='v1'")
    assert processes.run(by_name, **online).returncode == 0
    assert processes.run(GET, network=False, **offline).returncode == 0


def test_published_twice_is_published_once(publish, hub):
    assert publish("--upload").returncode == 0
    repository = hub.repositories["new/npu-fusion"]
    before = repository.branches["v1"], dict(repository.tags)
    result = publish("--upload")
    assert result.returncode == 0, result.stderr
    assert (repository.branches["v1"], repository.tags) == before


def test_a_new_build_takes_away_what_the_old_one_had(publish, checkout, hub):
    assert publish("--upload").returncode == 0
    (checkout / "torch-ext/npu_fusion/more.py").write_text("")
    runpy.run_path(str(checkout / "scripts/build.py"))["build"](checkout / "build")
    git(checkout, "add", ".")
    git(checkout, "commit", "--quiet", "-m", "more")
    assert publish("--upload").returncode == 0
    repository = hub.repositories["new/npu-fusion"]
    assert "build/torch-npu/more.py" in repository.commits[repository.branches["v1"]]
    (checkout / "torch-ext/npu_fusion/more.py").unlink()
    runpy.run_path(str(checkout / "scripts/build.py"))["build"](checkout / "build")
    git(checkout, "commit", "--quiet", "-am", "less")
    assert publish("--upload").returncode == 0
    assert "build/torch-npu/more.py" not in repository.commits[repository.branches["v1"]]
    assert len(repository.tags) == 2, "the first and the third build are one"


def test_a_dry_run_sends_nothing(publish, hub):
    result = publish()
    assert result.returncode == 0, result.stderr
    assert "nothing was sent" in result.stdout and "build/torch-npu/metadata.json" in result.stdout
    assert "new/npu-fusion" not in hub.repositories and not hub.requests


def not_committed(checkout):
    (checkout / "torch-ext/npu_fusion/layers.py").write_text("")


def not_tracked(checkout):
    (checkout / "notes.txt").write_text("")


def changed_by_hand(checkout):
    (checkout / "build/torch-npu/layers.py").write_text("")


def left_over(checkout):
    (checkout / "build/torch-npu/old.py").write_text("")


def built_from_other_sources(checkout):
    path = checkout / "torch-ext/npu_fusion/layers.py"
    path.write_text(path.read_text() + "\n")
    git(checkout, "commit", "--quiet", "-am", "newer than the build")


def not_built(checkout):
    shutil.rmtree(checkout / "build")


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (not_committed, "M torch-ext/npu_fusion/layers.py"),
        (not_tracked, "?? notes.txt"),
        (changed_by_hand, "layers.py: changed"),
        (left_over, "old.py: not listed"),
        (built_from_other_sources, "was built from other sources than this checkout"),
        (not_built, "make build"),
    ],
)
def test_what_is_refused(spoil, words, publish, checkout, hub):
    spoil(checkout)
    result = publish("--upload")
    assert result.returncode == 1
    assert words in result.stderr and "not published" in result.stderr
    assert not hub.requests, "nothing was asked or sent"


def test_a_wrong_token_is_a_clear_error(publish, processes, checkout, online, hub):
    script = str(checkout / "scripts/publish.py")
    arguments = ["publish.py", "--repository", "new/npu-fusion", "--upload"]
    result = processes.run(
        f"import runpy, sys; sys.argv = {arguments!r}; runpy.run_path({script!r}, run_name='__main__')",
        HF_TOKEN="hf_read",
        **online,
    )
    assert result.returncode == 1 and "401" in result.stderr
    assert "new/npu-fusion" not in hub.repositories


def test_the_card_is_in_step_with_the_code():
    card = runpy.run_path(str(ROOT / "scripts/card.py"))
    assert (ROOT / "CARD.md").read_text() == card["card"](), "python scripts/card.py writes it"
