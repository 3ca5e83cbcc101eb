"""What the tests of the emulated operators share: data, the bound on rounding, and how a refusal looks."""

import re
from contextlib import contextmanager

import npu_emulator
import pytest
import torch

FLOATS = [torch.float32, torch.bfloat16, torch.float16]
HALVES = [torch.bfloat16, torch.float16]
npu = torch.ops.npu


def randn(*shape, dtype=torch.float32, grad=False, seed=0):
    """Random values on the npu, the same for the same shape and seed."""
    generator = torch.Generator().manual_seed(seed + 31 * sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).npu().requires_grad_(grad)


def ints(values, dtype=torch.int64):
    return torch.tensor(values, dtype=dtype).npu()


def exact(*tensors):
    """The same values in float64 on the host, as leaves of a graph of their own where they require gradients."""
    wide = [None if t is None else t.detach().cpu().double().requires_grad_(t.requires_grad) for t in tensors]
    return wide[0] if len(wide) == 1 else wide


def close(actual, expected, steps=16, scale=None):
    """Assert that `actual` is `expected` (float64), computed in float32 and rounded once to its dtype.

    The last rounding moves a value by half an ulp, which is at most eps / 2 of it (or half the smallest subnormal).
    Before it, float32 arithmetic has moved the value by at most `steps` roundings of the largest intermediate term,
    `scale` (default: the largest magnitude of the result).
    """
    actual, expected = actual.detach().cpu(), expected.detach()
    assert actual.shape == expected.shape
    info = torch.finfo(actual.dtype)
    if scale is None:
        scale = expected.abs().max() if expected.numel() else 0.0
    bound = expected.abs() * info.eps / 2 + info.smallest_normal * info.eps / 2 + steps * 2.0**-24 * scale
    error = (actual.double() - expected).abs()
    assert not error.isnan().any(), "NaN where a value is defined"
    worst = (error / bound).max().item() if error.numel() else 0.0
    assert (error <= bound).all(), f"off by {worst:.2f} of the bound, at most {error.max().item():.3g}"


def uninitialised(tensor):
    """True where every element holds what the emulator puts where Ascend writes nothing."""
    tensor = tensor.cpu()
    return bool((tensor.isnan() if tensor.is_floating_point() else tensor == torch.iinfo(tensor.dtype).min).all())


@contextmanager
def refused(op, rule):
    """The call inside raises, and says which aclnn function refused and by which rule (a regular expression).

    An empty `op` stands for rules that torch_npu checks itself, before it calls any.
    """
    with pytest.raises(RuntimeError) as raised:
        yield
    assert re.search(rf"{op}: .*{rule}" if op else rule, str(raised.value), re.DOTALL), str(raised.value)


def traffic(call):
    """{op: (launches, bytes read, bytes written)} of what `call` launched."""
    with npu_emulator.count() as counted:
        call()
    return {op: (t.launches, t.bytes_read, t.bytes_written) for op, t in counted.by_op.items()}
