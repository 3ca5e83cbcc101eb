"""Publish build/ as this kernel's version on the Hub. Says what it would do, and does it with --upload.

    python scripts/publish.py [--repository org/npu-fusion] [--upload]

The branch v<version> gets exactly the files of build/: what else lay on it, like the .gitattributes of a new
repository, is deleted. kernels downloads the variant's directory alone, and a cache that misses other files of the
branch is no use offline. A tag with the build's id keeps each upload; main gets the card.
"""

import argparse
import hashlib
import json
import runpy
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi

ROOT = Path(__file__).resolve().parent.parent


def check_tree() -> str:
    """The checkout's commit. Exits if there are changes that no commit holds."""
    git = ["git", "-C", str(ROOT)]
    status = subprocess.run([*git, "status", "--porcelain"], capture_output=True, text=True)
    if status.returncode:
        sys.exit(f"{ROOT} is not a git checkout, so nobody could tell what was published: {status.stderr.strip()}")
    if status.stdout:
        sys.exit(f"not published: the tree has changes that no commit holds\n{status.stdout.rstrip()}")
    return subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()


def check_build(build: Path) -> dict:
    """The build's metadata. Exits if a file is not what it says, or the build is not that of this checkout."""
    variant = build / "torch-npu"
    if not variant.is_dir():
        sys.exit(f"not published: {variant} does not exist: make build")
    wrong = runpy.run_path(str(ROOT / "torch-ext/npu_fusion/doctor.py"))["differences"](variant)
    if wrong:
        lines = "\n".join(f"  {name}: {what}" for name, what in sorted(wrong.items()))
        sys.exit(f"not published: {variant} is not what its metadata.json says\n{lines}")
    metadata = json.loads((variant / "metadata.json").read_text())
    with tempfile.TemporaryDirectory() as directory:
        fresh = runpy.run_path(str(ROOT / "scripts/build.py"))["build"](Path(directory))
        wanted = json.loads((fresh / "metadata.json").read_text())
    if metadata != wanted:
        sys.exit(f"not published: {variant} was built from other sources than this checkout: make build")
    return metadata


def contents(build: Path) -> dict[str, Path]:
    """Path on the version branch -> file."""
    files = (path for path in build.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return {f"build/{path.relative_to(build).as_posix()}": path for path in sorted(files)}


def blob_id(path: Path) -> str:
    content = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def on_branch(api: HfApi, repository: str, revision: str) -> dict[str, str]:
    tree = api.list_repo_tree(repository, repo_type="kernel", revision=revision, recursive=True)
    return {entry.path: entry.blob_id for entry in tree if hasattr(entry, "blob_id")}


def upload(api: HfApi, repository: str, branch: str, tag: str, files: dict[str, Path], message: str) -> str:
    """Make `branch` hold `files` and nothing else, tag it, and return the commit."""
    api.create_repo(repository, repo_type="kernel", exist_ok=True)
    api.create_branch(repository, repo_type="kernel", branch=branch, exist_ok=True)
    refs = api.list_repo_refs(repository, repo_type="kernel")
    head = next(ref.target_commit for ref in refs.branches if ref.name == branch)
    before = on_branch(api, repository, head)
    operations = [CommitOperationAdd(path, file) for path, file in files.items() if before.get(path) != blob_id(file)]
    operations += [CommitOperationDelete(path) for path in before if path not in files]
    commit = head
    if operations:
        # parent_commit: somebody else's upload in between is an error, not something to write over
        commit = api.create_commit(
            repository, operations, commit_message=message, repo_type="kernel", revision=branch, parent_commit=head
        ).oid
    if on_branch(api, repository, commit) != {path: blob_id(file) for path, file in files.items()}:
        sys.exit(f"{repository} at {commit} does not hold what was uploaded: do not announce it")
    api.create_tag(repository, tag=tag, revision=commit, repo_type="kernel", exist_ok=True)
    card = CommitOperationAdd("README.md", ROOT / "CARD.md")
    api.create_commit(repository, [card], commit_message=message, repo_type="kernel")
    return commit


def main() -> None:
    general = tomllib.loads((ROOT / "build.toml").read_text())["general"]
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repository", default=general["hub"]["repo-id"], help="kernel repository on the Hub")
    parser.add_argument("--upload", action="store_true", help="do it, with HF_TOKEN or what `hf auth login` keeps")
    arguments = parser.parse_args()

    revision = check_tree()
    build = ROOT / "build"
    metadata = check_build(build)
    files = contents(build)
    branch = f"v{metadata['version']}"
    tag = f"{branch}-{metadata['id'].rpartition('_')[2]}"
    size = sum(path.stat().st_size for path in files.values())
    print(f"{arguments.repository}: branch {branch}, tag {tag}, {len(files)} files, {size} bytes, commit {revision}")
    if not arguments.upload:
        print(*(f"  {path}" for path in files), "nothing was sent: --upload does it", sep="\n")
        return
    message = f"{metadata['name']} {metadata['version']}, from commit {revision}"
    commit = upload(HfApi(), arguments.repository, branch, tag, files, message)
    print(f"published {commit}")


if __name__ == "__main__":
    main()
