"""Write the kernel as the Hub serves it: `build/torch-npu/`, from build.toml and torch-ext/.

    python scripts/build.py [--output build]

`metadata.json` names the kernel and carries a sha256 digest of every file, which kernels checks with its own code.
"""

import argparse
import base64
import hashlib
import json
import shutil
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VARIANT = "torch-npu"  # the one directory name that kernels' loader looks for when torch.npu exists
# kernels < 0.11.7 imports <variant>/<package>/__init__.py: run the flat package there, to have one copy of the code
NESTED = """\
from pathlib import Path

__path__ = [str(Path(__file__).resolve().parent.parent)]
__file__ = str(Path(__path__[0], "__init__.py"))
exec(compile(Path(__file__).read_text(), __file__, "exec"))
"""


def sha256(path: Path) -> str:
    return base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()


def build(output: Path, source: Path = ROOT) -> Path:
    """Build the kernel of the checkout `source` into `output` and return the variant's directory.

    The variant is written beside its final place and then moved there, so that a process that loads it meanwhile never
    sees half of it.
    """
    general = tomllib.loads((source / "build.toml").read_text())["general"]
    package = general["name"].replace("-", "_")
    output.mkdir(parents=True, exist_ok=True)
    variant, fresh = output / VARIANT, output / f".{VARIANT}.new"
    shutil.rmtree(fresh, ignore_errors=True)
    shutil.copytree(source / "torch-ext" / package, fresh, ignore=shutil.ignore_patterns("__pycache__"))
    (fresh / package).mkdir()
    (fresh / package / "__init__.py").write_text(NESTED)

    files = {str(path.relative_to(fresh)): sha256(path) for path in sorted(fresh.rglob("*")) if path.is_file()}
    identity = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:12]
    metadata = {
        "id": f"_{package}_cann_{identity}",
        "name": general["name"],
        "version": general["version"],
        "license": general["license"],
        "python-depends": [],
        "backend": {"type": general["backends"][0]},
        "digest": {"algorithm": "sha256", "files": files},
    }
    (fresh / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")

    replace(variant, fresh)
    return variant


def replace(directory: Path, fresh: Path):
    """Put `fresh` in the place of `directory`; the old one is moved away whole, not emptied file by file."""
    old = directory.with_name(f".{directory.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if directory.exists():
        directory.rename(old)
    fresh.rename(directory)
    shutil.rmtree(old, ignore_errors=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=ROOT / "build", help="directory to write the variant to")
    print(build(parser.parse_args().output))
