"""Fused transformer layers for Huawei Ascend NPUs (torch_npu), swapped in by what a module computes.

model = npu.kernelize(model)      # a model in hand
npu.register()                    # or: let kernels.kernelize and from_pretrained(use_kernels=True) find the layers
"""

from . import layers, ops
from .doctor import check_directory, doctor
from .integration import kernelize, merged_gate_up, restore
from .mapping import layer_map
from .registration import kernel_config_class, register, unregister
from .report import plan, report, verify

__all__ = [
    "KernelConfig",
    "doctor",
    "kernelize",
    "layer_map",
    "layers",
    "merged_gate_up",
    "ops",
    "plan",
    "register",
    "report",
    "restore",
    "unregister",
    "verify",
]

check_directory(__name__)


def __getattr__(name):
    if name == "KernelConfig":  # derived from transformers' class, which is imported when it is asked for
        return kernel_config_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
