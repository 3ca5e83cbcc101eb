"""What every op promises, asked of every sample in the table (conftest.py)."""

import copy
from contextlib import nullcontext

import npu_emulator
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint


def tensors(result) -> list:
    return [result] if isinstance(result, torch.Tensor) else list(result)


def run(function, sample, args):
    """Outputs, and with differentiable inputs the gradients of a fixed weighting of the floating-point outputs."""
    outputs = tensors(function(*args, **sample.kwargs))
    inputs = [value for value in args if isinstance(value, torch.Tensor) and value.requires_grad]
    targets = [output for output in outputs if output.requires_grad]
    if not targets:
        return [output.detach() for output in outputs], []
    weights = [torch.sin(torch.arange(t.numel(), dtype=torch.float64) + 1).view(t.shape).to(t.dtype) for t in targets]
    torch.autograd.backward(targets, [w.to(t.device) for w, t in zip(weights, targets, strict=True)])
    return [output.detach() for output in outputs], [value.grad for value in inputs]


def exact(op, sample, dtype, grad):
    """The reference in float64, from inputs that are representable in `dtype`."""
    args = sample.on("cpu", dtype)
    wide = [a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    for position, value in enumerate(wide):
        if isinstance(value, torch.Tensor) and value.is_floating_point():
            value.requires_grad_(grad and position not in sample.constant)
    return run(op.reference, sample, wide)


def largest(tensor):
    return tensor.abs().max().item() if tensor.numel() else 0.0


def assert_as_close_as_eager(op, fused, eager, exact, dtype):
    """A fused op rounds no more often than eager does, so it may lie no further from float64 than eager does, give or
    take one unit in the last place for each of its roundings: one that was lucky in eager may be unlucky here. The unit
    is that of the largest value, or of 1 where that is more: gradients are sums of terms of that size, and may cancel.
    """
    assert fused.dtype == eager.dtype and fused.shape == eager.shape
    fused, eager, exact = fused.cpu().double(), eager.cpu().double(), exact.double()
    assert fused.isfinite().all()
    eager_error, error = largest(eager - exact), largest(fused - exact)
    bound = eager_error + op.roundings * torch.finfo(dtype).eps * max(largest(exact), 1.0)
    assert error <= bound, f"{error:.3g} from float64, eager {eager_error:.3g}"


def compare(op, sample, dtype, grad, fused=None):
    fused = run(fused or op.fused, sample, sample.on("npu", dtype, grad))
    eager = run(op.reference, sample, sample.on("cpu", dtype, grad))
    truth = exact(op, sample, dtype, grad)
    for kind in range(2):
        for f, e, t in zip(fused[kind], eager[kind], truth[kind], strict=True):
            if e is None:
                assert f is None
            elif e.is_floating_point():
                assert_as_close_as_eager(op, f, e, t, dtype)
            else:
                assert torch.equal(f.cpu().long(), e.long())


@pytest.mark.differentiable
def test_forward_and_backward(op, sample, dtype):
    compare(op, sample, dtype, grad=True)


def test_inference(op, sample):
    compare(op, sample, torch.bfloat16, grad=False)


def spread(tensor):
    """The same values with a gap behind each in memory."""
    return torch.stack((tensor, torch.full_like(tensor, 77)), dim=-1)[..., 0]


def turned(tensor):
    """The same values with the first and last dimension swapped in memory."""
    return tensor.transpose(0, -1).contiguous().transpose(0, -1) if tensor.dim() else tensor


@pytest.mark.differentiable
@pytest.mark.parametrize("layout", [spread, turned])
def test_strides_do_not_matter(op, sample, layout):
    plain = run(op.fused, sample, sample.on("npu", torch.float32, grad=True))
    args = sample.on("npu", torch.float32)
    strided = [layout(a) if isinstance(a, torch.Tensor) else a for a in args]
    for position, value in enumerate(strided):
        if isinstance(value, torch.Tensor) and value.is_floating_point() and position not in sample.constant:
            value.requires_grad_()
    result = run(op.fused, sample, strided)
    for kind in range(2):
        for a, b in zip(plain[kind], result[kind], strict=True):
            # fp32 sums in another order: a few units in the last place of the largest term
            torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-5 * max(1.0, largest(a)))


@pytest.mark.differentiable
def test_expanded_rows(op):
    """One row, shown many times by stride 0."""
    sample = next(s for s in op.samples() if s.args[0].dim() >= 2 and s.args[0].shape[0] > 1)
    args = list(sample.on("npu", torch.float32))
    args[0] = args[0][:1].expand_as(args[0])
    row = args[0].detach().contiguous().requires_grad_()
    expanded = args[0].detach().requires_grad_()
    results = [run(op.fused, sample, [x, *args[1:]]) for x in (row, expanded)]
    torch.testing.assert_close(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])


@pytest.mark.differentiable
def test_only_what_is_needed(op, sample):
    """Each differentiable input alone: its gradient as when all are asked for, and none for the others."""
    everything = sample.on("npu", torch.float32, grad=True)
    grads = iter(run(op.fused, sample, everything)[1])
    for position, value in enumerate(everything):
        if not (isinstance(value, torch.Tensor) and value.requires_grad):
            continue
        args = list(sample.on("npu", torch.float32))
        args[position].requires_grad_()
        (grad,) = run(op.fused, sample, args)[1]
        torch.testing.assert_close(grad, next(grads))
        assert all(a.grad is None for i, a in enumerate(args) if i != position and isinstance(a, torch.Tensor))


@pytest.mark.differentiable
def test_used_twice(op, sample):
    once = run(op.fused, sample, sample.on("npu", torch.float32, grad=True))[1]

    def twice(*args, **kwargs):
        first, second = (tensors(op.fused(*args, **kwargs)) for _ in range(2))
        return [a + b if a.is_floating_point() else a for a, b in zip(first, second, strict=True)]

    for a, b in zip(once, run(twice, sample, sample.on("npu", torch.float32, grad=True))[1], strict=True):
        # autograd adds the paths of a composed op in an order of its own: a unit in the last place or two
        torch.testing.assert_close(b, 2 * a, rtol=2.4e-7, atol=1e-7 * largest(a))


@pytest.mark.differentiable
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint(op, sample, reentrant):
    """Recomputed, the saved tensors have the shapes, dtypes and devices of the first time: checkpoint compares them."""
    plain = run(op.fused, sample, sample.on("npu", torch.float32, grad=True))

    def checkpointed(*args, **kwargs):
        result = checkpoint(lambda *a: op.fused(*a, **kwargs), *args, use_reentrant=reentrant)
        return result if isinstance(result, torch.Tensor) else tuple(result)

    recomputed = run(checkpointed, sample, sample.on("npu", torch.float32, grad=True))
    for a, b in zip(plain[0] + plain[1], recomputed[0] + recomputed[1], strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=0)


@pytest.mark.differentiable
def test_reference_gradients(op, sample):
    """The definitions themselves, by finite differences in float64."""
    args = sample.on("cpu", torch.float64, grad=True)
    places = [i for i, a in enumerate(args) if isinstance(a, torch.Tensor) and a.requires_grad]
    if not any(args[i].numel() for i in places) or max(args[i].numel() for i in places) > 500:
        return

    def function(*values):
        filled = list(args)
        for i, value in zip(places, values, strict=True):
            filled[i] = value
        return next(t for t in tensors(op.reference(*filled, **sample.kwargs)) if t.is_floating_point())

    torch.autograd.gradcheck(function, tuple(args[i] for i in places), fast_mode=True)


def metadata(tensor):
    return tensor.shape, tensor.dtype, tensor.device.type


@pytest.mark.differentiable
def test_fake_tensors(op, sample):
    """Shapes, dtypes and devices of outputs and gradients as on the device, without computing anything."""
    real = run(op.fused, sample, sample.on("npu", torch.bfloat16, grad=True))
    args = sample.on("npu", torch.bfloat16)
    with FakeTensorMode() as mode:
        fake = [mode.from_tensor(a) if isinstance(a, torch.Tensor) else a for a in args]
        for position, value in enumerate(fake):
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                value.requires_grad_(position not in sample.constant)
        result = run(op.fused, sample, fake)
    for kind in range(2):
        expected = [None if t is None else metadata(t) for t in real[kind]]
        assert [None if t is None else metadata(t) for t in result[kind]] == expected


def test_meta_tensors(op, sample):
    outputs = [metadata(t)[:2] for t in tensors(op.reference(*sample.on("cpu", torch.bfloat16), **sample.kwargs))]
    if op.name == "group_top_k_sigmoid":  # its test wrapper sorts on the CPU
        return
    args = sample.on("meta", torch.bfloat16)
    assert [metadata(t)[:2] for t in tensors(op.fused(*args, **sample.kwargs))] == outputs


def tokens(op, num_tokens):
    """Arguments with that many tokens, and the launch that shows that the fused op ran."""
    x = torch.ones(num_tokens, 8).to("npu").requires_grad_()
    index = torch.arange(2 * num_tokens).remainder(3).view(num_tokens, 2).to("npu")
    weights = torch.ones(num_tokens, 2).to("npu").requires_grad_()
    w = [torch.ones(s).to("npu").requires_grad_() for s in [(8,), (6, 8), (6, 8), (3, 12, 8), (3, 8, 6)]]
    heads = torch.ones(2, num_tokens, 3, 8).to("npu").transpose(1, 2).requires_grad_()
    tables = [torch.ones(1, 1, num_tokens, 8).to("npu") for _ in range(2)]
    counts = torch.tensor([num_tokens - 1, 0, 1]).to("npu")
    return {
        "rms_norm": ((x, w[0], 1e-6), "aclnnRmsNormGrad"),
        "rms_norm_gated": ((x, x * 2, w[0]), "aclnnRmsNormGrad"),
        "add_rms_norm": ((x, x * 2, w[0]), "aclnnAddRmsNorm"),
        "swiglu": ((x,), "aclnnSwiGluGrad"),
        "geglu": ((x,), "aclnnGe"),  # GeGlu; compiled, Gelu
        "gated_activation": ((x, x * 2), "aclnnSwiGluGrad"),
        "gated_linear": ((x, w[1], w[2]), "aclnnSwiGluGrad"),
        "rotary": ((heads, *tables), "aclnnRotaryPositionEmbeddingGrad"),
        "grouped_matmul": ((x, w[3], counts), "aclnnGroupedMatmulV5"),
        "routing": ((x, index, weights, 3), "aclnnMoeTokenPermuteGrad"),
        "moe_experts": ((x, index, weights, w[3], w[4]), "aclnnMoeTokenPermuteGrad"),
        "top_k_softmax": ((x, 2), "aclnnMoeGatingTopKSoftmaxV2"),
    }[op.name]


@pytest.mark.differentiable
def test_compiled(op):
    """aot_eager in one graph: the fused op runs in it, forward and backward give what they give without, and after the
    second length nothing is compiled again."""
    torch._dynamo.reset()
    compiled, graphs = torch.compile(op.fused, backend="aot_eager", fullgraph=True), []
    for num_tokens in (4, 6, 7):
        results = []
        for function in (op.fused, compiled):
            args, launch = tokens(op, num_tokens)
            with npu_emulator.count() if npu_emulator.is_emulated() else nullcontext() as traffic:
                results.append(run(function, next(op.samples()), args))
            assert traffic is None or any(name.startswith(launch) for name in traffic.by_op), traffic
        for a, b in zip(results[0][0] + results[0][1], results[1][0] + results[1][1], strict=True):
            torch.testing.assert_close(b, a)  # fp32: gradients may be summed in another order
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[1] == graphs[2]


@pytest.mark.differentiable
def test_compiled_with_turned_operands(op):
    """x and its gradient seen with two dimensions exchanged, as q and k are: views of the results stay views."""
    torch._dynamo.reset()
    (x, *rest), _ = tokens(op, 4)
    shape = x.transpose(0, 1).shape

    def turned(flat):
        out = tensors(op.fused(flat.view(shape).transpose(0, 1), *rest))[0]
        return out.transpose(0, 1).flatten()

    results = []
    for function in (turned, torch.compile(turned, backend="aot_eager", fullgraph=True)):
        flat = torch.linspace(-1, 1, x.numel()).to("npu").requires_grad_()
        out = function(flat)
        (grad,) = torch.autograd.grad(out, flat, torch.linspace(1, 2, out.numel()).to("npu"))
        results.append((out.detach(), grad))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(b, a)  # fp32, as in test_compiled


class Without:
    """`torch.ops.npu` of an older torch_npu: the ops are not there."""

    def __init__(self, *names):
        self._names, self._ops = names, torch.ops.npu

    def __getattr__(self, name):
        if not self._names or name in self._names:
            raise AttributeError(name)
        return getattr(self._ops, name)


@pytest.mark.differentiable
def test_without_the_op(op, sample, monkeypatch):
    """The reference runs on the device instead, and gives what the reference gives there."""
    monkeypatch.setattr(torch.ops, "npu", Without())
    fused, eager = (run(f, sample, sample.on("npu", torch.float32, grad=True)) for f in (op.fused, op.reference))
    for a, b in zip(fused[0] + fused[1], eager[0] + eager[1], strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_refuses_what_eager_refuses(op):
    for sample, error in op.errors():
        for device, function in (("cpu", op.reference), ("npu", op.fused)):
            with pytest.raises(error):
                function(*sample.on(device, torch.float32), **sample.kwargs)


@pytest.mark.differentiable
def test_inputs_are_left_alone(op, sample):
    args = sample.on("npu", torch.float32, grad=True)
    before = [copy.deepcopy(a.detach()) if isinstance(a, torch.Tensor) else a for a in args]
    run(op.fused, sample, args)
    for a, b in zip(args, before, strict=True):
        if isinstance(a, torch.Tensor):
            assert torch.equal(a.detach().cpu(), b.cpu())


def test_an_operand_on_another_device_is_refused(op):
    sample = next(iter(op.samples()))
    for position, value in enumerate(sample.args):
        if position and isinstance(value, torch.Tensor):
            args = list(sample.on("npu", torch.float32))
            args[position] = args[position].cpu()
            with pytest.raises(RuntimeError, match=r"same device.* cpu"):
                op.fused(*args, **sample.kwargs)
