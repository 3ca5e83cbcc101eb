"""Fused transformer layers for Huawei Ascend NPUs (torch_npu), swapped in by what a module computes."""

from . import layers, ops

__all__ = ["layers", "ops"]
