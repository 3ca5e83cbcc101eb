"""Gated and plain activations against PyTorch's own, in float64."""

import pytest
import torch
import torch.nn.functional as F
from emulator.definitions import FLOATS, close, exact, npu, randn, refused, traffic

BF16, FP32 = torch.bfloat16, torch.float32
# x, dim
SPLITS = [
    ((1, 2), -1),
    ((7, 246), -1),
    ((2, 3, 64), 0),
    ((3, 4, 5), 1),
    ((3, 4, 5), -2),
    ((6,), 0),
    ((0, 8), -1),
    ((2, 0), 0),
]
# Derivatives of silu and gelu stay below 1.2, so the data (below 5 in magnitude) bounds every intermediate term.
SCALE = 8.0


def gelu(form):
    return lambda x: F.gelu(x, approximate=form)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape, dim", SPLITS, ids=str)
def test_swiglu_activates_the_first_half(shape, dim, dtype):
    x = randn(*shape, dtype=dtype, grad=True)
    y = npu.npu_swiglu(x, dim)
    wide = exact(x)
    gate, up = wide.chunk(2, dim)
    expected = F.silu(gate) * up
    close(y, expected, scale=SCALE)
    dy = randn(*y.shape, dtype=dtype, seed=1)
    y.backward(dy)
    expected.backward(exact(dy))
    close(x.grad, wide.grad, scale=4 * SCALE)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("left", [False, True], ids=["activate right", "activate left"])
@pytest.mark.parametrize("form", ["none", "tanh"])
@pytest.mark.parametrize("shape, dim", SPLITS[:4] + SPLITS[6:7], ids=str)
def test_geglu(shape, dim, form, left, dtype):
    x = randn(*shape, dtype=dtype, grad=True)
    y, saved = npu.npu_geglu(x, dim, int(form == "tanh"), left)
    wide = exact(x)
    first, second = wide.chunk(2, dim)
    activated, linear = (first, second) if left else (second, first)
    expected = gelu(form)(activated) * linear
    close(y, expected, scale=SCALE)
    close(saved, gelu(form)(activated), scale=SCALE)
    dy = randn(*y.shape, dtype=dtype, seed=1)
    y.backward(dy)
    expected.backward(exact(dy))
    # The gradient of the linear half is dy times the saved gelu, which was rounded to the dtype: half an ulp
    # of |x| * |dy| more.
    close(
        x.grad,
        wide.grad,
        steps=64 + 2.0**24 * torch.finfo(dtype).eps / 2,
        scale=exact(x).detach().abs().max() * 5 if x.numel() else 0,
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("form", ["none", "tanh"])
@pytest.mark.parametrize("shape", [(1,), (7, 123), (0, 3)], ids=str)
def test_gelu(shape, form, dtype):
    x = randn(*shape, dtype=dtype, grad=True)
    y = npu.npu_gelu(x, approximate=form)
    wide = exact(x)
    expected = gelu(form)(wide)
    close(y, expected, scale=SCALE)
    dy = randn(*shape, dtype=dtype, seed=1)
    y.backward(dy)
    expected.backward(exact(dy))
    close(x.grad, wide.grad, scale=4 * SCALE)


@pytest.mark.parametrize("form", ["none", "tanh"])
def test_native_gelu_takes_the_tanh_form_whatever_it_is_asked(form):
    x = randn(7, 123, grad=True)
    y = F.gelu(x, approximate=form)
    wide = exact(x)
    expected = gelu("tanh")(wide)
    close(y, expected, scale=SCALE)
    y.backward(torch.ones_like(y))
    expected.backward(torch.ones_like(expected))
    close(x.grad, wide.grad, scale=4 * SCALE)


def half(*shape):
    return randn(*shape, dtype=BF16)


SWIGLU_GRAD, GEGLU_GRAD, GELU_GRAD = npu.npu_swiglu_backward, npu.npu_geglu_grad, npu.npu_gelu_backward
REFUSALS = {
    "swiglu, odd": (lambda: npu.npu_swiglu(randn(3, 7)), "aclnnSwiGlu", "split in two and must be even"),
    "swiglu, odd dim 0": (lambda: npu.npu_swiglu(randn(3, 8), 0), "aclnnSwiGlu", "dimension 0 .* must be even"),
    "swiglu, nine dimensions": (lambda: npu.npu_swiglu(randn(*[1] * 8, 8)), "aclnnSwiGlu", "at most 8 dimensions"),
    "swiglu, dtype": (lambda: npu.npu_swiglu(randn(3, 8).double()), "aclnnSwiGlu", "x must be one of"),
    "swiglu, dy dtype": (
        lambda: SWIGLU_GRAD(half(3, 4), randn(3, 8)),
        "aclnnSwiGluGrad",
        "dy and x must have the same dtype",
    ),
    "geglu, odd": (lambda: npu.npu_geglu(randn(3, 7)), "aclnnGeGluV3", "split in two and must be even"),
    "geglu, form": (lambda: npu.npu_geglu(randn(3, 8), -1, 2), "aclnnGeGluV3", "approximate must be 0"),
    "geglu, dy dtype": (
        lambda: GEGLU_GRAD(half(3, 4), randn(3, 8), randn(3, 4)),
        "aclnnGeGluV3Backward",
        "dy and x must have the same",
    ),
    "geglu, gelu": (
        lambda: GEGLU_GRAD(randn(3, 4), randn(3, 8), randn(3, 8)),
        "aclnnGeGluV3Backward",
        "dy and gelu must have the same",
    ),
    "gelu, dtype": (lambda: npu.npu_gelu(randn(3).double()), "aclnnGeluV2", "x must be one of"),
    "gelu, dy dtype": (
        lambda: GELU_GRAD(half(3), randn(3)),
        "aclnnGeluBackwardV2",
        "dy and x must have the same dtype",
    ),
    "native gelu, dtype": (lambda: F.gelu(randn(3).double()), "aclnnGelu", "x must be one of"),
}


@pytest.mark.parametrize("rule", REFUSALS)
def test_refuses(rule):
    call, op, message = REFUSALS[rule]
    with refused(op, message):
        call()


def test_traffic():
    x, dy = randn(6, 8, dtype=BF16), randn(6, 4, dtype=BF16)
    assert traffic(lambda: npu.npu_swiglu(x)) == {"aclnnSwiGlu": (1, 96, 48)}
    assert traffic(lambda: npu.npu_swiglu_backward(dy, x)) == {"aclnnSwiGluGrad": (1, 48 + 96, 96)}
    assert traffic(lambda: npu.npu_geglu(x)) == {"aclnnGeGluV3": (1, 96, 2 * 48)}
    assert traffic(lambda: npu.npu_gelu(x)) == {"aclnnGeluV2": (1, 96, 96)}


def test_what_is_not_emulated_fails_by_name():
    with pytest.raises(RuntimeError, match="aclnnClippedSwiglu"):
        npu.npu_clipped_swiglu(randn(3, 8))
