"""Gives a test session the device "npu" on a machine without one."""

import npu_emulator

if npu_emulator.needed():
    npu_emulator.start()


def pytest_report_header() -> str:
    if not npu_emulator.is_emulated():
        return "npu: real hardware"
    import torch

    return f"npu: {torch.npu.device_count()} x {torch.npu.get_device_name()}"
