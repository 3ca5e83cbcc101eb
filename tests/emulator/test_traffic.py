"""What `npu_emulator.count()` reports, against bytes counted by hand."""

import threading

import npu_emulator
import pytest
import torch
import torch.nn.functional as F
from npu_emulator import OpTraffic

pytestmark = pytest.mark.skipif(not npu_emulator.is_emulated(), reason="real hardware: nothing is counted")

KB = 1024


def floats(*shape, dtype=torch.float32, **options):
    return torch.zeros(*shape, dtype=dtype, device="npu", **options)


def counted(function, **options):
    with npu_emulator.count(**options) as traffic:
        function()
    return traffic


def of(function):
    """(launches, bytes read, bytes written) of a call."""
    traffic = counted(function)
    return traffic.launches, traffic.bytes_read, traffic.bytes_written


# ---- the rules, on 16 x 16 floats (1 KiB)


@pytest.fixture(scope="module")
def x():
    return floats(16, 16)


def test_arguments_are_read_once_each_and_results_written_once(x):
    assert of(lambda: x + x) == (1, 2 * KB, KB)  # the same tensor twice is two arguments
    assert of(lambda: x + 1) == (1, KB, KB)
    assert of(lambda: x.sum()) == (1, KB, 4)
    assert of(lambda: x.max(dim=1)) == (1, KB, 16 * 4 + 16 * 8)
    assert of(lambda: torch.cat((x, x))) == (1, 2 * KB, 2 * KB)
    assert of(lambda: x.to(torch.bfloat16)) == (1, KB, KB // 2)


def test_an_expanded_dimension_is_read_once(x):
    row = floats(1, 16)
    assert of(lambda: x * row) == (1, KB + 64, KB)
    assert of(lambda: x * row.expand(16, 16)) == (1, KB + 64, KB)
    assert of(lambda: row.expand(16, 16).contiguous()) == (1, 64, KB)


def test_a_slice_moves_only_itself(x):
    assert of(lambda: x[:4] + 1) == (1, KB // 4, KB // 4)
    assert of(lambda: x[:, ::2].neg()) == (1, KB // 2, KB // 2)


def test_in_place_is_read_and_written_and_out_only_written(x):
    y, out = floats(16, 16), floats(16, 16)
    assert of(lambda: y.add_(x)) == (1, 2 * KB, KB)
    assert of(lambda: torch.add(x, x, out=out)) == (1, 2 * KB, KB)
    assert of(lambda: torch.mm(x, x, out=out)) == (1, 2 * KB, KB)
    assert of(lambda: y.zero_()) == (1, 0, KB)
    assert of(lambda: y.fill_(2)) == (1, 0, KB)
    assert of(lambda: y.copy_(x)) == (1, KB, KB)
    assert of(lambda: y.normal_()) == (1, 0, KB)
    assert of(lambda: torch.ones_like(x)) == (1, 0, KB)


def test_views_and_allocations_are_not_launches(x):
    def views():
        x.t()[2:, 3:].unsqueeze(0).expand(4, -1, -1).chunk(2, 0)
        x.view(4, 64).reshape(-1).as_strided((3,), (2,))
        x.contiguous().detach().squeeze().to("npu").to(torch.float32)
        (
            torch.empty(5, device="npu"),
            torch.empty_like(x),
            x.new_empty(3),
            torch.empty_strided((2, 2), (1, 2), device="npu"),
        )

    assert of(views) == (0, 0, 0)


def test_nothing_to_do_is_not_a_launch():
    empty = floats(0, 4)
    assert of(lambda: empty + 1) == (0, 0, 0)


def test_copies_to_and_from_the_host_are_not_launches(x):
    host = torch.zeros(16, 16)
    assert of(lambda: (x.cpu(), host.npu(), x.copy_(host), host.copy_(x))) == (0, 0, 0)


def test_reads_of_a_table_count_what_is_gathered():
    table, rows = floats(1000, 16), torch.zeros(3, dtype=torch.int64, device="npu")
    assert of(lambda: F.embedding(rows, table)) == (1, 3 * 8 + 3 * 64, 3 * 64)
    assert of(lambda: table[rows]) == (1, 3 * 8 + 3 * 64, 3 * 64)
    assert of(lambda: table.index_select(0, rows)) == (1, 3 * 8 + 3 * 64, 3 * 64)


def test_writes_into_a_table_count_what_is_scattered():
    table, rows, values = floats(1000, 16), torch.arange(3, device="npu"), floats(3, 16)
    assert of(lambda: table.index_copy_(0, rows, values)) == (1, 3 * 8 + 3 * 64, 3 * 64)
    assert of(lambda: table.index_put_((rows,), values)) == (1, 3 * 8 + 3 * 64, 3 * 64)
    assert of(lambda: table.index_put_((rows,), values, accumulate=True)) == (1, 3 * 8 + 2 * 3 * 64, 3 * 64)
    assert of(lambda: table.index_add_(0, rows, values)) == (1, 3 * 8 + 2 * 3 * 64, 3 * 64)


def test_lists_are_one_launch():
    tensors = [floats(16, 16) for _ in range(4)]
    assert of(lambda: torch._foreach_mul_(tensors, 2)) == (1, 4 * KB, 4 * KB)
    assert of(lambda: torch._foreach_add(tensors, tensors)) == (1, 8 * KB, 4 * KB)


def test_fused_operators_are_named_by_their_aclnn_function(x):
    traffic = counted(lambda: torch.ops.npu.npu_rms_norm(x, floats(16), 1e-6))
    assert set(traffic.by_op) == {"aclnnRmsNorm", "aten::zeros"}
    assert traffic.by_op["aclnnRmsNorm"] == OpTraffic(1, KB + 64, KB + 16 * 4)  # and rstd, one float a row


def test_strided_input_of_a_fused_operator_is_copied_first(x):
    gamma = floats(16)
    traffic = counted(lambda: torch.ops.npu.npu_rms_norm(x.t(), gamma, 1e-6))
    assert traffic.launches == 2
    assert traffic.bytes == counted(lambda: torch.ops.npu.npu_rms_norm(x, gamma, 1e-6)).bytes + 2 * KB


# ---- host syncs


@pytest.mark.parametrize(
    ("wait", "expected"),
    [
        (lambda x: x.sum().item(), 1),
        (lambda x: bool(x[0, 0] > 0), 1),
        (lambda x: x.cpu(), 1),
        (lambda x: x.to("cpu", torch.float64), 1),
        (lambda x: x.tolist(), 1),
        (lambda x: x.nonzero(), 1),
        (lambda x: x[x > 0], 1),
        (lambda x: x.masked_select(x > 0), 1),
        (lambda x: x.unique(), 1),
        (lambda x: torch.equal(x, x), 1),
        (lambda x: x[torch.zeros(2, dtype=torch.int64, device="npu")], 0),
        (lambda x: x + x.sum(), 0),
        (lambda x: torch.zeros(3).npu(), 0),
        (lambda x: torch.where(x > 0, x, 0), 0),
        (lambda x: torch.npu.synchronize(), 0),
    ],
)
def test_host_syncs(x, wait, expected):
    assert counted(lambda: wait(x)).host_syncs == expected


def test_copy_to_pinned_memory_is_a_sync_once_it_is_waited_for(x):
    pinned = torch.empty(16, 16).pin_memory()
    assert counted(lambda: pinned.copy_(x, non_blocking=True)).host_syncs == 0
    assert (
        counted(lambda: (pinned.copy_(x, non_blocking=True), torch.npu.current_stream().synchronize())).host_syncs == 1
    )


# ---- the context manager


def test_counts_are_live_nested_and_stand_still_afterwards(x):
    x.neg()
    with npu_emulator.count() as outer:
        x.neg()
        assert outer.launches == 1
        with npu_emulator.count() as inner:
            x.abs()
        assert (outer.launches, inner.launches) == (2, 1)
        assert inner.by_op == {"aten::abs": OpTraffic(1, KB, KB)}
    x.neg()
    assert outer.launches == 2 and outer.bytes == outer.bytes_read + outer.bytes_written == 4 * KB


def test_counts_survive_an_exception_and_other_threads_are_included(x):
    with pytest.raises(ZeroDivisionError), npu_emulator.count() as traffic:
        thread = threading.Thread(target=x.neg)
        thread.start()
        thread.join()
        raise ZeroDivisionError
    assert traffic.launches == 1
    x.neg()
    assert traffic.launches == 1


def test_table_says_that_the_device_is_emulated(x):
    text = str(counted(lambda: x.neg()))
    assert "emulated" in text and "aten::neg" in text and "1,024 B read" in text


def test_skipped_products_are_counted_and_zero():
    a, w = torch.ones(2, 3, 16, device="npu", requires_grad=True), torch.ones(5, 16, device="npu", requires_grad=True)
    full = counted(lambda: F.linear(a, w).sum().backward())
    assert w.grad.abs().min() > 0
    with npu_emulator.count(skip_matmuls=True) as skipped:
        y = F.linear(a, w)
        out = torch.ones(3, 3, device="npu")
        torch.mm(w[:3].detach(), w[:3].detach().t(), out=out)
        in_place = torch.ones(3, 3, device="npu").addmm_(out, out)
        a.grad, w.grad = None, None
        y.sum().backward()
    assert y.shape == (2, 3, 5) and not y.any()
    assert not out.any() and not in_place.any()
    assert a.grad.shape == a.shape and not a.grad.any() and not w.grad.any()
    for op in ("aten::matmul", "aten::matmul_backward"):
        assert skipped.by_op[op] == full.by_op[op]
    assert F.linear(a, w).any()  # outside the block products are computed again


# ---- known figures, at a fraction of their size: all but the terms in `T * H` scale with it


def rms_norm(x, weight):
    """transformers' LlamaRMSNorm."""
    hidden_states = x.to(torch.float32)
    variance = hidden_states.pow(2).mean(-1, keepdim=True)
    return weight * (hidden_states * torch.rsqrt(variance + 1e-6)).to(x.dtype)


def test_llama_rms_norm():
    def read_and_written(t, h):
        n, row = t * h, 4 * t  # elements, and one float a row
        cast, power, mean, scaled, back, weighted = 6 * n, 8 * n, 4 * n + row, 8 * n + row, 6 * n, 4 * n + 2 * h
        return cast + power + mean + 4 * row + scaled + back + weighted  # the sum and the root of a row: 2 * row each

    t, h = 64, 256
    x, weight = floats(t, h, dtype=torch.bfloat16), floats(h, dtype=torch.bfloat16)
    traffic = counted(lambda: rms_norm(x, weight))
    assert (traffic.launches, traffic.bytes) == (8, read_and_written(t, h))
    assert round(read_and_written(8192, 4096) / 1e9, 3) == 1.208

    fused = counted(lambda: torch.ops.npu.npu_rms_norm(x, weight, 1e-6))
    assert (fused.launches, fused.bytes) == (1, 4 * t * h + 2 * h + 4 * t)
    assert round((4 * 8192 * 4096 + 2 * 4096 + 4 * 8192) / 1e9, 3) == 0.134


def rotate_half(x):
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def test_rotary():
    def read_and_written(t, heads=40, dim=128):
        states, table = 2 * t * heads * dim, 2 * t * dim
        # x * cos, neg, cat, rotated * sin, add; cos and sin are read for q and for k
        return (2 + 1 + 2 + 2 + 3) * states + 4 * table

    def rotary(q, k, cos, sin):
        return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin

    t = 32
    q, k, cos, sin = (floats(1, n, t, 128, dtype=torch.bfloat16) for n in (32, 8, 1, 1))
    traffic = counted(lambda: rotary(q, k, cos, sin))
    assert (traffic.launches, traffic.bytes) == (10, read_and_written(t))
    assert round(read_and_written(8192) / 1e9, 3) == 0.847


def test_gated_mlp_forward_and_backward():
    """Each pass of x [1, T, H] through gate, up and down; gradients are added to what is there."""

    def forward(t, h, i):
        product = 2 * (t * h + h * i + t * i)
        return 3 * product + 2 * (2 + 3) * t * i  # silu, multiply

    def backward(t, h, i):
        # matmul_backward reads the gradient and both operands and writes the gradient of both
        down, gate = 2 * (t * h + 2 * h * i + 2 * t * i), 2 * (2 * t * h + 2 * h * i + t * i)
        elementwise = 2 * (3 + 3 + 3) * t * i  # two products of the multiplication, and silu_backward
        accumulate = 3 * 2 * 3 * h * i + 2 * 3 * t * h  # three weights and x
        return down + 2 * gate + elementwise + 2 * 3 * t * h + accumulate

    t, h, i = 64, 32, 96
    leaves = [floats(*shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((1, t, h), (i, h), (i, h), (h, i))]
    for leaf in leaves:
        leaf.grad = torch.zeros_like(leaf)

    def mlp(x, gate, up, down):
        return F.linear(F.silu(F.linear(x, gate)) * F.linear(x, up), down)

    dy = floats(1, t, h, dtype=torch.bfloat16)
    traffic = counted(lambda: mlp(*leaves), skip_matmuls=True)
    assert (traffic.launches, traffic.bytes) == (5, forward(t, h, i))
    traffic = counted(lambda: mlp(*leaves).backward(dy), skip_matmuls=True)
    assert (traffic.launches, traffic.bytes) == (16, forward(t, h, i) + backward(t, h, i))

    size = (8192, 4096, 12288)
    assert round(forward(*size) / 1e9, 3) == 2.114
    assert round((forward(*size) + backward(*size)) / 1e9, 2) == 6.98
