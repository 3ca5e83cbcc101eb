"""Where a fused op may run."""

from functools import lru_cache
from typing import Callable, Optional

import torch

FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # what the fused ops take; anything else runs the reference

PLAIN = (torch.Tensor, torch.nn.Parameter, type(None))  # asked first, as nearly every operand is one of these


def wraps_tensors(kind: type) -> bool:
    """Whether tensors of this class stand for others, as DTensor does: torch_npu's ops have no sharding strategies."""
    return hasattr(kind, "__tensor_flatten__")


def npu_op(name: str, x: torch.Tensor, *others: Optional[torch.Tensor]) -> Optional[Callable]:
    """`torch.ops.npu.<name>` if x is an NPU tensor (or a fake one) and the installed torch_npu has the op.

    None otherwise, and where x or another operand stands for other tensors. This runs in front of every call, so it asks
    what is cheap to ask: torch_npu refuses to live beside another accelerator, which leaves CPU and meta tensors to tell
    apart, and its ops refuse an operand that is not where x is, by name.
    """
    if x.is_cpu or x.is_meta:
        return None
    for tensor in (x, *others):
        if type(tensor) not in PLAIN and wraps_tensors(type(tensor)):
            return None
    return getattr(torch.ops.npu, name, None)


def needs_grad(*tensors: Optional[torch.Tensor]) -> bool:
    if torch.is_grad_enabled():
        for tensor in tensors:
            if tensor is not None and tensor.requires_grad:
                return True
    return False


def in_order(x: torch.Tensor) -> torch.Tensor:
    """x, contiguous under torch.compile. torch_npu's meta functions promise results that lie in memory as x does, but its
    kernels write contiguous ones: a graph that views such a result would fail.
    """
    return x.contiguous() if torch.compiler.is_compiling() else x


def remembered(decide: Callable) -> Callable:
    """`decide` with its latest answers remembered. Tracers follow it instead: they do not know every size."""
    remember = lru_cache(maxsize=1024)(decide)

    def answer(*facts):
        if not torch.compiler.is_compiling():
            try:
                return remember(*facts)
            except TypeError:  # make_fx's unknown sizes have no hash
                pass
        return decide(*facts)

    return answer


def record(function: type, *args):
    """`function.apply(*args)`, without the Python in front of it that serves functorch's transforms where there are none.

    That Python is 5 to 8 % of what an MLP or a rotary call costs the host in training (`make bench-host`).
    """
    if _transforms is None or _transforms() or torch.compiler.is_compiling():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)


_transforms = getattr(torch._C, "_are_functorch_transforms_active", None)  # what Function.apply itself asks
