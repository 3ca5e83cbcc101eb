"""Flash attention, one query row at a time in float64, with gradients by autograd."""

import itertools

import npu_emulator
import pytest
import torch
import torch.nn.functional as F
from emulator.definitions import FLOATS, HALVES, close, exact, ints, npu, randn, refused, traffic, uninitialised

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
LAYOUTS = ["BNSD", "BSND", "BSH", "SBH"]
TRIANGLE = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
# What rounding can do, relative to the largest value: scores and outputs are sums of up to 64 products in float32.
# The backward reads the attention output, which was rounded to the dtype: half an ulp enters every gradient of a score.
FORWARD = {"steps": 200, "scale": 4.0}


def backward_bound(dtype):
    return {"steps": 400 + 8 * 2.0**24 * torch.finfo(dtype).eps / 2, "scale": 4.0}


def attend(q, k, v, scale, allowed=None, pse=0.0):
    """[N, Sq, D], [Nkv, Skv, D]: softmax of scale * (q k + pse) over the `allowed` keys; zero where there is none."""
    share = len(q) // len(k)
    k, v = (x.repeat_interleave(share, 0) for x in (k, v))
    scores = scale * (torch.einsum("nqd,nkd->nqk", q, k) + pse)
    if allowed is None:
        return torch.einsum("nqk,nkd->nqd", scores.softmax(-1), v)
    weights = (
        scores.masked_fill(~allowed, -torch.inf).exp()
        if not allowed.any()
        else torch.where(allowed, scores, -torch.inf).softmax(-1)
    )
    return torch.einsum("nqk,nkd->nqd", weights.nan_to_num(0.0), v)


def to_layout(x, layout):
    """[B, N, S, D] in another layout."""
    if layout == "BNSD":
        return x
    if layout == "BSND":
        return x.transpose(1, 2).contiguous()
    return x.transpose(1, 2).flatten(2) if layout == "BSH" else x.permute(2, 0, 1, 3).flatten(2)


def check(shapes, layout, dtype, allowed=None, pse=None, **kwargs):
    """Forward and backward of q, k, v of BNSD `shapes` against `attend`; `allowed` is [B or 1, N or 1, Sq, Skv]."""
    bnsd = [randn(*s, dtype=dtype, seed=i) for i, s in enumerate(shapes)]
    inputs = [to_layout(x, layout).detach().requires_grad_() for x in bnsd]
    scale = shapes[0][-1] ** -0.5
    out, maximum, total, *_ = npu.npu_fusion_attention(*inputs, shapes[0][1], layout, pse=pse, scale=scale, **kwargs)
    q, k, v = wide = [exact(x).requires_grad_() for x in bnsd]
    wide_pse = exact(pse)
    batches = range(len(q))
    pick = lambda x, b: None if x is None else x[b if len(x) > 1 else 0]
    expected = torch.stack(
        [attend(q[b], k[b], v[b], scale, pick(allowed, b), 0.0 if pse is None else pick(wide_pse, b)) for b in batches]
    )
    close(out, to_layout(expected, layout), **FORWARD)
    assert out.dtype == dtype and maximum.dtype == total.dtype == FP32

    dout = randn(*shapes[0][:3], shapes[2][-1], dtype=dtype, seed=9)
    out.backward(to_layout(dout, layout))
    expected.backward(exact(dout))
    for actual, correct in zip(inputs, wide, strict=True):
        close(actual.grad, to_layout(correct.grad, layout), **backward_bound(dtype))
    if pse is not None:
        close(pse.grad, wide_pse.grad, **backward_bound(dtype))
    return maximum, total, expected


def self_attention(b=2, n=2, s=5, d=8, kv=None, skv=None, dv=None):
    return (b, n, s, d), (b, kv or n, skv or s, d), (b, kv or n, skv or s, dv or d)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    "shapes",
    [
        self_attention(),
        self_attention(1, 1, 1, 1),
        self_attention(n=6, kv=2, s=7, d=16, skv=3),
        self_attention(s=1, skv=123),
        self_attention(dv=4),
    ],
    ids=str,
)
def test_dense_layouts_shared_heads_and_gradients(shapes, layout, dtype):
    check(shapes, layout, dtype)


def band(sq, skv, before, after, corner="left up"):
    """True where query i sees key j: j - i within [-before, after], counted from a corner of the matrix."""
    distance = torch.arange(skv) - torch.arange(sq).unsqueeze(1) - (skv - sq if corner == "right down" else 0)
    return ((distance >= -before) & (distance <= after)).view(1, 1, sq, skv)


FAR = 2147483647
# sparse_mode, allowed(sq, skv), keyword arguments
MODES = {
    "2, left-up causal": lambda sq, skv: (2, band(sq, skv, FAR, 0), {}),
    "3, right-down causal": lambda sq, skv: (3, band(sq, skv, FAR, 0, "right down"), {}),
    "4, band": lambda sq, skv: (4, band(sq, skv, 2, 1, "right down"), {"pre_tockens": 2, "next_tockens": 1}),
}


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("sq, skv", [(5, 5), (3, 7), (7, 3)])
@pytest.mark.parametrize("mode", MODES)
def test_compressed_masks(mode, sq, skv, dtype):
    sparse_mode, allowed, kwargs = MODES[mode](sq, skv)
    check(
        self_attention(s=sq, skv=skv),
        "BNSD",
        dtype,
        allowed,
        atten_mask=TRIANGLE.npu(),
        sparse_mode=sparse_mode,
        **kwargs,
    )


@pytest.mark.parametrize("shape", [(2, 2, 5, 7), (2, 1, 5, 7), (1, 1, 5, 7), (5, 7)], ids=str)
@pytest.mark.parametrize("sparse_mode", [0, 1])
def test_full_masks(sparse_mode, shape):
    masked = torch.rand(shape, generator=torch.Generator().manual_seed(0)) < 0.4
    masked[..., 0] = False
    kwargs = {"atten_mask": masked.npu(), "sparse_mode": sparse_mode}
    allowed = ~masked.view((1,) * (4 - masked.dim()) + shape)
    check(self_attention(skv=7), "BSND", BF16, allowed, **kwargs)
    kwargs["atten_mask"] = masked.to(torch.uint8).npu()
    if sparse_mode == 0:  # and the band between pre_tockens and next_tockens, which mode 1 does not look at
        allowed = allowed & band(5, 7, 4, 2)
    check(self_attention(skv=7), "BSND", BF16, allowed, pre_tockens=4, next_tockens=2, **kwargs)


@pytest.mark.parametrize("inner_precise", [0, 2])
def test_rows_that_see_no_key(inner_precise):
    q, k, v = (randn(*s, seed=i) for i, s in enumerate(self_attention(1, 1, 2, 8)))
    mask = torch.tensor([[True, True], [False, True]]).npu()
    out = npu.npu_fusion_attention(q, k, v, 1, "BNSD", atten_mask=mask, inner_precise=inner_precise)[0]
    expected = exact(v)[0, 0].mean(0) if inner_precise == 0 else torch.zeros(8, dtype=torch.float64)
    close(out[0, 0, 0], expected, **FORWARD)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", [(2, 2, 5, 7), (1, 2, 5, 7), (2, 2, 1, 7)], ids=str)
def test_position_encodings_are_added_before_the_scale(shape, dtype):
    check(self_attention(skv=7), "BNSD", dtype, pse=randn(*shape, dtype=dtype, grad=True, seed=5))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_softmax_statistics_are_repeated_eight_times(layout):
    shapes = self_attention(n=4, kv=2)
    maximum, total, _ = check(shapes, layout, FP32)
    assert maximum.shape == total.shape == (2, 4, 5, 8)
    q, k = (exact(randn(*shapes[i], seed=i)) for i in (0, 1))
    scores = 8**-0.5 * torch.einsum("bnqd,bnkd->bnqk", q, k.repeat_interleave(2, 1))
    top = scores.amax(-1, keepdim=True)
    close(maximum, top.expand(2, 4, 5, 8), **FORWARD)
    close(total, (scores - top).exp().sum(-1, keepdim=True).expand(2, 4, 5, 8), steps=200, scale=10.0)


def packed(lengths_q, lengths_kv, dtype, n=4, kv=2, d=8, extra=0):
    shapes = [(sum(lengths_q) + extra, n, d), (sum(lengths_kv), kv, d), (sum(lengths_kv), kv, d)]
    return [randn(*s, dtype=dtype, grad=True, seed=i) for i, s in enumerate(shapes)]


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("softmax_layout", ["", "TND"])
@pytest.mark.parametrize("causal", [False, True], ids=["", "causal"])
@pytest.mark.parametrize("lengths", [[2, 3], [1], [4, 0, 3], [5, 0, 0], [0, 7, 1]], ids=str)
def test_packed_sequences(lengths, causal, softmax_layout, dtype):
    q, k, v = packed(lengths, lengths, dtype)
    ends = list(itertools.accumulate(lengths))
    mask = {"atten_mask": TRIANGLE.npu(), "sparse_mode": 3} if causal else {}
    call = {"actual_seq_qlen": ends, "actual_seq_kvlen": ends, "softmax_layout": softmax_layout}
    out, maximum, *_ = npu.npu_fusion_attention(q, k, v, 4, "TND", scale=0.3, **call, **mask)
    wide = exact(q, k, v)
    parts, tops = [], []
    for a, b, c in zip(*(x.split(lengths) for x in wide), strict=True):
        a, b, c = (x.transpose(0, 1) for x in (a, b, c))
        size = a.shape[1]
        allowed = band(size, size, FAR, 0)[0] if causal else None
        parts.append(attend(a, b, c, 0.3, allowed).transpose(0, 1))
        scores = 0.3 * a @ b.repeat_interleave(2, 0).transpose(1, 2)
        scores = scores if allowed is None else scores.masked_fill(~allowed, -torch.inf)
        tops.append(scores.amax(-1) if size else scores.new_zeros(4, 0))
    expected = torch.cat(parts)
    close(out, expected, **FORWARD)
    # By default each sequence's statistics are a block of [N, S, 8] in the memory of [T, N, 8].
    tops = torch.cat([top.t() if softmax_layout else top.reshape(-1, 4) for top in tops])
    close(maximum, tops.unsqueeze(-1).expand(-1, -1, 8), **FORWARD)
    dout = randn(*out.shape, dtype=dtype, seed=9)
    out.backward(dout)
    expected.backward(exact(dout))
    for actual, correct in zip((q, k, v), wide, strict=True):
        close(actual.grad, correct.grad, **backward_bound(dtype))


def test_trailing_sequences_written_as_zero_take_no_part():
    q, k, v = packed([2, 3], [2, 3], FP32, extra=2)
    call = {"actual_seq_qlen": [2, 5, 0, 0], "actual_seq_kvlen": [2, 5, 0, 0]}
    out = npu.npu_fusion_attention(q, k, v, 4, "TND", **call)[0]
    shorter = npu.npu_fusion_attention(q[:5], k, v, 4, "TND", actual_seq_qlen=[2, 5], actual_seq_kvlen=[2, 5])[0]
    assert torch.equal(out[:5], shorter) and uninitialised(out[5:])


def test_gradients_come_from_the_statistics_that_are_passed():
    """Ring attention passes the statistics of the whole row beside a part of the keys."""
    q, k, v, dout = (randn(1, 2, 4, 8, seed=i) for i in range(4))
    out, maximum, total, *_ = npu.npu_fusion_attention(q, k, v, 2, "BNSD")
    call = {"softmax_max": maximum, "softmax_sum": total, "attention_in": out}
    whole = npu.npu_fusion_attention_grad(q, k, v, dout, 2, "BNSD", **call)
    halves = [
        npu.npu_fusion_attention_grad(q, k[:, :, part], v[:, :, part], dout, 2, "BNSD", **call)
        for part in (slice(2), slice(2, 4))
    ]
    close(halves[0][0] + halves[1][0], exact(whole[0]), **backward_bound(FP32))
    for i in (1, 2):
        close(torch.cat([halves[0][i], halves[1][i]], 2), exact(whole[i]), **backward_bound(FP32))


@pytest.mark.parametrize("lengths", [None, [2, 3]], ids=["dense", "packed"])
def test_third_version_takes_lengths_as_tensors(lengths):
    if lengths:
        q, k, v = packed(lengths, lengths, BF16)
        ends = [2, 5]
        kwargs, tensors = (
            {"actual_seq_qlen": ends, "actual_seq_kvlen": ends},
            {"actual_seq_qlen": torch.tensor(ends), "actual_seq_kvlen": torch.tensor(ends)},
        )
        layout = "TND"
    else:
        q, k, v = (randn(2, 4, 5, 8, dtype=BF16, grad=True, seed=i) for i in range(3))
        kwargs, tensors, layout = {}, {}, "BNSD"
    out = npu.npu_fusion_attention_v3(q, k, v, 4, layout, scale=0.3, **tensors)[0]
    assert torch.equal(out, npu.npu_fusion_attention(q, k, v, 4, layout, scale=0.3, **kwargs)[0])
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in (q, k, v))


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("case", ["plain", "causal", "bool mask"])
def test_scaled_dot_product_attention_reaches_it(case, dtype):
    q, k, v = inputs = [randn(2, 4, 6, 16, dtype=dtype, grad=True, seed=i) for i in range(3)]
    seen = torch.ones(6, 6, dtype=torch.bool).tril()
    kwargs = {"plain": {}, "causal": {"is_causal": True}, "bool mask": {"attn_mask": seen.npu()}}[case]
    ops = traffic(lambda: F.scaled_dot_product_attention(q, k, v, **kwargs))
    assert "aclnnFlashAttentionScore" in ops
    out = F.scaled_dot_product_attention(q, k, v, **kwargs)
    wide = exact(*inputs)
    expected = torch.stack([attend(*(x[b] for x in wide), 0.25, None if case == "plain" else seen) for b in range(2)])
    close(out, expected, **FORWARD)
    dout = randn(2, 4, 6, 16, dtype=dtype, seed=9)
    out.backward(dout)
    expected.backward(exact(dout))
    for actual, correct in zip(inputs, wide, strict=True):
        close(actual.grad, correct.grad, **backward_bound(dtype))


def fa(
    q=(2, 4, 5, 8), k=None, v=None, heads=4, layout="BNSD", dtypes=(BF16, BF16, BF16), mask=None, pse=None, **kwargs
):
    k = q if k is None else k
    tensors = [randn(*s, dtype=t) for s, t in zip((q, k, k if v is None else v), dtypes, strict=True)]
    mask = None if mask is None else torch.zeros(mask, dtype=kwargs.pop("mask_dtype", torch.bool)).npu()
    return npu.npu_fusion_attention(*tensors, heads, layout, atten_mask=mask, pse=pse, **kwargs)


def tnd(q_ends=(2, 5), kv_ends=(2, 5), **kwargs):
    return fa((5, 4, 8), layout="TND", actual_seq_qlen=list(q_ends), actual_seq_kvlen=list(kv_ends), **kwargs)


def gradient(dtype=BF16, **without):
    q, k, v = (randn(2, 4, 5, 8, dtype=BF16) for _ in range(3))
    out, maximum, total, *_ = npu.npu_fusion_attention(q, k, v, 4, "BNSD")
    saved = {"softmax_max": maximum, "softmax_sum": total, "attention_in": out, **without}
    return npu.npu_fusion_attention_grad(q, k, v, randn(2, 4, 5, 8, dtype=dtype), 4, "BNSD", **saved)


FA, TND, GRAD = "aclnnFlashAttentionScore", "aclnnFlashAttentionVarLenScore", "aclnnFlashAttentionScoreGrad"
COMPRESSED = (2048, 2048)
REFUSALS = {
    "dropout": (lambda: fa(keep_prob=0.9), "", "DropOutGenMask is not emulated"),
    "dropout mask": (
        lambda: fa(keep_prob=0.9, dropout_mask=ints([0] * 64, torch.uint8)),
        FA,
        "dropout .* is not emulated",
    ),
    "packed, short mask": (lambda: tnd(mask=(2, 2)), TND, "atten_mask must be \\[max Sq, max Skv\\]"),
    "layout": (lambda: fa(layout="NBSD"), "", "input_layout"),
    "padding_mask": (lambda: fa(padding_mask=randn(2, 2)), FA, "padding_mask is not supported"),
    "float64": (lambda: fa(dtypes=(torch.float64,) * 3), FA, "query must be one of"),
    "key dtype": (lambda: fa(dtypes=(BF16, FP16, BF16)), FA, "key and query must have the same dtype"),
    "value dtype": (lambda: fa(dtypes=(BF16, BF16, FP32)), FA, "value and query must have the same dtype"),
    "rank": (lambda: fa(layout="BSH"), FA, "must be 3-D in layout BSH"),
    "value shape": (lambda: fa(v=(2, 4, 6, 8)), FA, "key and value must have the same shape"),
    "value wider": (lambda: fa(v=(2, 4, 5, 16)), FA, "key and value must have the same shape"),
    "head_num": (lambda: fa(heads=2), FA, "head_num must be 1 to 256 and that of query, not 2 and 4"),
    "257 heads": (lambda: fa((1, 257, 1, 8), heads=257), FA, "head_num must be 1 to 256"),
    "hidden size": (
        lambda: fa((2, 5, 10), heads=4, layout="BSH"),
        FA,
        "hidden size 10 is not a multiple of head_num 4",
    ),
    "head dimension": (lambda: fa((1, 1, 2, 769), heads=1), FA, "head dimension must be 1 to 768, not 769"),
    "key width": (lambda: fa(k=(2, 4, 5, 4)), FA, "query and key must have the same head dimension"),
    "head ratio": (lambda: fa(k=(2, 3, 5, 8)), FA, "query heads 4 must be a multiple of key heads 3"),
    "batch": (lambda: fa(k=(3, 4, 5, 8)), FA, "same batch size, not 2 and 3"),
    "sparse_mode": (lambda: fa(mask=COMPRESSED, sparse_mode=6), FA, "sparse_mode 6 is not emulated"),
    "sparse_mode 5 of TND": (lambda: tnd(sparse_mode=5), "", "sparse_mode"),
    "mask dtype": (lambda: fa(mask=(5, 5), mask_dtype=FP32), FA, "atten_mask must be one of"),
    "mask shape": (lambda: fa(mask=(5, 6)), FA, "atten_mask must be \\[B or 1, N or 1, Sq, Skv\\] or"),
    "mask rank": (lambda: fa(mask=(2, 5, 5)), FA, "atten_mask must be \\[B or 1, N or 1, Sq, Skv\\] or"),
    "uncompressed mask": (lambda: fa(mask=(5, 5), sparse_mode=2), FA, "shape \\[2048, 2048\\]"),
    "no triangle": (lambda: fa(mask=COMPRESSED, sparse_mode=3), FA, "needs ones above the diagonal"),
    "pse dtype": (lambda: fa(pse=randn(2, 4, 5, 5)), FA, "pse and query must have the same dtype"),
    "pse shape": (lambda: fa(pse=randn(2, 1, 5, 5, dtype=BF16)), FA, "pse must be \\[B or 1, N, Sq or 1, Skv\\]"),
    "packed, pse": (lambda: tnd(pse=randn(1, 4, 5, 5, dtype=BF16)), TND, "pse in layout TND is not emulated"),
    "packed, mask": (lambda: tnd(mask=(1, 1, 5, 5)), TND, "atten_mask must be \\[max Sq, max Skv\\]"),
    "packed, no lengths": (lambda: fa((5, 4, 8), layout="TND"), "", "actual_seq"),
    "packed, other counts": (lambda: tnd((2, 5), (5,)), "", "must be the same"),
    "packed, too long": (lambda: tnd((2, 6)), TND, "actual_seq_qlen must be cumulative ends of at most 5"),
    "packed, decreasing": (lambda: tnd(kv_ends=(3, 2)), TND, "actual_seq_kvlen must be cumulative ends"),
    "gradient, dtype": (lambda: gradient(FP16), GRAD, "dy and query must have the same dtype"),
    "gradient, no maximum": (lambda: gradient(softmax_max=None), GRAD, "softmax_max is required"),
    "gradient, no output": (lambda: gradient(attention_in=None), GRAD, "attention_in is required"),
}


@pytest.mark.parametrize("rule", REFUSALS)
def test_refuses(rule):
    call, op, message = REFUSALS[rule]
    with refused(op, message):
        call()


def test_traffic():
    q, k = randn(2, 4, 5, 8, dtype=BF16), randn(2, 2, 3, 8, dtype=BF16)
    read, statistics = 2 * 640 // 2 + 2 * 192, 2 * (2 * 4 * 5 * 8 * 4)
    assert traffic(lambda: npu.npu_fusion_attention(q, k, k, 4, "BNSD")) == {FA: (1, read, statistics + 640)}
    # Of a compressed mask, the part that the sequences reach.
    masked = traffic(lambda: npu.npu_fusion_attention(q, k, k, 4, "BNSD", atten_mask=TRIANGLE.npu(), sparse_mode=2))
    assert masked[FA] == (1, read + 5 * 3, statistics + 640)


def test_skipped_attention_is_counted_and_zero():
    q, k, v = (randn(2, 4, 5, 8, dtype=BF16, grad=True, seed=i) for i in range(3))
    call = lambda: npu.npu_fusion_attention(q, k, v, 4, "BNSD")[0]
    computed = traffic(lambda: call().backward(torch.ones_like(q)))
    with npu_emulator.count(skip_matmuls=True) as skipped:
        out = call()
        out.backward(torch.ones_like(q))
    assert not out.any()
    counted = {op: (t.launches, t.bytes_read, t.bytes_written) for op, t in skipped.by_op.items()}
    assert counted[FA] == computed[FA] and counted[GRAD] == computed[GRAD]
