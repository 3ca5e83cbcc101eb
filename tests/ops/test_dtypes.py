"""Mixed dtypes, autocast, and torch_npu of other ages: the result's dtype is eager's, whatever route is legal."""

import itertools
import sys

import pytest
import torch
from kernels import get_kernel

ops = get_kernel("org/npu-fusion", version=1).ops
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
PAIRS = list(itertools.product(DTYPES, DTYPES))
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
pair_ids = [f"{NAMES[a]}_{NAMES[b]}" for a, b in PAIRS]


def randn(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def outcome(function, tensors, device):
    """Output and gradients, on the CPU; None where `tensors` has None."""
    placed = [None if t is None else t.detach().to(device).requires_grad_() for t in tensors]
    output = function(*placed)
    output.float().sum().backward()
    return [output.detach().cpu(), *(t.grad.cpu() for t in placed if t is not None)]


def assert_like_eager(fused, reference, tensors, roundings):
    narrow = max(torch.finfo(t.dtype).eps for t in tensors if t is not None)
    for a, b in zip(outcome(fused, tensors, "npu"), outcome(reference, tensors, "cpu"), strict=True):
        assert a.dtype == b.dtype
        scale = max(b.abs().max().item(), 1.0)
        # `roundings` to the narrowest dtype on either side, each half a unit in the last place of the largest value
        torch.testing.assert_close(a, b, rtol=0, atol=roundings * narrow * scale)


@pytest.mark.parametrize("offset", [0, 1])
@pytest.mark.parametrize("casting_mode", ["llama", "gemma"])
@pytest.mark.parametrize("dtypes", PAIRS, ids=pair_ids)
def test_rms_norm(dtypes, casting_mode, offset):
    tensors = [randn(3, 4, 16, dtype=dtypes[0]), randn(16, dtype=dtypes[1], seed=1)]
    functions = [lambda x, w, f=f: f(x, w, 1e-6, offset, casting_mode) for f in (ops.rms_norm, ops.rms_norm_reference)]
    assert_like_eager(*functions, tensors, roundings=3)


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("casting_mode", ["llama", "gemma"])
@pytest.mark.parametrize("dtypes", PAIRS, ids=pair_ids)
def test_rms_norm_gated(dtypes, casting_mode, gate_first):
    tensors = [randn(3, 16, dtype=dtypes[0]), randn(3, 16, dtype=dtypes[0], seed=1), randn(16, dtype=dtypes[1], seed=2)]
    functions = [
        lambda x, g, w, f=f: f(x, g, w, 1e-6, "silu", gate_first, None, casting_mode)
        for f in (ops.rms_norm_gated, ops.rms_norm_gated_reference)
    ]
    assert_like_eager(*functions, tensors, roundings=6)


def test_a_gate_that_comes_first_does_not_overflow_fp16():
    x, gate, weight = torch.full((1, 8), 1000.0), torch.full((1, 8), 100.0), torch.ones(8)
    x, gate, weight = (t.half().to("npu") for t in (x, gate, weight))
    assert torch.equal(ops.rms_norm_gated(x, gate, weight, 1e-6, gate_first=True).cpu(), torch.ones(1, 8).half())


@pytest.mark.parametrize("dtypes", PAIRS, ids=pair_ids)
def test_rotary(dtypes):
    x, cos, sin = (
        randn(2, 3, 4, 8, dtype=dtypes[0]),
        randn(1, 1, 4, 8, dtype=dtypes[1]),
        randn(1, 1, 4, 8, dtype=dtypes[1], seed=1),
    )
    fused, reference = (
        lambda x, f=f: f(x, cos.to(x.device), sin.to(x.device)) for f in (ops.rotary, ops.rotary_reference)
    )
    for a, b in zip(outcome(fused, [x], "npu"), outcome(reference, [x], "cpu"), strict=True):
        assert a.dtype == b.dtype
        # eager rounds both products and the sum to the result's dtype, of values below 8
        torch.testing.assert_close(a, b, rtol=0, atol=3 * 8 / 2 * torch.finfo(a.dtype).eps)


@pytest.mark.parametrize("dtypes", PAIRS, ids=pair_ids)
def test_add_rms_norm(dtypes):
    tensors = [randn(3, 16, dtype=dtypes[0]), randn(3, 16, dtype=dtypes[1], seed=1), randn(16, dtype=dtypes[0], seed=2)]
    fused = ops.add_rms_norm(*(t.to("npu") for t in tensors), 1e-6)
    for a, b in zip(fused, ops.add_rms_norm_reference(*tensors, 1e-6), strict=True):
        assert a.dtype == b.dtype
        # the sum, the normalized value and the product are rounded, of values below 8
        torch.testing.assert_close(a.cpu(), b, rtol=0, atol=3 * 8 / 2 * max(torch.finfo(t.dtype).eps for t in tensors))


@pytest.mark.parametrize("bias_dtype", DTYPES, ids=NAMES.values())
@pytest.mark.parametrize("dtype", DTYPES, ids=NAMES.values())
def test_bias_of_grouped_matmul(dtype, bias_dtype):
    tensors = [randn(6, 4, dtype=dtype), randn(3, 5, 4, dtype=dtype, seed=1), randn(3, 5, dtype=bias_dtype, seed=2)]
    counts = torch.tensor([1, 3, 2])
    fused, reference = (
        lambda x, w, b, f=f: f(x, w, counts.to(x.device), b) for f in (ops.grouped_matmul, ops.grouped_matmul_reference)
    )
    assert_like_eager(fused, reference, tensors, roundings=2)


def test_dtypes_that_do_not_match_are_refused_as_in_eager():
    x, gate, up = randn(3, 4).to("npu").bfloat16(), randn(5, 4).to("npu"), randn(5, 4).to("npu")
    with pytest.raises(RuntimeError, match="dtype"):
        ops.gated_linear(x, gate, up)
    with pytest.raises(RuntimeError, match="dtype"):
        ops.grouped_matmul(x, gate.unsqueeze(0), torch.tensor([3]).to("npu"))


def test_float64_runs_the_reference():
    x, w = randn(3, 8).double(), randn(8).double()
    torch.testing.assert_close(ops.rms_norm(x.to("npu"), w.to("npu"), 1e-6).cpu(), ops.rms_norm_reference(x, w, 1e-6))


@pytest.mark.parametrize("cast", DTYPES[1:], ids=["bf16", "fp16"])
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_gated_linear_under_autocast(activation, cast):
    """As nn.Linear: computed and returned in autocast's dtype, gradients in the parameters' own."""
    tensors = [randn(3, 4, 8), randn(5, 8, seed=1), randn(5, 8, seed=2), randn(5, seed=3), randn(5, seed=4)]

    def fused(*placed):
        with torch.autocast("npu", dtype=cast):
            return ops.gated_linear(*placed, activation)

    def eager(*placed):
        with torch.autocast("cpu", dtype=cast):
            return ops.gated_linear_reference(*placed, activation)

    results = [outcome(f, tensors, device) for f, device in ((fused, "npu"), (eager, "cpu"))]
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype
        # operands, products, activation and result are rounded: four on values below the largest
        torch.testing.assert_close(a, b, rtol=0, atol=4 * torch.finfo(cast).eps * max(b.abs().max().item(), 1.0))


def test_moe_experts_under_autocast():
    """The experts compute in autocast's dtype; the result keeps the dtype of the hidden states."""
    index = torch.tensor([[0, 2], [1, 0], [2, 1]])
    tensors = [randn(3, 8), torch.rand(3, 2), randn(3, 12, 8, seed=1), randn(3, 8, 6, seed=2)]

    def experts(function, device):
        def call(x, weights, gate_up, down):
            with torch.autocast(device, dtype=torch.bfloat16):
                return function(x, index.to(device), weights, gate_up, down)

        return outcome(call, tensors, device)

    for a, b in zip(experts(ops.moe_experts, "npu"), experts(ops.experts_reference, "cpu"), strict=True):
        assert a.dtype == b.dtype == torch.float32
        # operands, gate_up, hidden, out and the weighted sum are rounded to bf16 in a row
        torch.testing.assert_close(
            a, b, rtol=0, atol=5 * torch.finfo(torch.bfloat16).eps * max(b.abs().max().item(), 1.0)
        )


class Without:
    def __init__(self, *names):
        self._names, self._ops = names, torch.ops.npu

    def __getattr__(self, name):
        if name in self._names:
            raise AttributeError(name)
        return getattr(self._ops, name)


@pytest.mark.parametrize(
    "missing",
    [
        "npu_moe_token_permute_grad_v2",
        "npu_moe_init_routing_v2",
        "npu_moe_token_unpermute",
        "npu_grouped_matmul",
        "npu_swiglu",
    ],
)
def test_experts_without_one_of_their_ops(missing, monkeypatch):
    """Older versions of torch_npu have only some of them."""
    index = torch.tensor([[0, 2], [3, 0], [2, 1]])  # 3: of another rank
    tensors = [randn(3, 8), torch.rand(3, 2), randn(3, 12, 8, seed=1), randn(3, 8, 6, seed=2)]
    fused, reference = (
        lambda x, w, gate_up, down, f=f: f(x, index.to(x.device), w, gate_up, down)
        for f in (ops.moe_experts, ops.experts_reference)
    )
    monkeypatch.setattr(torch.ops, "npu", Without(missing))
    assert_like_eager(fused, reference, tensors, roundings=40)  # fp32 sums of up to 12 terms in another order


@pytest.mark.parametrize("missing", [(), ("npu_moe_gating_top_k_softmax_v2",), ("npu_moe_gating_top_k_softmax",)])
@pytest.mark.parametrize("dtype", DTYPES[:2], ids=["fp32", "bf16"])
def test_router_without_one_of_its_ops(missing, dtype, monkeypatch):
    logits = randn(5, 8, dtype=dtype)
    monkeypatch.setattr(torch.ops, "npu", Without(*missing))
    for renormalize in (True, False):
        weights, index = ops.top_k_softmax(logits.to("npu"), 3, renormalize)
        expected = ops.top_k_softmax_reference(logits, 3, renormalize)
        assert torch.equal(index.cpu(), expected[1])
        # one rounding of the same fp32 value, which may differ in its last place
        torch.testing.assert_close(weights.cpu(), expected[0], rtol=torch.finfo(dtype).eps, atol=0)
        with_grad = logits.to("npu").requires_grad_()
        ops.top_k_softmax(with_grad, 3, renormalize)[0].square().sum().backward()
        eager = logits.clone().requires_grad_()
        ops.top_k_softmax_reference(eager, 3, renormalize)[0].square().sum().backward()
        # weights, their gradient and that of the logits are rounded, all below 1
        torch.testing.assert_close(with_grad.grad.cpu(), eager.grad, rtol=0, atol=3 * torch.finfo(dtype).eps)


def test_zero_centered_norm_without_its_op(monkeypatch):
    tensors = [randn(3, 16, dtype=torch.bfloat16), randn(16, dtype=torch.bfloat16, seed=1)]
    monkeypatch.setattr(torch.ops, "npu", Without("npu_gemma_rms_norm"))
    functions = [lambda x, w, f=f: f(x, w, 1e-6, 1, "gemma") for f in (ops.rms_norm, ops.rms_norm_reference)]
    assert_like_eager(*functions, tensors, roundings=2)


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=["fp32", "bf16"])
def test_equal_scores_go_to_the_lower_expert(dtype):
    _, index = ops.top_k_softmax(torch.zeros(2, 8, dtype=dtype).to("npu"), 3)
    assert index.cpu().tolist() == [[0, 1, 2]] * 2
    index = ops.group_top_k_sigmoid(torch.zeros(2, 8).to("npu"), None, 3, 2, 1)[1]
    assert index.cpu().tolist() == [[0, 1, 2]] * 2


def test_group_router_with_gradients_runs_the_reference():
    logits = randn(5, 8).to("npu").requires_grad_()
    weights, _ = ops.group_top_k_sigmoid(logits, None, 3, 2, 1)
    (grad,) = torch.autograd.grad(weights.square().sum(), logits)
    assert grad.isfinite().all() and (grad != 0).any()


def test_ops_import_nothing_of_the_package():
    """Whatever fails in transformers or in a layer, the ops stay loadable by themselves."""
    name = ops.__name__
    for module in [m for n, m in sys.modules.items() if n.startswith(name + ".")]:
        for value in vars(module).values():
            origin = getattr(value, "__module__", None) or ""
            assert not origin.startswith(name.rpartition(".")[0]) or origin.startswith(name)
