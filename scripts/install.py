"""Unpack the kernel from the archive that `make bundle` wrote, on a machine without network. Standard library only.

    tar -xOf npu-fusion-v1.tar install.py | python3 - npu-fusion-v1.tar /opt/kernels [--sha256 HEX]

Every file is compared with the digest that the archive's metadata.json gives for it, before anything is written. The
directory appears at once, as <target>/npu-fusion; a process that has the old one open keeps it.
"""

import argparse
import base64
import hashlib
import json
import shutil
import sys
import tarfile
from pathlib import Path


def read(archive: Path) -> dict[str, bytes]:
    """Path -> content of the archive's files. Anything but plain files inside one directory is refused."""
    files = {}
    with tarfile.open(archive) as tar:
        for member in tar:
            parts = member.name.split("/")
            if not member.isfile() or member.name.startswith("/") or ".." in parts or "\\" in member.name:
                sys.exit(f"{archive}: {member.name} is not a plain file of the kernel: nothing was unpacked")
            files[member.name] = tar.extractfile(member).read()
    files.pop("install.py", None)
    return files


def differences(files: dict[str, bytes], variant: str) -> dict[str, str]:
    """{file: what is wrong with it}, by the digests in <variant>/metadata.json."""
    listed = json.loads(files[f"{variant}/metadata.json"])["digest"]["files"]
    wanted = {f"{variant}/{name}": digest for name, digest in listed.items()}
    result = {name: "missing" for name in wanted if name not in files}
    for name, content in files.items():
        if name == f"{variant}/metadata.json":
            continue
        if name not in wanted:
            result[name] = "not listed"
        elif base64.b64encode(hashlib.sha256(content).digest()).decode() != wanted[name]:
            result[name] = "changed"
    return result


def write(files: dict[str, bytes], directory: Path) -> None:
    """Write the files beside `directory`, then move them to its place."""
    fresh, old = (directory.with_name(f".{directory.name}.{state}") for state in ("new", "old"))
    for left in (fresh, old):
        shutil.rmtree(left, ignore_errors=True)
    try:
        for name, content in files.items():
            path = fresh / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        if directory.exists():
            directory.rename(old)
        fresh.rename(directory)
    finally:
        for left in (fresh, old):
            shutil.rmtree(left, ignore_errors=True)


def install(archive: Path, target: Path, sha256: str = "") -> Path:
    """Install the archive's kernel as `target`/<its name> and return that directory."""
    found = hashlib.sha256(archive.read_bytes()).hexdigest()
    if sha256 and found != sha256.lower():
        sys.exit(f"{archive} has sha256 {found}, not {sha256}: nothing was unpacked")
    try:
        files = read(archive)
        parts = next((name.split("/") for name in files if name.endswith("/metadata.json")), ())
        if len(parts) != 4:
            sys.exit(f"{archive} holds no <name>/build/<variant>/metadata.json: nothing was unpacked")
        wrong = differences(files, "/".join(parts[:3]))
    except (tarfile.TarError, EOFError, ValueError, KeyError) as error:
        sys.exit(f"{archive} is damaged: {type(error).__name__}: {error}: nothing was unpacked")
    if wrong:
        lines = "\n".join(f"  {name}: {what}" for name, what in sorted(wrong.items()))
        sys.exit(f"{archive} is not what its metadata.json says: nothing was unpacked\n{lines}")
    target.mkdir(parents=True, exist_ok=True)
    write({name.partition("/")[2]: content for name, content in files.items()}, target / parts[0])
    return target / parts[0]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("archive", type=Path)
    parser.add_argument("target", type=Path, help="the directory to install into")
    parser.add_argument("--sha256", default="", help="refuse any archive but this one")
    arguments = parser.parse_args()
    directory = install(arguments.archive, arguments.target, arguments.sha256)
    print(f"{directory}\nexport LOCAL_KERNELS=org/npu-fusion={directory}")
