"""An emulated Ascend NPU: the real torch_npu wheel on stand-in CANN libraries.

    import npu_emulator

    npu_emulator.start()  # before torch_npu
    import torch

    x = torch.randn(4, device="npu")

Importing this package loads nothing heavy. Results are those of the host's CPU; nothing here says how fast a program
is on Ascend hardware.
"""

from npu_emulator.launcher import fail_next, is_emulated, needed, start
from npu_emulator.traffic import OpTraffic, Traffic, count

__all__ = ["OpTraffic", "Traffic", "count", "fail_next", "is_emulated", "needed", "start"]
