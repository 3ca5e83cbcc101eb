"""Tests load the kernel the way a user does: `get_kernel("org/npu-fusion", version=1)`, from a build of this checkout."""

import os
import runpy
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def pytest_configure(config):
    if "LOCAL_KERNELS" in os.environ:  # a build chosen by the caller, or the controller's in an xdist worker
        return
    directory = tempfile.TemporaryDirectory(prefix="npu-fusion-build-")
    config.add_cleanup(directory.cleanup)
    runpy.run_path(str(ROOT / "scripts" / "build.py"))["build"](Path(directory.name))
    os.environ["LOCAL_KERNELS"] = f"org/npu-fusion={directory.name}"
    config.add_cleanup(lambda: os.environ.pop("LOCAL_KERNELS"))
