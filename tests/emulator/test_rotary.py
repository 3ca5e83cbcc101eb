"""Rotary embeddings against rotations of the complex plane, in float64."""

import pytest
import torch
from emulator.definitions import FLOATS, close, exact, npu, randn, refused, traffic, uninitialised

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# x, cos: every layout that is allowed
HALF_SHAPES = [
    ((2, 3, 5, 32), (1, 1, 5, 32)),  # BNSD, 11SD
    ((2, 3, 5, 8), (2, 1, 5, 8)),  # BNSD, B1SD
    ((2, 5, 3, 8), (1, 5, 1, 8)),  # BSND, 1S1D
    ((2, 5, 3, 8), (2, 5, 1, 8)),  # BSND, BS1D
    ((5, 2, 3, 8), (5, 1, 1, 8)),  # SBND, S11D
    ((5, 2, 3, 8), (5, 2, 1, 8)),  # SBND, SB1D
    ((2, 3, 5, 8), (2, 3, 5, 8)),
    ((7, 3, 8), (7, 1, 8)),  # TND, T1D
    ((7, 3, 8), (7, 3, 8)),
    ((1, 9, 1, 2), (1, 1, 1, 2)),  # decoding: a sequence of one
    ((3, 1, 4, 123 * 2), (1, 1, 4, 123 * 2)),
    ((0, 3, 5, 8), (1, 1, 5, 8)),
]
INTERLEAVE_SHAPES = [shapes for shapes in HALF_SHAPES if shapes[1].count(1) >= len(shapes[1]) - 2]


def rotate(x, cos, sin, mode):
    """x * cos plus x turned by a quarter * sin, where a pair of elements (a, b) is the complex number a + ib."""
    half = mode == "half"
    turned = torch.complex(*(x.chunk(2, -1) if half else (x[..., ::2], x[..., 1::2]))) * 1j
    turned = torch.cat([turned.real, turned.imag], -1) if half else torch.view_as_real(turned).flatten(-2)
    return x * cos + turned * sin


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "mode, shapes", [("half", s) for s in HALF_SHAPES] + [("interleave", s) for s in INTERLEAVE_SHAPES], ids=str
)
def test_rotary_mul_and_its_gradients(mode, shapes, dtype):
    x, cos, sin = (randn(*s, dtype=dtype, grad=True, seed=i) for i, s in enumerate([shapes[0], shapes[1], shapes[1]]))
    y = npu.npu_rotary_mul(x, cos, sin, mode)
    wide = exact(x, cos, sin)
    expected = rotate(*wide, mode)
    close(y, expected, scale=10.0)  # a sum of two products of values below 4
    dy = randn(*shapes[0], dtype=dtype, seed=3)
    y.backward(dy)
    expected.backward(exact(dy))
    close(x.grad, wide[0].grad, scale=10.0)
    terms = x.numel() // max(cos.numel(), 1)  # dcos and dsin are sums over what cos is broadcast to
    for actual, correct in ((cos.grad, wide[1].grad), (sin.grad, wide[2].grad)):
        close(actual, correct, steps=16 + terms, scale=40.0)


def test_tables_are_rounded_to_the_dtype_of_x():
    x, cos, sin = randn(2, 3, 5, 8, dtype=BF16), randn(2, 1, 5, 8), randn(2, 1, 5, 8, seed=1)
    expected = rotate(exact(x), exact(cos.bfloat16()), exact(sin.bfloat16()), "half")
    close(npu.npu_rotary_mul(x, cos, sin), expected, scale=10.0)


def test_rotation_matrix():
    x, cos, sin, matrix = (randn(*s, seed=i) for i, s in enumerate([(2, 3, 5, 8), (2, 1, 5, 8), (2, 1, 5, 8), (8, 8)]))
    expected = exact(x) * exact(cos) + exact(x) @ exact(matrix) * exact(sin)
    close(npu.npu_rotary_mul(x, cos, sin, "half", matrix), expected, scale=100.0)  # sums of 8 products, times sin


def test_gradients_of_constant_tables_stay_uninitialised():
    x, cos = randn(2, 3, 5, 8, grad=True), randn(2, 1, 5, 8)
    _, dcos, dsin = npu.npu_rotary_mul_backward(randn(2, 3, 5, 8), x.detach(), cos, cos)
    assert uninitialised(dcos) and uninitialised(dsin)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout, lead", [("BSND", (2, 5)), ("TND", (7,)), ("BSND", (1, 1))], ids=str)
@pytest.mark.parametrize("width", [64, 128])
def test_apply_rotary_pos_emb_writes_in_place(layout, lead, width, dtype):
    q, k = randn(*lead, 4, width, dtype=dtype), randn(*lead, 2, width, dtype=dtype, seed=1)
    cos, sin = randn(*lead, 1, width, dtype=dtype, seed=2), randn(*lead, 1, width, dtype=dtype, seed=3)
    expected = [rotate(exact(x), exact(cos), exact(sin), "half") for x in (q, k)]
    returned = npu.npu_apply_rotary_pos_emb(q, k, cos, sin, layout)
    for x, out, correct in zip((q, k), returned, expected, strict=True):
        assert out.data_ptr() == x.data_ptr()
        # float16 is kept between the steps: each of the two products is rounded by half an ulp before the sum is.
        close(x, correct, steps=16 if dtype != FP16 else 2.0**24 * torch.finfo(FP16).eps, scale=10.0)


def rotary(x, cos, mode="half", dtype=FP32, grad=False):
    x, cos, sin = (
        randn(*x, dtype=dtype, grad=grad),
        randn(*cos, dtype=dtype, grad=grad),
        randn(*cos, dtype=dtype, seed=1),
    )
    return npu.npu_rotary_mul(x, cos, sin, mode)


def by_matrix(matrix):
    return npu.npu_rotary_mul(randn(2, 3, 5, 8), randn(2, 1, 5, 8), randn(2, 1, 5, 8), "half", matrix)


def apply(q=(2, 5, 4, 64), k=(2, 5, 2, 64), cos=(2, 5, 1, 64), layout="BSND", mode="half", dtypes=(FP32, FP32)):
    table = randn(*cos, dtype=dtypes[1])
    return npu.npu_apply_rotary_pos_emb(
        randn(*q, dtype=dtypes[0]), randn(*k, dtype=dtypes[0]), table, table, layout, mode
    )


ROTARY, APPLY = "aclnnRotaryPositionEmbeddingV2", "aclnnApplyRotaryPosEmbV2"
REFUSALS = {
    "561002, aligned": (lambda: rotary((2, 5, 1, 64), (1, 1, 1, 64)), ROTARY, "561002"),
    "561002, aligned, bf16": (lambda: rotary((4, 11, 5, 64), (1, 1, 5, 64), dtype=BF16), ROTARY, "561002"),
    "561002, unaligned": (lambda: rotary((2, 2, 336, 72), (1, 1, 336, 72)), ROTARY, "561002"),
    "width 896": (lambda: rotary((2, 3, 5, 896), (2, 1, 5, 896)), ROTARY, "even and below 896, not 896"),
    "odd width": (lambda: rotary((2, 3, 5, 7), (2, 1, 5, 7)), ROTARY, "even and below 896, not 7"),
    "cos width": (lambda: rotary((2, 3, 5, 8), (2, 1, 5, 4)), ROTARY, "must have that of x"),
    "cos rank": (lambda: rotary((2, 3, 5, 8), (5, 8)), ROTARY, "as many dimensions as x"),
    "five dimensions": (lambda: rotary((1, 2, 3, 5, 8), (1, 2, 1, 5, 8)), ROTARY, "3 \\(TND\\) or 4 dimensions"),
    "cos not broadcastable": (lambda: rotary((2, 3, 5, 8), (2, 1, 4, 8)), ROTARY, "not broadcastable"),
    "cos per head": (lambda: rotary((2, 3, 5, 8), (1, 3, 5, 8)), ROTARY, "cos of shape \\[1, 3, 5, 8\\]"),
    "cos for every position": (
        lambda: rotary((2, 3, 5, 8), (1, 1, 1, 8)),
        ROTARY,
        "must have the sequence length of x",
    ),
    "interleave, per batch": (
        lambda: rotary((2, 3, 5, 8), (2, 1, 5, 8), "interleave"),
        ROTARY,
        "shared by batch and heads",
    ),
    "interleave, B * N": (lambda: rotary((40, 25, 2, 2), (1, 1, 2, 2), "interleave"), ROTARY, "B \\* N < 1000"),
    "heads": (lambda: rotary((1, 1000, 2, 2), (1, 1, 2, 2)), ROTARY, "B < 1000 and N < 1000"),
    "quarter": (lambda: rotary((2, 3, 5, 8), (2, 1, 5, 8), "quarter"), "", "should be half or interleave"),
    "gradients of cos, B * N": (
        lambda: rotary((25, 41, 2, 2), (25, 1, 2, 2), grad=True).sum().backward(),
        "aclnnRotaryPositionEmbeddingGrad",
        "B \\* N <= 1024",
    ),
    "sin shape": (
        lambda: npu.npu_rotary_mul(randn(2, 3, 5, 8), randn(2, 1, 5, 8), randn(1, 1, 5, 8)),
        ROTARY,
        "sin and cos must have the same shape",
    ),
    "float64": (lambda: rotary((2, 3, 5, 8), (2, 1, 5, 8), dtype=torch.float64), ROTARY, "x must be one of"),
    "matrix shape": (lambda: by_matrix(randn(8, 4)), ROTARY, "rotate must be of shape \\[8, 8\\]"),
    "matrix dtype": (lambda: by_matrix(randn(8, 8, dtype=BF16)), ROTARY, "rotate and x must have the same dtype"),
    "apply, width": (
        lambda: apply((2, 5, 4, 32), (2, 5, 2, 32), (2, 5, 1, 32)),
        APPLY,
        "head dimension must be 64 or 128, not 32",
    ),
    "apply, broadcast": (lambda: apply(cos=(1, 5, 1, 64)), APPLY, "no broadcast"),
    "apply, layout": (lambda: apply(layout="BNSD"), APPLY, "layout"),
    "apply, rank": (lambda: apply(layout="TND"), APPLY, "must be TND"),
    "apply, mode": (lambda: apply(mode="interleave"), APPLY, "rotary_mode must be half"),
    "apply, dtypes": (lambda: apply(dtypes=(BF16, FP32)), APPLY, "must have the same dtype"),
    "apply, lengths": (lambda: apply(k=(2, 6, 2, 64)), APPLY, "may differ in the number of heads only"),
}


@pytest.mark.parametrize("rule", REFUSALS)
def test_refuses(rule):
    call, op, message = REFUSALS[rule]
    with refused(op, message):
        call()


@pytest.mark.parametrize(
    "x, cos",
    [
        ((1, 40, 5, 64), (1, 1, 5, 64)),
        ((4, 10, 5, 64), (1, 1, 5, 64)),
        ((4, 11, 5, 64), (4, 1, 5, 64)),
        ((2, 2, 337, 72), (1, 1, 337, 72)),  # 48 cores: 8 positions each
        ((2, 2, 5, 88), (1, 1, 5, 88)),
    ],
    ids=str,
)
def test_the_neighbours_of_561002_work(x, cos):
    assert rotary(x, cos).isfinite().all()


def test_traffic():
    x, table = randn(2, 3, 5, 8, dtype=BF16), randn(2, 1, 5, 8, dtype=BF16)
    assert traffic(lambda: npu.npu_rotary_mul(x, table, table)) == {ROTARY: (1, 480 + 2 * 160, 480)}
    q, k, cos = randn(2, 5, 4, 64, dtype=BF16), randn(2, 5, 2, 64, dtype=BF16), randn(2, 5, 1, 64, dtype=BF16)
    in_place = 5120 + 2560
    assert traffic(lambda: npu.npu_apply_rotary_pos_emb(q, k, cos, cos)) == {APPLY: (1, in_place + 2 * 1280, in_place)}
