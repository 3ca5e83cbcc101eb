"""RMSNorm and gated RMSNorm."""

import itertools
from dataclasses import replace

import torch

from .. import ops
from ..ops.activation import ACTIVATIONS
from ..specs import GatedNorm, Norm
from .probe import (
    FLOATS,
    GRADIENTS,
    all_near,
    forward,
    lengths,
    near,
    parameters,
    run,
    same_in_training,
    same_rounding,
    settle,
    with_special_values,
)
from .stand_in import Mismatch, own_tensors, random, shrink, stand_in

TINY = slice(0, None, 4)  # rows of `inputs` so small that eps is all that is under the root


def match_norm(module):
    name, vector = next(iter(own_tensors(module).items()), (None, None))
    gated, dim = len(parameters(module)) == 2, 48 if name is None else vector.numel()
    target, args = stand_in(module, scale=1.0), inputs(dim, gated, (1e-12, 1e-3, 1.0, 1e6))
    x, y = args[0], run(forward, target, args)[0]
    if not isinstance(y, torch.Tensor) or y.shape != x.shape:
        raise Mismatch("does not return one tensor like its input", candidate=False)
    if not gated and not near(run(forward, target, (x[:, 3::4] * 64,))[0], y[:, 3::4], 1e-3):
        raise Mismatch("does not normalize", candidate=False)
    hypotheses = (gated_norms if gated else plain_norms)(target, name, args, y)
    cases = [("", target, args), *more_cases(module, dim, gated)]
    spec, _ = settle(hypotheses, cases, "normalizes, but not to scale * x / sqrt(mean(x²) + eps)")
    if gated:
        try:
            alone = run(forward, target, (x, None))
            spec = replace(spec, gate_optional=all_near(alone, run(reference(spec), target, (x, None))))
        except Mismatch:
            pass
    casting_mode, dtypes = agreeing_dtypes(module, spec, dim, gated, None if vector is None else vector.dtype)
    trained = stand_in(module, scale=1.0, training=True)
    training = same_in_training(target, trained, args)
    return replace(spec, casting_mode=casting_mode, dtypes=dtypes, training=training)


def inputs(dim, gated, scales):
    rows = torch.tensor(scales).repeat(max(2, 1024 // dim))[:, None]
    x = random(1, 2, len(rows), dim) * rows
    return (x, random(2, *x.shape, scale=3)) if gated else (x,)


def reference(spec):
    if isinstance(spec, Norm):
        options = (spec.eps, spec.offset, spec.casting_mode)
        return lambda m, x: ops.rms_norm_reference(x, getattr(m, spec.weight) if spec.weight else None, *options)
    options = (spec.eps, spec.activation, spec.gate_first, spec.group_size, spec.casting_mode)
    return lambda m, x, gate: ops.rms_norm_gated_reference(x, gate, getattr(m, spec.weight), *options)


def measured_eps(target, scaled, y):
    """In rows near zero y is scaled / sqrt(eps). Measured to five digits or so; what the class holds is exact."""
    eps = (scaled / y)[:, TINY].double().square().nanmedian().item()
    held = [value for value in vars(target).values() if type(value) is float]
    exact = [*held, float(f"{eps:.1e}"), torch.finfo(torch.float32).eps, torch.finfo(torch.bfloat16).eps]
    return next((value for value in exact if abs(value - eps) <= 2e-5 * eps), eps)


def plain_norms(target, name, args, y):
    weight = getattr(target, name).detach() if name else None
    for used, offset in ((True, 0), (True, 1), (False, 0)) if name else ((False, 0),):
        eps = measured_eps(target, (offset + weight if used else 1.0) * args[0], y)
        if eps > 0:
            spec = Norm(name if used else None, eps, offset)
            yield spec, reference(spec), "an RMS norm"


def gated_norms(target, name, args, y):
    x, gate = args
    if name is None:
        raise Mismatch("is a gated norm without a weight, which has no fused form")
    dim = x.shape[-1]
    groups = [None, *(size for size in range(dim // 2, 1, -1) if dim % size == 0)]
    for activation, act in ACTIVATIONS.items():
        eps = measured_eps(target, getattr(target, name).detach() * x * act(gate), y)
        for gate_first, group_size in itertools.product((False, True), groups) if eps > 0 else ():
            spec = GatedNorm(name, eps, activation, gate_first, group_size)
            yield spec, reference(spec), f"a gated RMS norm ({activation})"


def more_cases(module, dim, gated):
    def case(when, x, **options):
        return when, stand_in(module, **options), (x, random(3, *x.shape)) if gated else (x,)

    x = random(4, 2, 5, dim)
    peaks = torch.eye(min(dim, 8), dim).repeat(2, 1, 1) * 10
    yield case("for large weights or peaks (a clamp?)", peaks, scale=1e3)
    yield case("for inf, nan or zeros", with_special_values(x))
    yield case("for a single position", x[:, :1])
    yield case("for 2-D input", x[0])
    yield case("for 4-D input", random(5, 2, 3, 4, dim))
    small = shrink([dim])
    for length in lengths(module):
        yield case(f"at length {length}", random(6, 1, length, small.get(dim, dim)), sizes=small)
    yield case(GRADIENTS, x)


def agreeing_dtypes(module, spec, dim, gated, own):
    """(casting_mode, (x, weight) dtypes in which rounding and output dtype agree): the mode with the most of them."""
    args = inputs(dim, gated, (1.0, 0.1, 300.0, 8e3))
    seen = {}
    for pair in itertools.product(FLOATS, FLOATS if spec.weight else (None,)):
        target, cast = stand_in(module, dtype=pair[1] or torch.float32, scale=1.0), [a.to(pair[0]) for a in args]
        try:
            seen[pair] = target, cast, run(forward, target, cast)[0]
        except Mismatch:
            continue

    def agreeing(mode):
        for pair, (target, cast, out) in seen.items():
            agree = near if out.dtype == torch.float32 == pair[0] else same_rounding
            if agree(out, run(reference(replace(spec, casting_mode=mode)), target, cast)[0]):
                yield pair

    dtypes = {mode: tuple(agreeing(mode)) for mode in (("llama", "gemma") if spec.weight else ("llama",))}
    best = max(dtypes, key=lambda mode: len(dtypes[mode]))
    for pair in ((own, own),) if spec.weight else ((torch.float32, None), (torch.bfloat16, None)):
        if pair not in dtypes[best]:
            raise Mismatch(f"computes an RMS norm, but rounds elsewhere in {str(pair[0])[6:]}")
    return best, dtypes[best]
