"""The archive for machines without network: deterministic, and unpacked only if every file is what it should be."""

import hashlib
import io
import os
import runpy
import shlex
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
bundle = runpy.run_path(str(ROOT / "scripts/bundle.py"))["bundle"]


@pytest.fixture
def archive(build, tmp_path) -> Path:
    return bundle(build, tmp_path)


def unpack(archive: Path, target: Path, *options: str) -> subprocess.CompletedProcess:
    """The documented command."""
    command = f"tar -xOf {archive.name} install.py | {shlex.quote(sys.executable)} - {archive.name} {target}"
    return subprocess.run(
        [command + " " + " ".join(options)], shell=True, cwd=archive.parent, capture_output=True, text=True
    )


def edited(archive: Path, edit) -> Path:
    """The archive with its members {name: content} passed through `edit`; a value may be a whole TarInfo."""
    with tarfile.open(archive) as tar:
        files = {member.name: tar.extractfile(member).read() for member in tar}
    edit(files)
    with tarfile.open(archive, "w") as tar:
        for name, content in files.items():
            if isinstance(content, tarfile.TarInfo):
                tar.addfile(content)
                continue
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return archive


def test_the_same_build_gives_the_same_archive(build, archive, tmp_path):
    copy = Path(shutil.copytree(build, tmp_path / "copy"))
    for path in copy.rglob("*"):
        os.utime(path, (time.time() - 9999, 0))
    again = bundle(copy, tmp_path / "again")
    assert again.read_bytes() == archive.read_bytes()
    assert again.name == "npu-fusion-v1.tar"


def test_unpacked_by_the_documented_command_it_loads(archive, tmp_path, processes, kernel_files):
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    for _ in range(2):  # the second time, over what is there
        result = unpack(archive, tmp_path / "kernels", "--sha256", digest)
        assert result.returncode == 0, result.stderr
    directory = tmp_path / "kernels/npu-fusion"
    found = {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}
    assert found == kernel_files
    assert os.listdir(tmp_path / "kernels") == ["npu-fusion"]
    export = result.stdout.splitlines()[-1]
    assert export == f"export LOCAL_KERNELS=org/npu-fusion={directory}"
    loaded = processes.run(
        'from kernels import get_kernel; print(get_kernel("org/npu-fusion", version=1).__file__)',
        network=False,
        LOCAL_KERNELS=export.split("=", 1)[1],
    )
    assert loaded.stdout == f"{directory}/build/torch-npu/__init__.py\n", loaded.stderr


VARIANT = "npu-fusion/build/torch-npu"


def damage(files):
    files[f"{VARIANT}/ops/norm.py"] += b"\n"
    files[f"{VARIANT}/sitecustomize.py"] = b""
    del files[f"{VARIANT}/layers.py"]


def outside(files):
    files["../evil.py"] = b""


def link(files):
    member = tarfile.TarInfo(f"{VARIANT}/layers.py")
    member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
    files[member.name] = member


def no_metadata(files):
    del files[f"{VARIANT}/metadata.json"]


def broken_metadata(files):
    files[f"{VARIANT}/metadata.json"] = b"{"


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (damage, ["ops/norm.py: changed", "sitecustomize.py: not listed", "layers.py: missing"]),
        (outside, ["../evil.py is not a plain file"]),
        (link, ["layers.py is not a plain file"]),
        (no_metadata, ["metadata.json: nothing"]),
        (broken_metadata, ["is damaged: JSONDecodeError"]),
    ],
)
def test_what_is_not_as_it_should_be_is_named_and_nothing_is_written(edit, words, archive, tmp_path):
    result = unpack(edited(archive, edit), tmp_path / "kernels")
    assert result.returncode == 1
    assert all(word in result.stderr for word in [*words, "nothing was unpacked"]), result.stderr
    assert not (tmp_path / "kernels").exists() and not (tmp_path / "evil.py").exists()


def test_a_truncated_archive_is_refused(archive, tmp_path):
    archive.write_bytes(archive.read_bytes()[: archive.stat().st_size // 2])
    result = unpack(archive, tmp_path / "kernels")
    assert result.returncode == 1 and "nothing was unpacked" in result.stderr
    assert not (tmp_path / "kernels").exists()


def test_another_archive_than_the_one_that_was_asked_for_is_refused(archive, tmp_path):
    result = unpack(archive, tmp_path / "kernels", "--sha256", "0" * 64)
    assert result.returncode == 1 and "has sha256" in result.stderr
    assert not (tmp_path / "kernels").exists()


def test_a_failed_write_leaves_the_old_kernel(archive, tmp_path):
    install = runpy.run_path(str(ROOT / "scripts/install.py"))
    install["install"](archive, tmp_path / "kernels")
    with pytest.raises(TypeError):
        install["write"]({"a/b": "not bytes"}, tmp_path / "kernels/npu-fusion")
    assert os.listdir(tmp_path / "kernels") == ["npu-fusion"]
    assert (tmp_path / "kernels/npu-fusion/build/torch-npu/metadata.json").exists()


def test_a_build_that_was_changed_by_hand_is_not_bundled(build, tmp_path):
    copy = Path(shutil.copytree(build, tmp_path / "copy"))
    (copy / "torch-npu/layers.py").write_text("")
    with pytest.raises(SystemExit, match=r"layers\.py: changed"):
        bundle(copy, tmp_path)
