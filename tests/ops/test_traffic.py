"""Launches and bytes, exactly: each op against what it has to read and write. Only the emulator can count them."""

from contextlib import contextmanager

import npu_emulator
import pytest
import torch
from kernels import get_kernel

ops = get_kernel("org/npu-fusion", version=1).ops
pytestmark = pytest.mark.skipif(not npu_emulator.is_emulated(), reason="hardware does not count bytes")
BF16 = torch.bfloat16
T, H, INTER = 64, 32, 96


def bf16(*shape, grad=False):
    return torch.zeros(shape, dtype=BF16).to("npu").requires_grad_(grad)


def size(*tensors):
    return sum(t.numel() * t.element_size() for t in tensors)


def elements(*counts):
    """Bytes of that many bf16 elements."""
    return 2 * sum(counts)


@contextmanager
def counted(launches, expected_bytes):
    with npu_emulator.count(skip_matmuls=True) as traffic:
        yield traffic
    assert (traffic.launches, traffic.bytes, traffic.host_syncs) == (launches, expected_bytes, 0), f"\n{traffic}"


def backward(output):
    """The gradient is there already: it is the next layer's to compute."""
    grad = torch.ones(output.shape, dtype=output.dtype).to("npu")
    return lambda: output.backward(grad)


def saved_bytes(function):
    """What the backward keeps alive, each storage once, parameters left out."""
    storages = {}

    def pack(tensor):
        if not isinstance(tensor, torch.nn.Parameter):
            storages[tensor.untyped_storage().data_ptr()] = size(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = function()
    return sum(storages.values()), output


def test_rms_norm():
    x, weight = bf16(T, H, grad=True), bf16(H, grad=True)
    rstd = 4 * T
    with counted(1, size(x, weight, x) + rstd):
        normed = ops.rms_norm(x, weight, 1e-6)
    backward_ = backward(normed)
    with counted(2, size(x, x, weight, x) + rstd + 4 * H + 6 * H):  # fp32 gradient of the weight, and its cast
        backward_()


def test_rms_norm_of_a_strided_head_copies_it_once():
    heads = torch.zeros(T, 2, 2 * H, dtype=BF16).to("npu")[..., :H]
    weight = bf16(H)
    with counted(2, 2 * size(heads) + size(heads, weight, heads) + 4 * heads.numel() // H):
        ops.rms_norm(heads, weight, 1e-6)


def test_zero_centered_rms_norm():
    x, weight = bf16(T, H), bf16(H)
    with counted(1, size(x, weight, x) + 4 * T):
        ops.rms_norm(x, weight, 1e-6, offset=1, casting_mode="gemma")


@pytest.mark.parametrize("dtypes", [(BF16, torch.float32), (torch.float32, BF16)], ids=["wide_weight", "narrow_weight"])
def test_rms_norm_of_two_dtypes_is_one_launch_more(dtypes):
    x, weight = (torch.zeros(s, dtype=d).to("npu") for s, d in zip([(T, H), (H,)], dtypes, strict=True))
    with npu_emulator.count() as traffic:
        assert ops.rms_norm(x, weight, 1e-6).dtype == torch.float32
    assert traffic.launches == 2


def test_rms_norm_gated():
    x, gate, weight = bf16(T, H), bf16(T, H), bf16(H)
    norm, act, product = size(x, weight, x) + 4 * T, size(x, x), size(x, x, x)
    with counted(3, norm + act + product):
        ops.rms_norm_gated(x, gate, weight, 1e-6)


def test_add_rms_norm():
    x, residual, weight = bf16(T, H, grad=True), bf16(T, H, grad=True), bf16(H)
    with counted(1, size(x, residual, weight, x, x) + 4 * T):
        normed, total = ops.add_rms_norm(x, residual, weight, 1e-6)
    grads = [torch.ones(T, H, dtype=BF16).to("npu") for _ in range(2)]
    with npu_emulator.count() as traffic:
        torch.autograd.grad([normed, total], [x, residual], grads)
    assert traffic.launches == 2, traffic  # the norm's backward, and the residual's gradient added in place


@pytest.mark.parametrize("bias", [False, True], ids=["no_bias", "bias"])
def test_gated_linear(bias):
    x, gate, up = bf16(T, H, grad=True), bf16(INTER, H, grad=True), bf16(INTER, H, grad=True)
    biases = [bf16(INTER, grad=True), bf16(INTER, grad=True)] if bias else [None, None]
    product = elements(T * H, INTER * H, T * INTER) + (elements(INTER) if bias else 0)
    activation = elements(2 * T * INTER, T * INTER)
    with counted(3, 2 * product + activation):
        hidden = ops.gated_linear(x, gate, up, *biases)
    step = backward(hidden)
    activation = elements(T * INTER, 2 * T * INTER, 2 * T * INTER)
    grad_x = elements(T * INTER, INTER * H, T * H)
    grad_x += elements(T * INTER, INTER * H, T * H, T * H)  # added to the first
    grad_weights = 2 * elements(T * INTER, T * H, INTER * H)
    grad_biases = 2 * elements(T * INTER, INTER) if bias else 0
    with counted(7 if bias else 5, activation + grad_x + grad_weights + grad_biases):
        step()


def test_gated_linear_saves_its_input_and_the_two_products():
    x = bf16(T, H, grad=True)
    gate, up = (torch.nn.Parameter(bf16(INTER, H)) for _ in range(2))
    saved, _ = saved_bytes(lambda: ops.gated_linear(x, gate, up))
    assert saved == elements(T * H, 2 * T * INTER)
    saved, _ = saved_bytes(lambda: ops.gated_linear(x, gate, up, activation="gelu"))
    assert saved == elements(T * H, 3 * T * INTER)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_activation(activation):
    gelu = activation != "silu"  # npu_geglu writes gelu(gate), too, and reads it in the backward
    gate, up = bf16(T, INTER), bf16(T, INTER)
    with counted(2, 5 * size(gate)):
        ops.gated_activation(gate, up, activation)
    gate.requires_grad_(), up.requires_grad_()
    with counted(2, (8 if gelu else 7) * size(gate)):
        hidden = ops.gated_activation(gate, up, activation)
    step = backward(hidden)
    with counted(1, (6 if gelu else 5) * size(gate)):
        step()
    saved, _ = saved_bytes(lambda: ops.gated_activation(gate, up, activation))
    assert saved == (3 if gelu else 2) * size(gate)


@pytest.mark.parametrize("frozen", ["x", "gate", "up"])
def test_frozen_parts_of_gated_linear_cost_nothing(frozen):
    parts = {"x": bf16(T, H), "gate": bf16(INTER, H), "up": bf16(INTER, H)}
    for name, tensor in parts.items():
        tensor.requires_grad_(name != frozen)
    step = backward(ops.gated_linear(*parts.values()))
    with npu_emulator.count(skip_matmuls=True) as traffic:
        step()
    assert traffic.launches == (3 if frozen == "x" else 4), traffic


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSND seen as BNSD"])
def test_rotary(layout):
    batch, heads, sequence, width = 2, 4, 16, 8
    shape = (batch, heads, sequence, width) if layout == "BNSD" else (batch, sequence, heads, width)
    table = (1, 1, sequence, width) if "BNSD" in layout else (1, sequence, 1, width)
    x, cos, sin = bf16(*shape), bf16(*table), bf16(*table)
    x = (x.transpose(1, 2) if "seen" in layout else x).requires_grad_()
    with counted(1, size(x, cos, sin, x)):
        rotated = ops.rotary(x, cos, sin)
    grad = torch.ones_like(rotated)
    with counted(1, size(x, cos, sin, x)):
        torch.autograd.grad(rotated, x, grad)


def test_rotary_saves_the_tables_only():
    x, cos, sin = bf16(2, 4, 16, 8, grad=True), bf16(1, 1, 16, 8), bf16(1, 1, 16, 8)
    assert saved_bytes(lambda: ops.rotary(x, cos, sin))[0] == size(cos, sin)


def test_partial_rotary():
    x, cos, sin = bf16(2, 4, 16, 16), bf16(1, 1, 16, 8), bf16(1, 1, 16, 8)
    half = size(x) // 2
    with counted(3, 2 * half + 2 * half + size(cos, sin) + 2 * size(x)):  # the part made contiguous, rotated, joined
        ops.rotary(x, cos, sin)


E, K, TOP = 8, 48, 2


def counts(*values):
    return torch.tensor(values).to("npu")


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_grouped_matmul(transposed, frozen):
    rows = T
    x = bf16(rows, H, grad=True)
    weight = bf16(E, H, K) if transposed else bf16(E, K, H)
    weight.requires_grad_(not frozen)
    group_list = counts(rows - 2, 0, 0, 2, 0, 0, 0, 0)
    hit = 2  # experts that have rows
    product = elements(rows * H, hit * H * K, rows * K) + 8 * E
    with counted(1, product):
        out = ops.grouped_matmul(x, weight, group_list, transposed=transposed, zero_tail=False)
    step = backward(out)
    grad_weight = elements(rows * H, rows * K, E * H * K) + 8 * E
    with counted(1 if frozen else 2, product + (0 if frozen else grad_weight)):
        step()


def balanced(num_tokens):
    """Every expert gets the same number of tokens."""
    return (torch.arange(num_tokens * TOP) % E).view(num_tokens, TOP).int().to("npu")


@pytest.mark.parametrize("num_tokens", [1, 16, 256])
def test_moe_experts(num_tokens):
    rows, hit = num_tokens * TOP, min(E, num_tokens * TOP)
    x, index = bf16(num_tokens, H, grad=True), balanced(num_tokens)
    weights = torch.zeros(num_tokens, TOP).to("npu").requires_grad_()
    gate_up, down = bf16(E, 2 * INTER, H, grad=True), bf16(E, H, INTER, grad=True)
    route = 4 * rows  # a row index
    permute = elements(num_tokens * H, rows * H) + 2 * route + 8 * E
    first = elements(rows * H, hit * 2 * INTER * H, rows * 2 * INTER) + 8 * E
    act = elements(rows * 2 * INTER, rows * INTER)
    second = elements(rows * INTER, hit * INTER * H, rows * H) + 8 * E
    unpermute = elements(rows * H, num_tokens * H) + route + 4 * rows
    with counted(5, permute + first + act + second + unpermute):
        out = ops.moe_experts(x, index, weights, gate_up, down, expert_parallel=False)
    step = backward(out)
    unpermute = elements(num_tokens * H, rows * H, rows * H) + route + 2 * 4 * rows
    act = elements(rows * INTER, rows * 2 * INTER, rows * 2 * INTER)
    permute = elements(rows * H, num_tokens * H) + route
    to_weights = elements(rows * INTER, rows * H, E * INTER * H) + elements(
        rows * H, rows * 2 * INTER, E * 2 * INTER * H
    )
    with counted(7, unpermute + second + act + first + permute + to_weights + 2 * 8 * E):
        step()


def test_moe_experts_reads_only_the_experts_that_are_hit():
    """One token of two experts: the other weights are not touched, whatever their number."""
    x, weights = bf16(1, H), bf16(1, TOP)
    traffic = {}
    for num_experts in (4, 64):
        gate_up, down = bf16(num_experts, 2 * INTER, H), bf16(num_experts, H, INTER)
        with npu_emulator.count(skip_matmuls=True) as count:
            ops.moe_experts(x, torch.tensor([[3, 1]]).to("npu"), weights, gate_up, down)
        traffic[num_experts] = count.bytes
    assert traffic[64] - traffic[4] == 60 * 3 * 8  # the counts, written once and read twice


@pytest.mark.parametrize("transposed", [False, True])
def test_no_weight_is_copied(transposed):
    """Field report 8 (modelscope/twinkle#205): 12.88 GB a layer were, before."""
    x, index, weights = bf16(T, H, grad=True), balanced(T), bf16(T, TOP)
    gate_up, down = bf16(E, 2 * INTER, H), bf16(E, H, INTER)
    if transposed:
        gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    gate_up.requires_grad_(), down.requires_grad_()
    with npu_emulator.count(skip_matmuls=True) as traffic:
        ops.moe_experts(x, index, weights, gate_up, down, transposed=transposed).sum().backward()
    copies = [t for name, t in traffic.by_op.items() if "opy" in name or "Contiguous" in name or "transpose" in name]
    assert all(t.bytes_written < size(down) // 2 for t in copies), traffic


def test_softmax_router():
    logits = torch.zeros(T, 16).to("npu").requires_grad_()
    chosen = 4 * T * 4  # fp32 weights or int32 indices of 4 experts
    with counted(1, size(logits) + 2 * chosen):
        weights, _ = ops.top_k_softmax(logits, 4, index_dtype=torch.int32)
    step = backward(weights)
    with npu_emulator.count() as traffic:
        step()
    assert (traffic.launches, traffic.host_syncs) == (4, 0), traffic  # softmax, indices to int64, zeros, scatter


def test_group_router():
    logits, bias = torch.zeros(T, 16).to("npu"), torch.zeros(16).to("npu")
    with npu_emulator.count() as traffic:
        ops.group_top_k_sigmoid(logits, bias, 4, 4, 2, index_dtype=torch.int32)
    assert (traffic.launches, traffic.host_syncs) == (1, 0), traffic
