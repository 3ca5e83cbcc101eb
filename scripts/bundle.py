"""Write the kernel as one archive for machines without network: dist/npu-fusion-v1.tar, with its installer inside.

    python scripts/bundle.py [--build build] [--output dist]

The same build gives the same archive, byte for byte.
"""

import argparse
import hashlib
import io
import json
import runpy
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def bundle(build: Path, output: Path) -> Path:
    """Write the archive of the build directory `build` into `output` and return its path."""
    variant = build / "torch-npu"
    wrong = runpy.run_path(str(ROOT / "torch-ext/npu_fusion/doctor.py"))["differences"](variant)
    if wrong:
        sys.exit(f"{variant} is not what its metadata.json says: " + ", ".join(f"{k}: {v}" for k, v in wrong.items()))
    metadata = json.loads((variant / "metadata.json").read_text())
    files = {"install.py": ROOT / "scripts/install.py"}
    for name in sorted([*metadata["digest"]["files"], "metadata.json"]):
        files[f"{metadata['name']}/build/{variant.name}/{name}"] = variant / name
    output.mkdir(parents=True, exist_ok=True)
    archive = output / f"{metadata['name']}-v{metadata['version']}.tar"
    with tarfile.open(archive, "w", format=tarfile.USTAR_FORMAT) as tar:
        for name, path in files.items():
            content = path.read_bytes()
            member = tarfile.TarInfo(name)  # with no time, owner or mode but the defaults
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return archive


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=Path, default=ROOT / "build", help="directory that `make build` wrote")
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="directory to write the archive to")
    arguments = parser.parse_args()
    archive = bundle(arguments.build, arguments.output)
    digest = hashlib.sha256(archive.read_bytes()).hexdigest()
    print(f"{archive}\nsha256 {digest}\nto unpack it elsewhere:")
    print(f"  tar -xOf {archive.name} install.py | python3 - {archive.name} /opt/kernels --sha256 {digest}")
