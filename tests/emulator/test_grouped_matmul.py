"""Grouped matrix products against one torch.matmul a group, in float64."""

import npu_emulator
import pytest
import torch
from emulator.definitions import FLOATS, HALVES, close, exact, ints, npu, randn, refused, traffic, uninitialised

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# counts of rows, K, N
SIZES = [([3, 0, 5, 1], 7, 123), ([1], 1, 1), ([0, 0], 8, 4), ([2, 4], 64, 16), ([0, 6, 0], 5, 3)]


def terms(x, w):
    """The bound of float32 accumulation: K products, each as large as the largest of |x| @ |w|."""
    return {"steps": 8 + x.shape[-1], "scale": (x.abs().max() * w.abs().max()).item() if x.numel() and w.numel() else 0}


def bias_dtype(dtype):
    return FP16 if dtype == FP16 else FP32


def group_list(counts, list_type):
    return ints(counts if list_type else torch.tensor(counts).cumsum(0).tolist())


def products(x, weights, counts, bias=None):
    groups = enumerate(zip(x.split(counts), weights, strict=True))
    return torch.cat([rows @ w + (0 if bias is None else bias[i]) for i, (rows, w) in groups])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("list_type", [0, 1], ids=["cumulative", "counts"])
@pytest.mark.parametrize("with_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
@pytest.mark.parametrize("counts, k, n", SIZES, ids=str)
def test_split_m(counts, k, n, transposed, with_bias, list_type, dtype):
    e = len(counts)
    x, w = randn(sum(counts), k, dtype=dtype), randn(e, *((n, k) if transposed else (k, n)), dtype=dtype, seed=1)
    w = w.transpose(1, 2) if transposed else w
    bias = randn(e, n, dtype=bias_dtype(dtype), seed=2) if with_bias else None
    (y,) = npu.npu_grouped_matmul(
        [x],
        [w],
        bias=[bias] if with_bias else None,
        group_list=group_list(counts, list_type),
        split_item=2 + list_type,
        group_type=0,
        group_list_type=list_type,
    )
    assert y.dtype == dtype
    close(y, products(exact(x), exact(w), counts, exact(bias)), **terms(exact(x), exact(w)))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("counts, k, n", SIZES, ids=str)
def test_split_k_gives_zeros_for_empty_groups(counts, k, n, dtype):
    x, dy = randn(sum(counts), k, dtype=dtype), randn(sum(counts), n, dtype=dtype, seed=1)
    (dw,) = npu.npu_grouped_matmul(
        [x.t()], [dy], group_list=ints(counts), split_item=3, group_type=2, group_list_type=1
    )
    expected = torch.stack([a.t() @ b for a, b in zip(exact(x).split(counts), exact(dy).split(counts), strict=True)])
    close(dw, expected, **terms(exact(x).t(), exact(dy)))
    assert not dw.cpu()[torch.tensor(counts) == 0].any()


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("transposed", [False, True], ids=["", "transposed"])
def test_lists(transposed, dtype):
    counts, k, n = [3, 0, 2], 6, 5
    x = randn(5, k, dtype=dtype)
    weights = [randn(*((n, k) if transposed else (k, n)), dtype=dtype, seed=i) for i in range(3)]
    weights = [w.t() if transposed else w for w in weights]
    bias = [randn(n, dtype=bias_dtype(dtype), seed=9 + i) for i in range(3)]
    expected = products(exact(x), [exact(w) for w in weights], counts, [exact(b) for b in bias])
    bound = terms(exact(x), exact(torch.stack(weights)))
    ends = [3, 3, 5]
    # One y: x single or a list, group_list in device memory or on the host.
    (single,) = npu.npu_grouped_matmul([x], weights, bias=bias, group_list=ints(ends), split_item=3, group_type=0)
    (host,) = npu.npu_grouped_matmul([x], weights, bias=bias, group_list=ends, split_item=3)
    (many,) = npu.npu_grouped_matmul(
        list(x.split(counts)), weights, bias=bias, group_list=ints(ends), split_item=2, group_type=0
    )
    (listless,) = npu.npu_grouped_matmul(list(x.split(counts)), weights, bias=bias, split_item=2, group_type=0)
    (older,) = npu.npu_grouped_matmul.List(list(x.split(counts)), weights, bias=bias, split_item=2)
    for y in (single, host, many, listless, older):
        close(y, expected, **bound)
    # One y for each weight: x split by the host's list, or lists of both.
    split = npu.npu_grouped_matmul([x], weights, bias=bias, group_list=ends, split_item=1)
    pairs = npu.npu_grouped_matmul(list(x.split(counts)), weights, bias=bias, split_item=0, group_type=-1)
    older = npu.npu_grouped_matmul.List(list(x.split(counts)), weights, bias=bias, split_item=0)
    for ys in (split, pairs, older):
        assert [y.shape[0] for y in ys] == counts
        close(torch.cat(list(ys)), expected, **bound)


def test_pairs_of_their_own_shapes():
    x, w = [randn(2, 3, 4, dtype=BF16), randn(5, 1, 7, dtype=BF16)], [randn(4, 2, dtype=BF16), randn(7, 9, dtype=BF16)]
    for y, a, b in zip(npu.npu_grouped_matmul(x, w, split_item=0, group_type=-1), x, w, strict=True):
        close(y, exact(a) @ exact(b), **terms(exact(a), exact(b)))


def test_rows_after_the_last_group_stay_uninitialised():
    x, w = randn(6, 4), randn(2, 4, 3)
    (y,) = npu.npu_grouped_matmul([x], [w], group_list=ints([1, 3]), split_item=2, group_type=0, group_list_type=1)
    close(y[:4], products(exact(x)[:4], exact(w), [1, 3]), **terms(exact(x), exact(w)))
    assert uninitialised(y[4:])


@pytest.mark.parametrize("dtype", HALVES)
def test_grouped_matmul_add_accumulates(dtype):
    counts = [3, 0, 2]
    y, x, w = randn(3, 4, 6), randn(5, 4, dtype=dtype), randn(5, 6, dtype=dtype)
    before = exact(y)
    npu.npu_grouped_matmul_add_(y, x, w, group_list(counts, 0))
    expected = torch.stack([a.t() @ b for a, b in zip(exact(x).split(counts), exact(w).split(counts), strict=True)])
    close(y, before + expected, **terms(exact(x).t(), exact(w)))


@pytest.mark.parametrize(
    "x_view, w_view",
    [
        (lambda x: x.repeat(1, 2)[:, :4], lambda w: w),
        (lambda x: x, lambda w: w.repeat(1, 1, 2)[..., ::2]),
        (lambda x: x, lambda w: w.transpose(0, 1).contiguous().transpose(0, 1)),
        (lambda x: x, lambda w: w.transpose(1, 2).repeat(1, 2, 1)[:, :3].transpose(1, 2)),
    ],
    ids=["rows of x with gaps", "w with gaps", "w permuted", "half of packed weights, transposed"],
)
def test_other_strides_are_copied_first(x_view, w_view):
    x, w = x_view(randn(6, 4, dtype=BF16)), w_view(randn(2, 4, 3, dtype=BF16))
    copied = [tensor for tensor in (x, w) if not tensor.is_contiguous()]
    assert len(copied) == 1
    results, groups = [], ints([2, 4])
    seen = traffic(
        lambda: results.extend(
            npu.npu_grouped_matmul([x], [w], group_list=groups, split_item=2, group_type=0, group_list_type=1)
        )
    )
    close(results[0], products(exact(x), exact(w), [2, 4]), **terms(exact(x), exact(w)))
    assert seen["aclnnContiguous"] == (1, copied[0].nbytes, copied[0].nbytes)


def gmm(
    x=(6, 4),
    w=(2, 4, 3),
    groups=(2, 6),
    dtype=BF16,
    list_dtype=torch.int64,
    bias=None,
    x_view=None,
    w_view=None,
    **kwargs,
):
    x, w = randn(*x, dtype=dtype), randn(*w, dtype=dtype)
    bias = None if bias is None else [randn(*bias[0], dtype=bias[1])]
    kwargs = {"split_item": 2, "group_type": 0, "group_list_type": 0, "bias": bias, **kwargs}
    groups = None if groups is None else ints(groups, list_dtype)
    return npu.npu_grouped_matmul(
        [x_view(x) if x_view else x], [w_view(w) if w_view else w], group_list=groups, **kwargs
    )


def lists(x, w, **kwargs):
    dtype = kwargs.pop("dtype", BF16)
    return npu.npu_grouped_matmul([randn(*s, dtype=dtype) for s in x], [randn(*s, dtype=dtype) for s in w], **kwargs)


def half(*shape):
    return randn(*shape, dtype=BF16)


def add(x=FP16, y=FP32, **kwargs):
    return npu.npu_grouped_matmul_add_(
        randn(2, 4, 6, dtype=y), randn(5, 4, dtype=x), randn(5, 6, dtype=x), ints([2, 5]), **kwargs
    )


K2 = {"x": (4, 6), "w": (6, 3), "group_type": 2, "split_item": 3}
V5, V1, ADD = "aclnnGroupedMatmulV5", "aclnnGroupedMatmul", "aclnnGroupedMatmulAdd"
REFUSALS = {
    "no group_type": (lambda: gmm(group_type=None), "", "Requires manual passing group_type"),
    "group_type 1": (lambda: gmm(group_type=1), "", "group type must be -1, 0 or 2"),
    "int32 group_list": (lambda: gmm(list_dtype=torch.int32), V5, "group_list must be one of .*Long"),
    "too many rows": (lambda: gmm(groups=(3, 7)), V5, "group_list covers 7 rows, but x has 6"),
    "too many rows, counts": (
        lambda: gmm(groups=(3, 4), group_list_type=1),
        V5,
        "group_list covers 7 rows, but x has 6",
    ),
    "too many rows, K": (
        lambda: gmm(groups=(3, 7), x_view=lambda x: x.t().contiguous().t(), **K2),
        V5,
        "covers 7 rows, but x has 6",
    ),
    "negative": (lambda: gmm(groups=(-1, 7), group_list_type=1), V5, "must not be negative"),
    "decreasing": (lambda: gmm(groups=(6, 2)), V5, "must not decrease"),
    "length of group_list": (lambda: gmm(groups=(1, 2, 6)), V5, "one entry for each of the 2 weights"),
    "key-value group_list": (lambda: gmm(groups=[[0, 2], [1, 4]], group_list_type=2), V5, "group_list_type must be 0"),
    "mixed dtypes": (lambda: gmm(w_view=torch.Tensor.float), V5, "weight and x must have the same dtype"),
    "float64": (lambda: gmm(dtype=torch.float64), V5, "x must be one of"),
    "float32 lists": (
        lambda: lists([(2, 4)] * 2, [(4, 3)] * 2, dtype=FP32, group_type=-1),
        V5,
        "float32 .* single tensors",
    ),
    "bf16 bias": (lambda: gmm(bias=((2, 3), BF16)), V5, "bias must be Float for x of dtype BFloat16"),
    "fp32 bias of fp16": (lambda: gmm(dtype=FP16, bias=((2, 3), FP32)), V5, "bias must be Half for x of dtype Half"),
    "bias shape": (lambda: gmm(bias=((3,), FP32)), V5, "bias must be of shape \\[2, 3\\]"),
    "bias, K": (
        lambda: gmm(x_view=torch.Tensor.t, bias=((2, 3), FP32), **K2 | {"x": (6, 4)}),
        V5,
        "bias is not supported with group_type 2",
    ),
    "inner axis of x": (lambda: gmm((2, 65536), (1, 65536, 1), (2,)), V5, "inner axis of x must be at most 65535"),
    "inner axis of w": (lambda: gmm((2, 1), (1, 1, 65536), (2,)), V5, "inner axis of weight must be at most 65535"),
    "inner axis of transposed w": (
        lambda: gmm((2, 65536), (1, 2, 65536), (2,), w_view=lambda w: w.transpose(1, 2)),
        V5,
        "inner axis of x must be at most 65535",
    ),
    "1025 groups": (lambda: gmm((2, 1), (1025, 1, 1), [2] * 1025), V5, "at most 1024 groups"),
    "129 groups in a list": (
        lambda: lists([(2, 1)], [(1, 1)] * 129, group_list=ints([2] * 129), group_type=0, split_item=2),
        V5,
        "128 in a list",
    ),
    "K": (lambda: gmm(w=(2, 5, 3)), V5, "differ in K"),
    "x transposed": (lambda: gmm((4, 6), x_view=torch.Tensor.t), V5, "x must not be transposed unless K is split"),
    "x transposed, no split": (
        lambda: npu.npu_grouped_matmul([half(4, 2).t()], [half(4, 3)], group_type=-1),
        V5,
        "x must not be transposed unless K is split",
    ),
    "inner axis of K split": (
        lambda: gmm((2, 65536), (2, 1), (2,), x_view=torch.Tensor.t, group_type=2),
        V5,
        "inner axis of x must be at most 65535",
    ),
    "split M, many y": (lambda: gmm(split_item=0), V5, "group_type 0 needs split_item 2 or 3"),
    "no group_list": (lambda: gmm(groups=None), V5, "group_list is required"),
    "3-D x": (lambda: gmm((1, 6, 4)), V5, "x must be 2-D where M is split"),
    "4-D weight": (lambda: gmm(w=(1, 2, 4, 3)), V5, "list of 2-D tensors or one 3-D tensor"),
    "list of 3-D weights": (
        lambda: lists([(6, 4)], [(1, 4, 3)] * 2, group_list=ints([2, 6]), group_type=0, split_item=2),
        V5,
        "list of 2-D tensors or one 3-D tensor",
    ),
    "x list of another length": (
        lambda: lists([(2, 4)] * 2, [(4, 3)] * 3, group_list=ints([2, 4, 4]), group_type=0, split_item=2),
        V5,
        "x must be one tensor or one for each weight",
    ),
    "bias list of another length": (
        lambda: lists([(2, 4)] * 2, [(4, 3)] * 2, bias=[randn(3)], group_type=-1),
        V5,
        "bias must be a list as long as weight",
    ),
    "K split, lists": (
        lambda: npu.npu_grouped_matmul(
            [half(6, 4).t()] * 2, [half(6, 3)] * 2, group_list=ints([1, 6]), group_type=2, split_item=2
        ),
        V5,
        "group_type 2 needs x and weight to be single tensors",
    ),
    "host list, count": (
        lambda: lists([(5, 4)], [(4, 3)] * 2, group_list=[1, 2, 5], split_item=3),
        V1,
        "one entry for each of the 2 weights, not 3",
    ),
    "host list, 3-D weight": (
        lambda: lists([(5, 4)], [(2, 4, 4)], group_list=[2, 5], split_item=3, dtype=FP32),
        V1,
        "weight must be a list of 2-D tensors",
    ),
    "add, flat y": (
        lambda: npu.npu_grouped_matmul_add_(randn(8, 6), half(5, 4), half(5, 6), ints([2, 5])),
        ADD,
        "y must be 3-D, x and weight 2-D",
    ),
    "add, shapes": (
        lambda: npu.npu_grouped_matmul_add_(randn(2, 4, 6), half(5, 3), half(5, 6), ints([2, 5])),
        ADD,
        "do not match",
    ),
    "mixed transposition": (
        lambda: npu.npu_grouped_matmul(
            [randn(2, 4, dtype=BF16)] * 2, [randn(4, 3, dtype=BF16), randn(3, 4, dtype=BF16).t()], group_type=-1
        ),
        V5,
        "all weights must be transposed or none",
    ),
    "K split, x plain": (lambda: gmm(**K2), V5, "transposed view \\[M, K\\] of contiguous \\[K, M\\]"),
    "K split, w transposed": (
        lambda: gmm(x_view=torch.Tensor.t, w_view=torch.Tensor.t, **K2 | {"x": (6, 4), "w": (3, 6)}),
        V5,
        "weight must be a plain \\[K, N\\]",
    ),
    "no split, one y": (
        lambda: lists([(2, 4)] * 2, [(4, 3)] * 2, group_type=-1, split_item=2),
        V5,
        "group_type -1 needs split_item 0 or 1",
    ),
    "weights of other shapes": (
        lambda: lists([(4, 4)], [(4, 3), (4, 2)], group_list=ints([2, 4]), group_type=0, split_item=2),
        V5,
        "weights must have one shape",
    ),
    "x list against group_list": (
        lambda: lists([(1, 4), (3, 4)], [(4, 3)] * 2, group_list=ints([2, 4]), group_type=0, split_item=2),
        V5,
        "group 0 has 2 rows in group_list, 1 in x",
    ),
    "act_type": (lambda: gmm(act_type=1), V5, "act_type is supported with per-token quantisation only"),
    "scale": (lambda: gmm(scale=[randn(2, 3)]), V5, "quantised grouped matmul is not emulated"),
    "per-token scale": (lambda: gmm(per_token_scale=[randn(6)]), V5, "quantised grouped matmul is not emulated"),
    "host list, rows": (
        lambda: lists([(5, 4)], [(4, 3)] * 2, group_list=[2, 4], split_item=3),
        V1,
        "must be the 5 rows of x, not 4",
    ),
    "host list, float32": (
        lambda: lists([(5, 4)], [(4, 3)] * 2, group_list=[2, 5], split_item=3, dtype=FP32),
        V1,
        "float32 .* single",
    ),
    "add, plain x": (lambda: add(transpose_x=False), ADD, "only transpose_x=True"),
    "add, float32 x": (lambda: add(x=FP32), ADD, "x must be one of"),
    "add, half y": (lambda: add(y=FP16), ADD, "y must be one of"),
}


@pytest.mark.parametrize("rule", REFUSALS)
def test_refuses(rule):
    call, op, message = REFUSALS[rule]
    with refused(op, message):
        call()


def test_traffic_counts_the_experts_that_have_tokens():
    x, w, groups = randn(6, 4, dtype=BF16), randn(3, 4, 5, dtype=BF16), ints([2, 0, 3])
    call = {"group_list": groups, "split_item": 2, "group_list_type": 1}
    read = 5 * 4 * 2 + 2 * 4 * 5 * 2 + 3 * 8  # rows in use, two weights, group_list
    assert traffic(lambda: npu.npu_grouped_matmul([x], [w], group_type=0, **call)) == {V5: (1, read, 5 * 5 * 2)}
    # Gradients of the weights: an empty group reads nothing, and its zeros are written.
    dy = randn(6, 5, dtype=BF16)
    read = 5 * (4 + 5) * 2 + 3 * 8
    assert traffic(lambda: npu.npu_grouped_matmul([x.t()], [dy], group_type=2, **call)) == {
        V5: (1, read, 3 * 4 * 5 * 2)
    }


def test_skipped_products_are_counted_and_zero():
    x, w, call = randn(6, 4), randn(2, 4, 5), {"group_list": ints([2, 6]), "split_item": 2, "group_type": 0}
    computed = traffic(lambda: npu.npu_grouped_matmul([x], [w], **call))
    with npu_emulator.count(skip_matmuls=True) as skipped:
        (y,) = npu.npu_grouped_matmul([x], [w], **call)
    assert not y.any()
    assert {op: (t.launches, t.bytes_read, t.bytes_written) for op, t in skipped.by_op.items()} == computed
