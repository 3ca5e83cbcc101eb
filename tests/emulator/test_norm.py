"""aclnnRmsNorm and its relatives against torch.nn.functional.rms_norm in float64."""

import pytest
import torch
import torch.nn.functional as F
from emulator.definitions import FLOATS, close, exact, npu, randn, refused, traffic

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# x, gamma
SHAPES = [((1, 1), (1,)), ((7, 123), (123,)), ((2, 3, 64), (64,)), ((5, 4, 6), (4, 6)), ((8,), (8,)), ((0, 8), (8,))]
PAIRS = [(FP32, FP32), (BF16, BF16), (FP16, FP16), (BF16, FP32), (FP16, FP32)]


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_rms_norm_and_its_gradients(shapes, dtypes):
    x, gamma = randn(*shapes[0], dtype=dtypes[0], grad=True), randn(*shapes[1], dtype=dtypes[1], grad=True, seed=1)
    y, rstd = npu.npu_rms_norm(x, gamma, 1e-5)
    wide_x, wide_gamma = exact(x, gamma)
    expected = F.rms_norm(wide_x, shapes[1], wide_gamma, 1e-5)
    close(y, expected)
    dims = tuple(range(-len(shapes[1]), 0))
    assert rstd.dtype == torch.float32
    close(rstd, (wide_x.square().mean(dims, keepdim=True) + 1e-5).rsqrt())

    dy = randn(*shapes[0], dtype=dtypes[0], seed=2)
    y.backward(dy)
    expected.backward(exact(dy))
    # dx is a difference of two terms as large as dy * gamma * rstd; dgamma is a sum over rows.
    close(
        x.grad,
        wide_x.grad,
        scale=4 * (rstd.max().item() if rstd.numel() else 0) * exact(dy).abs().sum(dims, keepdim=True),
    )
    rows = x.numel() // max(gamma.numel(), 1)
    close(gamma.grad, wide_gamma.grad, steps=16 + rows, scale=10.0)
    assert gamma.grad.dtype == gamma.dtype


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_gemma_rms_norm(shapes, dtype):
    x, gamma = randn(*shapes[0], dtype=dtype), randn(*shapes[1], dtype=dtype, seed=1)
    y, _ = npu.npu_gemma_rms_norm(x, gamma, 1e-6)
    close(y, F.rms_norm(exact(x), shapes[1], 1 + exact(gamma), 1e-6))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(7, 123), (1, 1), (2, 3, 64), (0, 8)], ids=str)
def test_add_rms_norm_rounds_where_llama_does(shape, dtype):
    x1, x2, gamma = (randn(*s, dtype=dtype, seed=i) for i, s in enumerate([shape, shape, shape[-1:]]))
    y, rstd, x = npu.npu_add_rms_norm(x1, x2, gamma, 1e-6)
    total = (x1.cpu().double() + x2.cpu().double()).to(dtype)
    assert torch.equal(x.cpu(), total), "the residual is the exact sum, rounded once"
    normalized = F.rms_norm(total.double(), shape[-1:], None, 1e-6)
    close(rstd, (total.double().square().mean(-1, keepdim=True) + 1e-6).rsqrt())
    # The normalized value is rounded before gamma multiplies it, so it may lie half an ulp (and the float32 error) off.
    half_ulp = (torch.finfo(dtype).eps / 2 + 16 * 2.0**-24) * (normalized * exact(gamma)).abs()
    close(y, normalized * exact(gamma), steps=2.0**24, scale=half_ulp)
    # Where the float32 error crosses a rounding boundary, one element in a thousand or so, the product differs from the
    # one that is rounded twice in float64; with one rounding instead of two a quarter of a half-precision result would.
    twice_rounded = normalized.to(dtype) * gamma.cpu()
    assert dtype == FP32 or (y.cpu() != twice_rounded).sum() <= 0.02 * y.numel()


HALF, WIDE = {"dtype": BF16}, {"dtype": FP32}
RMS, GRAD, GEMMA, ADD = npu.npu_rms_norm, npu.npu_rms_norm_backward, npu.npu_gemma_rms_norm, npu.npu_add_rms_norm
REFUSALS = {
    "float32 x, bf16 gamma": (
        lambda: RMS(randn(3, 8), randn(8, **HALF)),
        "aclnnRmsNorm",
        "gamma of dtype BFloat16 is not supp",
    ),
    "f16 x, bf16 gamma": (
        lambda: RMS(randn(3, 8, dtype=FP16), randn(8, **HALF)),
        "aclnnRmsNorm",
        "gamma of dtype BFloat16",
    ),
    "float64 x": (lambda: RMS(randn(3, 8).double(), randn(8).double()), "aclnnRmsNorm", "x must be one of"),
    "gamma shape": (lambda: RMS(randn(3, 8), randn(7)), "aclnnRmsNorm", "must equal the trailing dimensions of x"),
    "gamma of one": (lambda: RMS(randn(3, 8), randn(1)), "aclnnRmsNorm", "must equal the trailing dimensions of x"),
    "nine dimensions": (lambda: RMS(randn(*[1] * 8, 8), randn(8)), "aclnnRmsNorm", "1 to 8 dimensions, not 9"),
    "dy dtype": (
        lambda: GRAD(randn(3, 8, **HALF), randn(3, 8), randn(8), randn(3, 1)),
        "aclnnRmsNormGrad",
        "dy and x must have the",
    ),
    "dy shape": (
        lambda: GRAD(randn(2, 8), randn(3, 8), randn(8), randn(3, 1)),
        "aclnnRmsNormGrad",
        "dy and x must have the same sh",
    ),
    "rstd dtype": (
        lambda: GRAD(randn(3, 8), randn(3, 8), randn(8), randn(3, 1, **HALF)),
        "aclnnRmsNormGrad",
        "rstd must be one of",
    ),
    "gemma, float32 gamma": (
        lambda: GEMMA(randn(3, 8, **HALF), randn(8)),
        "aclnnGemmaRmsNorm",
        "gamma and x must have the same d",
    ),
    "add, float32 gamma": (
        lambda: ADD(randn(3, 8, **HALF), randn(3, 8, **HALF), randn(8)),
        "aclnnAddRmsNorm",
        "gamma and x1 must",
    ),
    "add, float64": (lambda: ADD(*[randn(3, 8).double()] * 2, randn(8)), "aclnnAddRmsNorm", "x1 must be one of"),
    "add, dtypes": (
        lambda: ADD(randn(3, 8), randn(3, 8, **HALF), randn(8)),
        "aclnnAddRmsNorm",
        "x2 and x1 must have the same dtype",
    ),
    "add, shapes": (
        lambda: ADD(randn(3, 8), randn(1, 8), randn(8)),
        "aclnnAddRmsNorm",
        "x2 and x1 must have the same shape",
    ),
}


@pytest.mark.parametrize("rule", REFUSALS)
def test_refuses(rule):
    call, op, message = REFUSALS[rule]
    with refused(op, message):
        call()


def test_traffic():
    x, gamma = randn(6, 8, dtype=BF16), randn(8, dtype=BF16)
    assert traffic(lambda: RMS(x, gamma)) == {"aclnnRmsNorm": (1, 96 + 16, 96 + 24)}
    assert traffic(lambda: ADD(x, x, gamma)) == {"aclnnAddRmsNorm": (1, 2 * 96 + 16, 2 * 96 + 24)}
    # A strided input costs a copy, and an expanded one is read once by it.
    assert traffic(lambda: RMS(randn(8, 6, dtype=BF16).t(), gamma)) == {
        "aclnnContiguous": (1, 96, 96),
        "aclnnRmsNorm": (1, 96 + 16, 96 + 24),
    }
    assert traffic(lambda: RMS(x[:1].expand(6, 8), gamma))["aclnnContiguous"] == (1, 16, 96)
