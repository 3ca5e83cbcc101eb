"""`import npu_emulator.auto` before torch starts the emulator where no NPU is found, and does nothing else."""

from npu_emulator.launcher import needed, start

if needed():
    start()
