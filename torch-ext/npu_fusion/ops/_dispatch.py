"""Where a fused op may run."""

from typing import Callable, Optional

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # what the fused ops take; anything else runs the reference


def npu_op(name: str, *tensors: Optional[torch.Tensor]) -> Optional[Callable]:
    """`torch.ops.npu.<name>` if every tensor is an NPU tensor (or a fake one) and the installed torch_npu has the op.

    None otherwise, and for wrapper subclasses such as DTensor: torch_npu's ops have no sharding strategies. This runs
    in front of every call, so it asks what is cheap to ask: torch_npu refuses to live beside another accelerator, which
    leaves CPU and meta tensors to tell apart.
    """
    for tensor in tensors:
        if tensor is not None and (tensor.is_cpu or tensor.is_meta or is_traceable_wrapper_subclass(tensor)):
            return None
    return getattr(torch.ops.npu, name, None)


def needs_grad(*tensors: Optional[torch.Tensor]) -> bool:
    return torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in tensors)
