"""Starts the emulator: loads the stand-in libraries under the names that torch_npu links to, then torch_npu itself."""

import ctypes
import os
import re
import sys
from pathlib import Path

LIBRARIES = Path(__file__).resolve().parent.parent / "lib"
# In the order of their dependencies. Loaded by soname before torch_npu, they are what its links resolve to, whatever
# else is installed.
PRELOADED = ("ascendcl", "hccl", "hcomm", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "opapi")

_runtime: ctypes.CDLL | None = None


def needed() -> bool:
    """True where no NPU is found, so that `device="npu"` needs the emulator."""
    return not any(Path("/dev").glob("davinci[0-9]*"))


def is_emulated() -> bool:
    """True if the emulator was started in this process."""
    return _runtime is not None


def runtime() -> ctypes.CDLL:
    """The loaded libascendcl.

    Raises:
        RuntimeError: If the emulator was not started.
    """
    if _runtime is None:
        raise RuntimeError("the NPU emulator is not running: call npu_emulator.start() first")
    return _runtime


def start() -> None:
    """Start the emulator in this process. A second call does nothing.

    Sets TASK_QUEUE_ENABLE=0, TORCH_DEVICE_BACKEND_AUTOLOAD=0, ASCEND_HOME_PATH and ASCEND_OPP_PATH, also for child
    processes: a child may import torch as usual, and has the device once it calls start() too.

    Raises:
        RuntimeError: If the libraries are not built, or torch_npu was imported before, or a setting has a wrong form.
    """
    global _runtime
    if _runtime is not None:
        return
    _check_settings()
    if "torch_npu" in sys.modules:
        raise RuntimeError("torch_npu is already imported: call npu_emulator.start() before whatever imports it")
    if not (LIBRARIES / ".built").exists():
        raise RuntimeError(
            f"the NPU emulator's libraries are not built (nothing in {LIBRARIES}); "
            f"run: make -C {LIBRARIES.parent} PYTHON={sys.executable}"
        )
    ascend = str(LIBRARIES / "ascend")
    os.environ.update(
        # Ops run when they are called, so torch_npu's own launch queue would only reorder them against aten ops.
        TASK_QUEUE_ENABLE="0",
        # torch would import torch_npu while torch itself is being imported, before the libraries are in place.
        TORCH_DEVICE_BACKEND_AUTOLOAD="0",
        ASCEND_HOME_PATH=ascend,
        ASCEND_OPP_PATH=f"{ascend}/opp",
    )
    import torch

    # An Ascend host has torch's CPU build. PyPI's x86 wheel is a CUDA build, whose version kernels would go by.
    torch.version.cuda = None
    loaded = {name: ctypes.CDLL(str(LIBRARIES / f"lib{name}.so"), ctypes.RTLD_GLOBAL) for name in PRELOADED}
    import torch_npu

    if ctypes.CDLL(str(LIBRARIES / "libaten.so")).emulator_install_aten() <= 0:
        raise RuntimeError("the NPU emulator could not install its aten kernels")
    _runtime = loaded["ascendcl"]
    _runtime.emulator_traffic.restype = ctypes.c_char_p
    _runtime.emulator_host_syncs.restype = ctypes.c_uint64

    device_name = torch_npu.npu.get_device_name

    def get_device_name(device=None):
        return f"{device_name(device)} (emulated)"

    torch.npu.get_device_name = torch_npu.npu.get_device_name = get_device_name


def fail_next(op: str) -> None:
    """Make the next launch of `op` fail with a device error. Called twice, it makes the next two fail.

    Args:
        op: The name under which count() reports it, such as "aclnnRmsNorm" or "aten::mm".
    """
    runtime().emulator_fail_next(op.encode())


def _check_settings() -> None:
    devices = os.environ.get("NPU_EMULATOR_DEVICES") or "1"
    if not re.fullmatch(r"[1-9]\d{0,2}", devices):
        raise RuntimeError(f"NPU_EMULATOR_DEVICES={devices!r}: expected a number of devices, such as 2")
    memory = os.environ.get("NPU_EMULATOR_MEMORY") or "16GiB"
    if not re.fullmatch(r"[1-9]\d{0,14}((Ki|Mi|Gi)B)?", memory):
        raise RuntimeError(f"NPU_EMULATOR_MEMORY={memory!r}: expected bytes, or KiB, MiB or GiB, such as 8GiB")
