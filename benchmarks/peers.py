"""Other people's NPU patches, loaded from their own, unmodified files.

Each is installed with `pip install --no-deps` into a directory of its own. Of a package, only the files that patch
transformers are imported; the package's other imports, which need dependencies that do not matter here, are stood in for.
"""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
import types
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = dict(
    line.split("==")
    for line in (Path(__file__).parent / "requirements-peers.txt").read_text().splitlines()
    if line and not line.startswith("#")
)
PEERS = tuple(REQUIREMENTS)


def install(directory: Path = ROOT / ".cache" / "peers") -> dict[str, Path]:
    """Directory of each peer; those that are missing are downloaded (about 15 MB in all)."""
    found = {}
    for name, version in REQUIREMENTS.items():
        found[name] = directory / f"{name}-{version}"
        if not any(found[name].glob("*.dist-info")):
            print(f"downloading {name} {version}", file=sys.stderr, flush=True)
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target"]
            subprocess.run([*command, str(found[name]), f"{name}=={version}"], check=True)
    return found


def package(name: str, path: Path | None = None, **members) -> types.ModuleType:
    """An importable package that runs no __init__.py: submodules come from `path`, names from `members`."""
    module = types.ModuleType(name)
    module.__path__ = [str(path)] if path else []
    module.__dict__.update(members)
    sys.modules[name] = module
    return module


def _logger(*args, **kwargs) -> logging.Logger:
    logger = logging.getLogger("modelscope")
    if not logger.handlers:  # ms-swift sets the formatter of the first one
        logger.addHandler(logging.NullHandler())
    return logger


def verl_patch(directory: Path) -> types.ModuleType:
    """verl's module of NPU forwards, with nothing patched yet."""
    if "verl" not in sys.modules:
        package("verl", directory / "verl")
        package("verl.models", directory / "verl" / "models")
        package("verl.models.transformers", directory / "verl" / "models" / "transformers")
    return importlib.import_module("verl.models.transformers.npu_patch")


def patch_classes(peer: str, directory: Path) -> None:
    """What the peer does to transformers' classes, before any model is made."""
    if peer == "verl":
        verl_patch(directory).apply_npu_patches()
    elif peer == "ms-swift":
        package("modelscope")
        package("modelscope.utils")
        package("modelscope.utils.logger", get_logger=_logger)
        package("swift", directory / "swift")
        package("swift.utils", directory / "swift" / "utils")
        package("swift.model", directory / "swift" / "model")
        package("swift.model.npu_patch", directory / "swift" / "model" / "npu_patch")
        importlib.import_module("swift.model.npu_patch.model").apply_patch()


def patch_model(peer: str, model, directory: Path) -> None:
    """What the peer does to a model that exists."""
    if peer == "llamafactory":
        if "llamafactory" not in sys.modules:
            package("llamafactory", directory / "llamafactory")
        interface = importlib.import_module("llamafactory.v1.plugins.model_plugins.kernels.interface")
        interface.apply_default_kernels(model, include_kernels="auto")
