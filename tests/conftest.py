"""Tests load the kernel the way a user does: `get_kernel("org/npu-fusion", version=1)`, from a build of this checkout."""

import atexit
import os
import runpy
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

# At import, since the conftest files below this one load the kernel. A build that the caller chose is left alone, and
# the workers of pytest-xdist find their controller's.
if "LOCAL_KERNELS" not in os.environ:
    directory = tempfile.TemporaryDirectory(prefix="npu-fusion-build-")
    atexit.register(directory.cleanup)
    runpy.run_path(str(ROOT / "scripts" / "build.py"))["build"](Path(directory.name))
    os.environ["LOCAL_KERNELS"] = f"org/npu-fusion={directory.name}"
