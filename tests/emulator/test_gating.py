"""Routers against float64 scores and a selection that is written out expert by expert."""

import pytest
import torch
from emulator.definitions import FLOATS, close, exact, ints, npu, randn, refused, traffic, uninitialised

BF16, FP32 = torch.bfloat16, torch.float32


def best(scores, k):
    """The ids of the k largest scores of each row; equal scores go to the lower id."""
    rows = scores.flatten(0, -2).tolist()
    ids = [sorted(range(len(row)), key=lambda e: (-row[e], e))[:k] for row in rows]
    return torch.tensor(ids, dtype=torch.int64).view(*scores.shape[:-1], k)


def logits(*shape, dtype):
    """Scores that stay apart when softmax and sigmoid round them to float32, with one exact tie in each row."""
    x = torch.linspace(-3, 3, shape[-1]).expand(shape).clone()
    order = torch.rand(shape, generator=torch.Generator().manual_seed(0)).argsort(-1)
    x = x.gather(-1, order).to(dtype)
    x[..., -1] = x[..., 0]
    return x.npu()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("finished", [False, True], ids=["", "finished"])
@pytest.mark.parametrize("shape, k", [((7, 16), 4), ((1, 3), 1), ((123, 8), 8), ((2, 5, 60), 3)], ids=str)
def test_top_k_softmax(shape, k, finished, dtype):
    x = logits(*shape, dtype=dtype)
    done = torch.arange(x[..., 0].numel()).view(shape[:-1]) % 2 == 0 if finished else None
    scores = exact(x).softmax(-1)
    ids = best(exact(x), k)
    expected_ids = ids if done is None else ids.masked_fill(done.unsqueeze(-1), shape[-1])
    y, experts, rows = npu.npu_moe_gating_top_k_softmax(x, None if done is None else done.npu(), k)
    assert y.dtype == dtype and experts.dtype == torch.int32
    close(y, scores.gather(-1, ids))
    assert torch.equal(experts.cpu().long(), expected_ids)
    count = scores[..., 0].numel()
    assert rows.view(-1, k).tolist() == [[j * count + i for j in range(k)] for i in range(count)], "numbered by columns"

    y, experts, softmax = npu.npu_moe_gating_top_k_softmax_v2(
        x, k=k, finished=None if done is None else done.npu(), output_softmax=True
    )
    close(y, scores.gather(-1, ids))
    close(softmax, scores)
    assert torch.equal(experts.cpu().long(), expected_ids)
    y, _, _ = npu.npu_moe_gating_top_k_softmax_v2(x, k=k, renorm=1)
    close(y, scores.gather(-1, ids) / scores.gather(-1, ids).sum(-1, keepdim=True))


def gate(x, bias, k, k_group, groups, by_two, sigmoid, factor):
    """DeepSeek's router: (weights, ids, scores) from float64."""
    scores = x.sigmoid() if sigmoid else x.softmax(-1)
    choice = scores if bias is None else scores + bias
    per_group = choice.detach().view(len(x), groups, -1)
    strength = per_group.sort(-1, descending=True).values[..., : 2 if by_two else 1].sum(-1)
    kept = torch.zeros(len(x), groups, dtype=torch.bool).scatter(1, best(strength, k_group), True)
    ids = best(per_group.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1), k)
    weights = scores.gather(1, ids)
    if sigmoid:
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    return weights * factor, ids, scores


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("sigmoid", [False, True], ids=["softmax", "sigmoid"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("k_group, groups, by_two", [(1, 1, False), (2, 4, False), (2, 4, True), (3, 4, True)])
def test_top_k_and_its_gradient(k_group, groups, by_two, with_bias, sigmoid, dtype):
    x = logits(7, 32, dtype=dtype).requires_grad_()
    bias = -logits(32, dtype=dtype) if with_bias else None
    wide = exact(x)
    expected, ids, scores = gate(wide, exact(bias), 4, k_group, groups, by_two, sigmoid, 2.5)
    y, experts, norm = npu.npu_moe_gating_top_k(
        x,
        4,
        bias=bias,
        k_group=k_group,
        group_count=groups,
        group_select_mode=int(by_two),
        norm_type=int(sigmoid),
        routed_scaling_factor=2.5,
        out_flag=True,
    )
    assert torch.equal(experts.cpu().long(), ids)
    close(y, expected)
    close(norm, scores)
    dy = randn(7, 4, dtype=dtype, seed=1)
    y.backward(dy)
    expected.backward(exact(dy))
    close(x.grad, wide.grad, scale=40.0)  # sums of 4 terms, each a gradient below 4 times the factor 2.5


def test_groups_that_are_left_out_lose_to_negative_scores():
    x, bias = logits(7, 32, dtype=FP32), torch.full((32,), -5.0).npu()
    _, ids, _ = gate(exact(x), exact(bias), 4, 1, 4, False, True, 1.0)
    _, experts, _ = npu.npu_moe_gating_top_k(x, 4, bias=bias, k_group=1, group_count=4, norm_type=1)
    assert torch.equal(experts.cpu().long(), ids)


def test_scores_stay_uninitialised_unless_asked_for():
    _, _, norm = npu.npu_moe_gating_top_k(randn(3, 8), 2, norm_type=1)
    assert uninitialised(norm)


def test_a_softmax_of_the_second_generation_is_optional():
    _, _, softmax = npu.npu_moe_gating_top_k_softmax_v2(randn(3, 8), k=2)
    assert softmax.numel() == 0


def top_k(x=(3, 8), k=2, bias=None, dtype=FP32, **kwargs):
    return npu.npu_moe_gating_top_k(randn(*x, dtype=dtype), k, bias=bias, **kwargs)


def gradient(dtype=FP32, dy=FP32, ids=torch.int32, **kwargs):
    norm, dy = randn(3, 8, dtype=dtype), randn(3, 2, dtype=dy)
    return npu.npu_moe_gating_top_k_backward(norm, dy, ints([[0, 1]] * 3, ids), **kwargs)


GRAD = "aclnnMoeGatingTopKBackward"
SOFTMAX, TOP_K = "aclnnMoeGatingTopKSoftmax", "aclnnMoeGatingTopK"
REFUSALS = {
    "softmax, k": (lambda: npu.npu_moe_gating_top_k_softmax(randn(3, 8), None, 9), "", "k should be in"),
    "softmax, k above 1024": (
        lambda: npu.npu_moe_gating_top_k_softmax(randn(1, 1100), None, 1025),
        SOFTMAX,
        "k must be at most 1024, not 1025",
    ),
    "softmax, float64": (lambda: npu.npu_moe_gating_top_k_softmax(randn(3, 8).double(), None, 2), "", "float32"),
    "softmax, finished": (lambda: npu.npu_moe_gating_top_k_softmax(randn(3, 8), randn(3), 2), "", "bool"),
    "softmax v2, k": (lambda: npu.npu_moe_gating_top_k_softmax_v2(randn(3, 8), k=9), "", "should be in"),
    "softmax v2, renorm": (lambda: npu.npu_moe_gating_top_k_softmax_v2(randn(3, 8), k=2, renorm=2), "", "renorm"),
    "experts": (lambda: top_k((1, 2049), norm_type=1), TOP_K, "at most 2048 experts, not 2049"),
    "k": (lambda: top_k(k=9), TOP_K, "k must be 1 to the 8 experts of the chosen groups, not 9"),
    "k in groups": (
        lambda: top_k(k=5, k_group=2, group_count=4),
        TOP_K,
        "k must be 1 to the 4 experts of the chosen groups",
    ),
    "groups": (lambda: top_k(k_group=1, group_count=3), TOP_K, "group_count 3 must divide the 8 experts"),
    "k_group": (lambda: top_k(k_group=5, group_count=4), TOP_K, "k_group must be 1 to group_count"),
    "two best of one": (
        lambda: top_k(k_group=2, group_count=8, group_select_mode=1),
        TOP_K,
        "group_select_mode must be",
    ),
    "norm_type": (lambda: top_k(norm_type=2), TOP_K, "norm_type must be 0 .* or 1"),
    "renorm": (lambda: top_k(renorm=1), TOP_K, "renorm must be 0, not 1"),
    "rank": (lambda: top_k((2, 3, 8)), "", "x should be 2D"),
    "bias shape": (lambda: top_k(bias=randn(7)), "", "bias first dim should be same"),
    "gradient, renorm": (lambda: gradient(renorm=1), GRAD, "renorm must be 0"),
    "gradient, norm_type": (lambda: gradient(norm_type=2), GRAD, "norm_type 0 or 1"),
    "gradient, scores": (lambda: gradient(dtype=BF16), GRAD, "x_norm must be one of"),
    "gradient, float64": (lambda: gradient(dy=torch.float64), GRAD, "grad_y must be one of"),
    "gradient, ids": (lambda: gradient(ids=torch.int64), GRAD, "expertIdx must be one of"),
    "bias dtype": (lambda: top_k(bias=randn(8), dtype=BF16), "", "dtype of x and bias should be same"),
    "float64": (lambda: top_k(dtype=torch.float64), "", "float32"),
}


@pytest.mark.parametrize("rule", REFUSALS)
def test_refuses(rule):
    call, op, message = REFUSALS[rule]
    with refused(op, message):
        call()


def test_traffic():
    x = randn(6, 8, dtype=BF16)
    assert traffic(lambda: npu.npu_moe_gating_top_k_softmax(x, None, 2)) == {SOFTMAX: (1, 96, 24 + 48 + 48)}
    assert traffic(lambda: npu.npu_moe_gating_top_k(x, 2)) == {TOP_K: (1, 96, 24 + 48)}
    assert traffic(lambda: npu.npu_moe_gating_top_k(x, 2, out_flag=True)) == {TOP_K: (1, 96, 24 + 48 + 6 * 8 * 4)}
