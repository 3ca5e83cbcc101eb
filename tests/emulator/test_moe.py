"""Token routing, by definitions that visit one (token, expert) pair after the other."""

import pytest
import torch
from emulator.definitions import FLOATS, close, exact, ints, npu, randn, refused, traffic, uninitialised

BF16, FP32, INT32 = torch.bfloat16, torch.float32, torch.int32
# T, K, experts, H
SIZES = [(7, 2, 4, 5), (1, 1, 1, 1), (123, 8, 16, 3), (5, 3, 64, 8), (0, 2, 4, 5)]


def choices(t, k, experts, seed=0):
    """[T, K] distinct experts of each token."""
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(t, experts, generator=generator).argsort(1)[:, :k]


def placed(indices):
    """The flat entries t * K + k in the order of their experts, equal experts by token."""
    flat = indices.flatten().tolist()
    return sorted(range(len(flat)), key=lambda entry: (flat[entry], entry))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kept", [None, 5, -2], ids=["all", "5", "all but 2"])
@pytest.mark.parametrize("t, k, experts, h", SIZES, ids=str)
def test_permute_and_unpermute(t, k, experts, h, kept, dtype):
    if kept is not None and t * k < 5:
        kept = None
    tokens, probs = randn(t, h, dtype=dtype, grad=True), randn(t, k, grad=True, seed=1)
    indices = choices(t, k, experts)
    permuted, rows = npu.npu_moe_token_permute(tokens, indices.npu(), kept)
    order = placed(indices)
    rows_kept = t * k if kept is None else kept if kept > 0 else t * k + kept
    assert rows.dtype == INT32
    assert [rows.cpu().tolist().index(p) for p in range(t * k)] == order
    assert torch.equal(permuted.cpu(), tokens.cpu()[[entry // k for entry in order[:rows_kept]]])

    merged = npu.npu_moe_token_unpermute(permuted, rows, probs)
    wide_tokens, wide_probs = exact(tokens, probs)
    weight = torch.zeros(t * k, dtype=torch.float64)
    weight[order[:rows_kept]] = 1  # entries whose row was dropped count nothing
    expected = wide_tokens * (wide_probs * weight.view(t, k)).sum(1, keepdim=True)
    assert merged.dtype == dtype
    close(merged, expected, steps=16 + k, scale=20.0)  # sums of K products of values below 5
    dy = randn(t, h, dtype=dtype, seed=2)
    merged.backward(dy)
    expected.backward(exact(dy))
    # dprobs are sums of H products. The K gradients that meet in dtokens were rounded to the dtype, half an ulp of 20
    # each.
    close(probs.grad, wide_probs.grad, steps=16 + h, scale=20.0)
    close(tokens.grad, wide_tokens.grad, steps=16 + k + k * 2.0**24 * torch.finfo(dtype).eps / 2, scale=20.0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_indices_of_one_dimension_and_no_probs(dtype):
    tokens = randn(7, 5, dtype=dtype, grad=True)
    experts = [2, 0, 1, 0, 2, 2, 0]
    permuted, rows = npu.npu_moe_token_permute(tokens, ints(experts, INT32))
    back = npu.npu_moe_token_unpermute(permuted, rows)
    assert torch.equal(back, tokens)
    dy = randn(7, 5, dtype=dtype, seed=1)
    back.backward(dy)
    assert torch.equal(tokens.grad, dy)


def test_no_probs_merges_nothing():
    tokens, indices = randn(3, 5), choices(3, 2, 4)
    permuted, rows = npu.npu_moe_token_permute(tokens, indices.npu())
    assert torch.equal(npu.npu_moe_token_unpermute(permuted, rows), tokens.repeat_interleave(2, 0))


@pytest.mark.parametrize("dtype", FLOATS)
def test_gradient_calls_by_themselves(dtype):
    rows, dpermuted, probs = ints([3, 0, 2, 1], INT32), randn(4, 5, dtype=dtype), randn(2, 2, seed=1)
    dtokens = npu.npu_moe_token_permute_grad_v2(dpermuted, rows, 2, dtype, 2)
    wide = exact(dpermuted)
    close(dtokens, torch.stack([wide[3] + wide[0], wide[2] + wide[1]]))
    # Entry 0 points beyond the three rows: it was dropped, and gets no gradient.
    dmerged, permuted = randn(2, 5, dtype=dtype), randn(3, 5, dtype=dtype, seed=2)
    dpermuted, dprobs = npu.npu_moe_token_unpermute_grad_v2(dmerged, rows, 3, dtype, probs, permuted_tokens=permuted)
    d, p, w = exact(dmerged), exact(permuted), exact(probs)
    close(dpermuted, torch.stack([d[0] * w[0, 1], d[1] * w[1, 1], d[1] * w[1, 0]]), scale=20.0)
    close(dprobs, torch.stack([torch.zeros(()), d[0] @ p[0], d[1] @ p[2], d[1] @ p[1]]).double().view(2, 2), scale=60.0)
    # Rows that no entry points to stay uninitialised.
    dpermuted, _ = npu.npu_moe_token_unpermute_grad_v2(dmerged, ints([0, 2], INT32), 3, dtype)
    assert uninitialised(dpermuted[1]) and torch.equal(dpermuted[[0, 2]], dmerged)


@pytest.mark.parametrize("active", [3, 100])
def test_init_and_finalize_routing_of_the_first_generation(active):
    t, k, experts, h = 5, 2, 4, 3
    x, indices, scales = randn(t, h), choices(t, k, experts), randn(t, k, seed=1)
    columns = torch.arange(t * k, dtype=INT32).view(k, t).t().contiguous()
    expanded, row_idx, expert_idx = npu.npu_moe_init_routing(x, columns.npu(), indices.int().npu(), active)
    order = placed(indices)
    rows = min(t, active) * k
    assert torch.equal(expanded.cpu(), x.cpu()[[entry // k for entry in order[:rows]]])
    assert expert_idx.tolist() == [indices.flatten()[entry] for entry in order]
    for place, entry in enumerate(order):  # numbered by columns: k * T + t
        assert row_idx[entry % k * t + entry // k] == place
    if rows < t * k:
        return
    skip1, skip2, bias = randn(t, h, seed=2), randn(t, h, seed=3), randn(experts, h, seed=4)
    out = npu.npu_moe_finalize_routing(expanded, skip1, skip2, bias, scales, row_idx, indices.int().npu(), 0)
    summed = (exact(scales).unsqueeze(-1) * (exact(x).unsqueeze(1) + exact(bias)[indices])).sum(1)
    close(out, exact(skip1) + exact(skip2) + summed, scale=40.0)
    ends = npu.npu_moe_compute_expert_tokens(expert_idx, experts)
    assert ends.tolist() == torch.bincount(indices.flatten(), minlength=experts).cumsum(0).tolist()


def init_routing(x, indices, experts, begin=0, end=None, **kwargs):
    defaults = {
        "active_num": -1,
        "expert_num": experts,
        "expert_tokens_num_type": 1,
        "expert_tokens_num_flag": True,
        "quant_mode": -1,
    }
    return npu.npu_moe_init_routing_v2(
        x, indices.int().npu(), active_expert_range=[begin, end or experts], **{**defaults, **kwargs}
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("active_num", [-1, 0, 3])
@pytest.mark.parametrize("span", [(0, 4), (1, 3)], ids=str)
def test_init_routing_v2(span, active_num, dtype):
    t, k, experts, h = 7, 2, 4, 5
    x, indices, scale = randn(t, h, dtype=dtype), choices(t, k, experts), randn(t, seed=1)
    order = [entry for entry in placed(indices) if span[0] <= indices.flatten()[entry] < span[1]]
    active = order if active_num <= 0 else order[:active_num]
    kwargs = {"scale": scale, "active_num": active_num}
    expanded, row_idx, tokens, expanded_scale = init_routing(x, indices, experts, *span, **kwargs)
    assert torch.equal(expanded[: len(active)].cpu(), x.cpu()[[entry // k for entry in active]])
    assert torch.equal(expanded_scale[: len(active)].cpu(), scale.cpu()[[entry // k for entry in active]])
    # Rows beyond the active ones hold nothing; the numbering goes on to the last one in the range.
    assert uninitialised(expanded[len(active) :]) and uninitialised(expanded_scale[len(active) :])
    assert row_idx.tolist() == [order.index(entry) if entry in order else -1 for entry in range(t * k)]
    counts = torch.bincount(indices.flatten(), minlength=experts)[slice(*span)]
    assert tokens.dtype == torch.int64 and tokens.tolist() == counts.tolist()
    _, scattered, cumulative, _ = init_routing(
        x, indices, experts, *span, row_idx_type=1, expert_tokens_num_type=0, **kwargs
    )
    assert scattered[: len(order)].tolist() == order and uninitialised(scattered[len(order) :])
    assert cumulative.tolist() == counts.cumsum(0).tolist()
    _, _, silent, no_scale = init_routing(x, indices, experts, *span, expert_tokens_num_flag=False)
    assert uninitialised(silent) and uninitialised(no_scale)


def test_init_routing_v2_key_value_counts():
    indices = torch.tensor([[3, 1], [3, 1], [3, 0]])
    _, _, tokens, _ = init_routing(randn(3, 2), indices, 4, 1, 4, expert_tokens_num_type=2)
    assert tokens.tolist() == [[1, 2], [3, 3], [0, 0], [0, 0]]


def test_init_routing_v2_with_a_capacity():
    indices, x = torch.tensor([[1, 0], [1, 2], [1, 0]]), randn(3, 4)
    expanded, row_idx, counts, _ = init_routing(x, indices, 3, drop_pad_mode=1, expert_capacity=2)
    assert row_idx.tolist() == [2, 0, 3, 4, -1, 1], "expert * capacity + slot, or -1 beyond the capacity"
    assert counts.tolist() == [2, 3, 1], "counted before dropping"
    for expert, tokens in enumerate([[0, 2], [0, 1], [1]]):
        assert torch.equal(expanded[expert, : len(tokens)], x[tokens])
    assert not expanded[2, 1].any()
    scales = randn(3, 2, seed=1)
    out = npu.npu_moe_finalize_routing(expanded, None, None, None, scales, row_idx, None, 3)
    weight = exact(scales) * torch.tensor([[1, 1], [1, 1], [0, 1]])
    close(out, exact(x) * weight.sum(1, keepdim=True), scale=20.0)


@pytest.mark.parametrize("dtype", FLOATS)
def test_finalize_routing_by_rows(dtype):
    rows, scales, bias = randn(6, 5, dtype=dtype), randn(3, 2, dtype=dtype, seed=1), randn(4, 5, dtype=dtype, seed=2)
    index, experts = torch.tensor([[5, -1], [0, 2], [1, 4]]), torch.tensor([[0, 3], [1, 2], [3, 0]])
    picked = torch.where(index.unsqueeze(-1) >= 0, exact(rows)[index], 0.0) + exact(bias)[experts]  # -1 keeps the bias
    expected = (exact(scales).unsqueeze(-1) * picked).sum(1)
    by_rows, by_columns = index.flatten().int().npu(), index.t().flatten().int().npu()
    for mode, flat in ((2, by_rows), (0, by_columns)):
        close(
            npu.npu_moe_finalize_routing(rows, None, None, bias, scales, flat, experts.int().npu(), mode),
            expected,
            scale=60.0,
        )
    close(npu.npu_moe_finalize_routing(rows, None, None, None, None, ints([2, 0], INT32), None, 2), exact(rows)[[2, 0]])


def half(*shape):
    return randn(*shape, dtype=BF16)


def double(*shape):
    return randn(*shape).double()


def permute(tokens=None, k=2, dtype=torch.int64, rows=3, **kwargs):
    return npu.npu_moe_token_permute(
        randn(3, 4) if tokens is None else tokens, torch.zeros(rows, k, dtype=dtype).npu(), **kwargs
    )


def unpermute(rows=(0, 1, 2, 3, 4, 5), probs=(3, 2), dtype=INT32, probs_dtype=FP32, **kwargs):
    return npu.npu_moe_token_unpermute(randn(6, 4), ints(rows, dtype), randn(*probs, dtype=probs_dtype), **kwargs)


def init2(x=None, experts=4, **kwargs):
    return init_routing(randn(3, 4) if x is None else x, torch.tensor([[0, 1], [2, 3], [1, 2]]), experts, **kwargs)


def finalize(
    rows=None, row_idx=(0, 1, 2, 3, 4, 5), skip=(None, None), bias=None, scales=(3, 2), mode=2, dtype=INT32, k=1
):
    rows = randn(6, 4) if rows is None else rows
    return npu.npu_moe_finalize_routing(
        rows, *skip, bias, randn(*scales) if scales else None, ints(row_idx, dtype), None, mode, k
    )


def init1(dtype=INT32, active=3, shape=(3, 2)):
    return npu.npu_moe_init_routing(
        randn(3, 4), torch.zeros(shape, dtype=INT32).npu(), torch.zeros(3, 2, dtype=dtype).npu(), active
    )


PERMUTE, UNPERMUTE, UNPERMUTE_GRAD = "aclnnMoeTokenPermute", "aclnnMoeTokenUnpermute", "aclnnMoeTokenUnpermuteGrad"
INIT, INIT3, FINALIZE = "aclnnMoeInitRouting", "aclnnMoeInitRoutingV3", "aclnnMoeFinalizeRoutingV4"
REFUSALS = {
    "permute, padded": (lambda: permute(padded_mode=True), PERMUTE, "padded_mode=True is not supported"),
    "permute, K": (lambda: permute(k=513), PERMUTE, "K must be at most 512, not 513"),
    "permute, dtype": (lambda: permute(dtype=torch.int16), PERMUTE, "indices must be one of"),
    "permute, float64": (lambda: permute(randn(3, 4).double()), PERMUTE, "tokens must be one of"),
    "permute, rows": (lambda: permute(rows=4), PERMUTE, "same number of rows"),
    "permute, expert": (
        lambda: npu.npu_moe_token_permute(randn(1, 4), ints([16777215])),
        PERMUTE,
        "indices must be below 16777215",
    ),
    "permute, T * K": (
        lambda: npu.npu_moe_token_permute(torch.empty(32768, 1).npu(), torch.empty(32768, 512, dtype=INT32).npu()),
        PERMUTE,
        "T \\* K must be below 16777215",
    ),
    "permute grad, padded": (
        lambda: npu.npu_moe_token_permute_grad_v2(randn(2, 4), ints([0, 1], INT32), 1, FP32, 2, True),
        "aclnnMoeTokenPermuteGrad",
        "padded_mode",
    ),
    "permute grad, dtype": (
        lambda: npu.npu_moe_token_permute_grad_v2(randn(2, 4), ints([0, 1]), 1, FP32, 2),
        "aclnnMoeTokenPermuteGrad",
        "sorted_indices must be one of",
    ),
    "permute grad, float64": (
        lambda: npu.npu_moe_token_permute_grad_v2(double(2, 4), ints([0, 1], INT32), 1, FP32, 2),
        "aclnnMoeTokenPermuteGrad",
        "grad_permuted_tokens must be one of",
    ),
    "unpermute, float64": (
        lambda: npu.npu_moe_token_unpermute(double(2, 4), ints([0, 1], INT32)),
        UNPERMUTE,
        "permuted_tokens must be one of",
    ),
    "unpermute grad, float64": (
        lambda: npu.npu_moe_token_unpermute_grad_v2(double(2, 4), ints([0, 1], INT32), 2, FP32),
        UNPERMUTE_GRAD,
        "grad_unpermuted_tokens must be one of",
    ),
    "finalize, float64": (lambda: finalize(double(6, 4)), FINALIZE, "expanded_permuted_rows must be one of"),
    "unpermute, padded": (lambda: unpermute(padded_mode=True), UNPERMUTE, "padded_mode=True is not supported"),
    "unpermute, dtype": (lambda: unpermute(dtype=torch.int64), UNPERMUTE, "sorted_indices must be one of"),
    "unpermute, probs": (lambda: unpermute(probs=(2, 2)), UNPERMUTE, "probs must be \\[T, K\\] with T \\* K = 6"),
    "unpermute, probs dtype": (lambda: unpermute(probs_dtype=torch.float64), UNPERMUTE, "probs must be one of"),
    "unpermute, negative": (lambda: unpermute(rows=(0, 1, -2, 3, 4, 5)), UNPERMUTE, "must not be negative"),
    "unpermute, K": (lambda: unpermute(rows=[0] * 513, probs=(1, 513)), UNPERMUTE, "K must be at most 512, not 513"),
    "unpermute grad, no tokens": (
        lambda: npu.npu_moe_token_unpermute_grad_v2(randn(2, 4), ints([0, 1], INT32), 2, FP32, randn(2, 1)),
        UNPERMUTE_GRAD,
        "permuted_tokens is required",
    ),
    "init, dtype": (lambda: init1(dtype=torch.int64), "", "int32"),
    "init, row_idx": (lambda: init1(shape=(2, 2)), "", "should be same"),
    "init, rank": (lambda: npu.npu_moe_init_routing(randn(2, 4), *[ints([0, 1], INT32)] * 2, 2), "", "should be 2D"),
    "permute, rank": (lambda: permute(randn(3)), "", "should be 2 dimensional"),
    "unpermute, rank": (
        lambda: npu.npu_moe_token_unpermute(randn(2, 4), ints([[0, 1]], INT32)),
        "",
        "should be 1 dimensional",
    ),
    "init, active": (lambda: init1(active=-1), "", "active_num"),
    "init v2, quantised": (lambda: init2(quant_mode=1), INIT3, "quant_mode 1 is not emulated"),
    "init v2, no range": (
        lambda: npu.npu_moe_init_routing_v2(randn(1, 4), ints([[0]], INT32), expert_num=3),
        INIT3,
        "active_expert_range must have two entries",
    ),
    "init v2, range": (lambda: init2(end=5), INIT3, "within the 4 experts"),
    "init v2, no expert_num": (lambda: init2(expert_num=-1), INIT3, "within the -1 experts"),
    "init v2, expert_num": (lambda: init2(experts=10241), "", "10240"),
    "init v2, active": (lambda: init2(active_num=-2), INIT3, "active_num must be -1 or more"),
    "init v2, capacity": (lambda: init2(drop_pad_mode=1, expert_capacity=0), INIT3, "needs expert_capacity > 0"),
    "init v2, drop_pad_mode": (lambda: init2(drop_pad_mode=2), "", "drop_pad_mode"),
    "init v2, tokens type": (lambda: init2(expert_tokens_num_type=3), "", "expert_tokens_num_type"),
    "init v2, float64": (lambda: init2(x=randn(3, 4).double()), INIT3, "tokens must be one of"),
    "init v2, scale": (lambda: init2(scale=half(3)), INIT3, "scale must be one of"),
    "finalize, K": (lambda: finalize(scales=None, k=2), FINALIZE, "K must be 1 without scales, not 2"),
    "finalize, dtype": (lambda: finalize(dtype=torch.int64), FINALIZE, "expanded_src_to_dst_row must be one of"),
    "finalize, skip2": (lambda: finalize(skip=(None, randn(3, 4))), FINALIZE, "skip2 needs skip1"),
    "finalize, bias": (lambda: finalize(bias=randn(4, 4)), FINALIZE, "bias needs expert_for_source_row"),
    "finalize, dtypes": (
        lambda: finalize(skip=(half(3, 4), None)),
        FINALIZE,
        "skip1 and expanded_permuted_rows must have the same dtype",
    ),
    "finalize, mode": (lambda: finalize(mode=4), FINALIZE, "drop_pad_mode must be 0 to 3"),
    "finalize, rank": (lambda: finalize(mode=3), FINALIZE, "must be 3-D"),
    "finalize, index": (lambda: finalize(row_idx=(0, 1, 2, 3, 4, 6)), FINALIZE, "must be -1 or a row"),
    "compute, dtype": (lambda: npu.npu_moe_compute_expert_tokens(ints([0, 1]), 2), "", "int32|Int"),
    "compute, rank": (
        lambda: npu.npu_moe_compute_expert_tokens(ints([[0, 1]], INT32), 2),
        "aclnnMoeComputeExpertTokens",
        "must be 1-D",
    ),
    "compute, experts": (
        lambda: npu.npu_moe_compute_expert_tokens(ints([0, 1], INT32), 2049),
        "aclnnMoeComputeExpertTokens",
        "num_expert must be 1 to 2048",
    ),
}


@pytest.mark.parametrize("rule", REFUSALS)
def test_refuses(rule):
    call, op, message = REFUSALS[rule]
    with refused(op, message):
        call()


def test_traffic():
    tokens, indices, probs = half(6, 4), choices(6, 2, 4).npu(), randn(6, 2)
    assert traffic(lambda: npu.npu_moe_token_permute(tokens, indices, 10)) == {PERMUTE: (1, 48 + 96, 80 + 48)}
    permuted, rows = npu.npu_moe_token_permute(tokens, indices)
    assert traffic(lambda: npu.npu_moe_token_unpermute(permuted, rows, probs)) == {UNPERMUTE: (1, 96 + 48 + 48, 48)}
    # Only the rows of experts in the range are written, beside the indices and the counts.
    local = torch.tensor([[0, 1], [2, 3], [1, 2]])
    written = 2 * 4 * 2 + 6 * 4 + 1 * 8
    assert traffic(lambda: init_routing(half(3, 4), local, 4, 1, 2))[INIT3] == (1, 3 * 4 * 2 + 6 * 4, written)
