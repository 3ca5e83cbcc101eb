"""Every op against its reference on what hypothesis draws: no error, no NaN, no difference that eager would not have.

    FUZZ_EXAMPLES=1000 pytest tests/fuzz     # cases an op, drawn anew each time; by default few, and always the same

How far may a fused result lie from the reference in float64? As far as eager in the same dtype does, and as far as
rounding can carry it: the reference runs in float64 with noise of one rounding around each of its operations, forward
and backward (Monte Carlo arithmetic: D. S. Parker, 1997), which shows cancellation wherever it happens. Eight runs give
a spread; an error above 16 spreads is not rounding. A single rounding is uniform, so that all eight runs fall below a
16th of it once in 16**8 times.
"""

import os
from contextlib import nullcontext
from datetime import timedelta

import pytest
import torch
from fuzz.cases import EXTREME, OPS, ROUTERS, Values
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", 0))
RUNS, SPREADS = 8, 16

configured = settings(
    max_examples=EXAMPLES or 60,
    derandomize=not EXAMPLES,
    deadline=timedelta(seconds=30),  # a hang; a case takes some milliseconds
    print_blob=True,
    suppress_health_check=list(HealthCheck),
)


aten = torch.ops.aten


class Rounding(TorchDispatchMode):
    """Changes inputs and outputs of whatever is computed by up to `relative` of them and `absolute`.

    Noise in the inputs stands for the roundings inside of an operation: of terms before they are summed, of a factor
    that nearly vanishes.
    """

    def __init__(self, relative: float, absolute: float, seed: int):
        super().__init__()
        self.relative, self.absolute = relative, absolute
        self.generator = torch.Generator().manual_seed(seed)
        self.largest = 0.0  # of all finite values on the way

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if not self.is_float(out) or func.is_view or func._schema.is_mutable:
            return out
        for value in (*args, out):
            if self.is_float(value) and value.numel():
                self.largest = max(self.largest, value.abs().nan_to_num(0, posinf=0).max().item())
        out = self.rounded(func(*map(self.rounded, args), **(kwargs or {})))
        if func.overloadpacket in (aten.gelu, aten.gelu_backward):  # 1 + erf, or 1 + tanh, cancels inside of them
            *grad, x = (a for a in args if self.is_float(a))
            out = out + self.noise(
                x.abs() * self.relative if not grad else grad[0].abs() * (1 + x.abs()) * self.relative
            )
        return out

    def is_float(self, value):
        return isinstance(value, torch.Tensor) and value.is_floating_point()

    def rounded(self, value):
        if not self.is_float(value):
            return value
        size = torch.minimum(value.abs() * self.relative + self.absolute, value.abs())  # what is positive stays so
        return value + self.noise(size)

    def noise(self, size):
        size = size.nan_to_num(0, posinf=0)
        return size * (torch.rand(size.shape, generator=self.generator, dtype=torch.float64) * 2 - 1)


def floats(tensors):
    return [t for t in tensors if isinstance(t, torch.Tensor) and t.is_floating_point()]


def run(function, arguments, place, seed, mode=nullcontext()):  # noqa: B008
    """Outputs and gradients, computed under `mode`; None for a gradient that was not asked for."""
    placed = [place(a) if hasattr(a, "tensor") else a for a in arguments]
    inputs = floats(placed)
    for tensor, value in zip(inputs, [a for a in arguments if isinstance(a, Values)], strict=True):
        tensor.requires_grad_(value.grad)
    with mode:
        outputs = function(*placed)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)
    wanted = [t for t in inputs if t.requires_grad]
    grads = [None] * len(wanted)
    targets = [t for t in outputs if t.requires_grad]
    if targets:
        generator = torch.Generator().manual_seed(seed)
        weights = [torch.randn(t.shape, generator=generator).bfloat16().to(t.dtype).to(t.device) for t in targets]
        with mode:
            grads = torch.autograd.grad(targets, wanted, weights, allow_unused=True)
    return [t.detach().cpu() for t in outputs], [g if g is None else g.cpu() for g in grads]


def on_npu(value):
    return value.on_npu() if isinstance(value, Values) else value.tensor().to("npu")


def on_cpu(value):
    return value.tensor()


def in_float64(value):
    tensor = value.tensor()
    return tensor.double() if tensor.is_floating_point() else tensor


def outcome(*args):
    try:
        return run(*args)
    except (RuntimeError, ValueError, IndexError, KeyError, TypeError) as error:
        return error


def assert_explained(name, fused, eager, exact, noisy, ulp, in_range, one_infinity):
    """`in_range`: no value on the way is so large that it could leave the dtype's range in another order of operations.

    `one_infinity`: what is not finite is so in one way, whatever the order of sums.
    """
    assert (fused.shape, fused.dtype) == (eager.shape, eager.dtype), name
    if not fused.is_floating_point():
        assert torch.equal(fused, eager), name
        return
    fused, eager = fused.double(), eager.double()
    finite = exact.isfinite() & eager.isfinite()
    spread = torch.stack([(n - exact).abs() for n in noisy]).amax(0) if exact.numel() else exact
    bound = (eager - exact).abs() + SPREADS * spread + ulp * exact.abs()
    wrong = finite & (fused.isfinite() | in_range) & ~((fused - exact).abs() <= bound)
    assert not wrong.any(), (
        f"{name}: {fused[wrong][0]:.6g}, but float64 gives {exact[wrong][0]:.6g}, eager {eager[wrong][0]:.6g}; "
        f"bound {bound[wrong][0]:.3g}, {int(wrong.sum())} of {wrong.numel()}"
    )
    nothing = ~exact.isfinite() & ~eager.isfinite()
    assert not fused[nothing].isfinite().any(), f"{name}: finite, but float64 and eager are not"
    if one_infinity:  # else a sum may overflow to either infinity before it meets the other
        same = nothing & (exact.isnan() == eager.isnan()) & (exact.nan_to_num(0) == eager.nan_to_num(0))
        assert torch.equal(fused[same].nan_to_num(7), exact[same].nan_to_num(7)), f"{name}: another kind of not finite"


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_fused_is_the_reference(op, count_case):
    @configured
    @given(op.arguments, st.integers(0, 2**16))
    def check(arguments, seed):
        count_case()
        fused, eager = outcome(op.fused, arguments, on_npu, seed), outcome(op.reference, arguments, on_cpu, seed)
        if isinstance(fused, Exception) or isinstance(eager, Exception):
            # a user sees an error exactly where eager gives one
            assert isinstance(fused, Exception) and isinstance(eager, Exception), f"fused {fused!r}, eager {eager!r}"
            return
        exact = run(op.reference, arguments, in_float64, seed)
        tensors = [a for a in arguments if isinstance(a, Values)]
        # of several dtypes, the lowest precision and the lowest maximum
        infos = [torch.finfo(a.dtype) for a in tensors]
        ulp = max(info.eps for info in infos)
        # denormals of fp32 and bf16 may be flushed to zero (CPUs' bf16 products are), those of fp16 are rounded
        denormal = max(info.tiny * (info.eps if info.bits == 16 and info.max < 1e5 else 1) for info in infos)
        modes = [Rounding(ulp / 2, denormal, i) for i in range(RUNS)]
        noisy = [run(op.reference, arguments, in_float64, seed, mode) for mode in modes]
        in_range = max(mode.largest for mode in modes) < min(info.max for info in infos) / 8
        # of inf, PyTorch's CPU kernel of gelu without approximation makes NaN, except of a lone number
        one_infinity = (
            in_range
            and not {a.kind for a in tensors} & set(EXTREME)
            and "gelu" not in arguments
            and "none" not in arguments
        )
        for kind, part in enumerate(("output", "gradient")):
            for i, (f, e, x) in enumerate(zip(fused[kind], eager[kind], exact[kind], strict=True)):
                if e is None:
                    assert f is None, f"{part} {i}"
                else:
                    assert f is not None, f"{part} {i} is missing"
                    assert_explained(f"{part} {i}", f, e, x, [n[kind][i] for n in noisy], ulp, in_range, one_infinity)

    check()


def groups_tie(choice, arguments, eps):
    """For each token, whether the worst group that is kept and the best that is not are worth the same in fp32."""
    if len(arguments) < 5 or arguments[3] == arguments[4]:  # no groups, or all are kept
        return torch.zeros(choice.shape[0], dtype=torch.bool)
    _, _, _, groups, kept, *_ = arguments
    sums = choice.unflatten(-1, (groups, -1)).sort(descending=True).values[..., :2].sum(-1).sort(descending=True).values
    return sums[:, kept - 1] - sums[:, kept] <= 4 * eps * choice.abs().amax(1)


@pytest.mark.parametrize("op", ROUTERS, ids=lambda op: op.name)
def test_routers_choose_as_the_reference(op, count_case):
    """Which of two equal scores is chosen is not part of the definition, so the choice is judged by what was chosen."""
    softmax = op.name == "top_k_softmax"

    @configured
    @given(op.arguments, st.integers(0, 2**16))
    def check(arguments, seed):
        count_case()
        logits, bias = arguments[0], None if softmax else arguments[1]
        fused, eager = outcome(op.fused, arguments, on_npu, seed), outcome(op.reference, arguments, on_cpu, seed)
        if isinstance(fused, Exception) or isinstance(eager, Exception):
            assert isinstance(fused, Exception) and isinstance(eager, Exception), f"fused {fused!r}, eager {eager!r}"
            return
        (weights, index), grads = fused
        for result, expected in zip(fused[0], eager[0], strict=True):
            assert (result.shape, result.dtype) == (expected.shape, expected.dtype)
        # whatever the logits hold, an index is used to address memory
        assert ((index >= 0) & (index < logits.shape[1])).all()
        index, eager_index = index.long(), eager[0][1].long()
        assert all(len(set(row)) == len(row) for row in index.tolist()), "an expert is chosen twice"

        def route(logits, index):
            """The weights of a given choice, and the scores that the choice goes by."""
            scores = logits.softmax(-1) if softmax else logits.sigmoid()
            weights = scores.gather(1, index)
            if arguments[2 if softmax else 5]:
                weights = weights / (weights.sum(1, keepdim=True) + (0 if softmax else 1e-20))
            weights = weights if softmax else weights * arguments[6]
            return weights, scores if bias is None else scores + bias.tensor().double()

        exact = logits.tensor().double().requires_grad_()
        expected, choice = route(exact, index)
        # rows with inf or NaN have no best experts, and may not pretend to
        finite = exact.isfinite().all(1)
        assert torch.equal(weights.isfinite().any(1), eager[0][0].isfinite().any(1))
        eps, ulp = torch.finfo(torch.float32).eps, torch.finfo(weights.dtype).eps
        chosen, best = (choice.gather(1, i)[finite].sort(1).values for i in (index, eager_index))
        # scores are fp32, where those of two experts may round to one value
        same = (chosen - best).abs() <= 4 * eps * choice[finite].abs().amax(1, keepdim=True)
        assert (same.all(1) | groups_tie(choice[finite], arguments, eps)).all()
        # computed in fp32 (exp, sum and quotient: some units in the last place) and rounded once
        error = (weights.double() - expected)[finite].abs()
        assert (error <= ((ulp / 2 + 8 * eps) * expected.abs() + torch.finfo(weights.dtype).tiny)[finite]).all()
        if grads and grads[0] is not None and weights.numel() and finite.all():
            generator = torch.Generator().manual_seed(seed)
            grad = torch.randn(weights.shape, generator=generator).bfloat16()
            (right,) = torch.autograd.grad(expected, exact, grad.double())
            # a weight is at most 1 (or the scaling factor), and its derivative no larger; weights that were rounded,
            # their products with the gradient and the sums of these are off by a unit in the last place each
            ulp = max(ulp, torch.finfo(grads[0].dtype).eps)
            bound = 4 * ulp * grad.double().abs().sum(1, keepdim=True) * max(1, weights.double().abs().max().item())
            assert ((grads[0].double() - right).abs() <= bound).all()

    check()
