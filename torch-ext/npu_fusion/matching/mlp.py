"""Gated MLPs: down(act(gate(x)) * up(x))."""

import itertools
from dataclasses import replace
from functools import partial

import torch
import torch.nn.functional as F

from ..ops.activation import ACTIVATIONS
from ..specs import MLP
from .probe import GRADIENTS, forward, lengths, near, run, same_in_training, same_rounding, settle, with_special_values
from .stand_in import Mismatch, is_linear, random, shrink, stand_in

UNFUSED = {  # recognised for the sake of the reason
    "relu": F.relu,
    "relu squared": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "tanh": torch.tanh,
    "identity": lambda x: x,
}


def match_mlp(module):
    children = {name: child for name, child in module._modules.items() if child is not None}
    linears = {name: child for name, child in children.items() if is_linear(child)}
    options = list(assignments(linears))
    if not options:
        raise Mismatch("the shapes of its linear layers are not those of a gated MLP", candidate=False)
    others = [n for n, child in children.items() if n not in linears and next(child.parameters(), None) is not None]
    beside = f" ({', '.join(others)} takes part, too)" if others else ""

    sizes = shrink(size for child in linears.values() for size in (child.in_features, child.out_features))
    target = stand_in(module, sizes, opaque=True)
    width = getattr(target, options[0][1]).in_features
    x = random(10, 4, 16, width)
    cases = [("", target, (x * 0.1,)), ("for inputs near 1 (a clamp?)", target, (x,))]
    cases += [(f"for inputs near {scale:g} (a clamp?)", target, (x * scale,)) for scale in (30.0, 1e6, 1e-5)]
    cases += [("for inf, nan or zeros", target, (with_special_values(x),)), ("for 2-D input", target, (x[0],))]
    cases += [("for a single position", target, (x[:, :1],))]
    cases += [(f"at length {n}", target, (random(11, 1, n, width),)) for n in lengths(module)]
    cases += [(GRADIENTS, target, (x[:1],))]
    hypotheses = (
        (MLP(*names, act, half), partial(reference, spec=MLP(*names, act, half)), f"a gated MLP ({act})")
        for (*names, half), act in itertools.product(options, (*ACTIVATIONS, *UNFUSED))
    )
    spec, _ = settle(hypotheses, cases, f"does not compute down(act(gate(x)) * up(x)){beside}")
    if spec.activation in UNFUSED:
        raise Mismatch(f"is a gated MLP whose activation, {spec.activation}, has no fused form")

    low, args = stand_in(module, sizes, torch.bfloat16, opaque=True), (x.bfloat16(),)
    (out,), (native,) = run(forward, low, args), run(partial(reference, spec=spec), low, args)
    if not near(out, native, 0.03):  # an activation written in steps rounds at each: a few ulp of 2^-8
        raise Mismatch("computes a gated MLP, but another one in bfloat16")
    if not same_rounding(out, native):
        once = run(partial(reference, spec=replace(spec, upcast=True)), low, args)[0]
        spec = replace(spec, upcast=same_rounding(out, once))
    trained = stand_in(module, sizes, training=True, opaque=True)
    return replace(spec, training=same_in_training(target, trained, (x,)))


def assignments(linears):
    """(gate, up, down, half that is activated) that the shapes allow."""
    for order in itertools.permutations(linears):
        down, up, gate = (linears[name] for name in (order[0], order[1], order[-1]))
        same = (gate.in_features, gate.out_features) == (up.in_features, up.out_features)
        if len(order) == 3 and same and up.out_features == down.in_features:
            yield order[2], order[1], order[0], None
        if len(order) == 2 and up.out_features == 2 * down.in_features:
            yield order[1], order[1], order[0], 0
            yield order[1], order[1], order[0], 1


def reference(module, x, spec):
    gate, up, down = (getattr(module, name) for name in (spec.gate, spec.up, spec.down))
    act = ACTIVATIONS.get(spec.activation) or UNFUSED[spec.activation]
    if spec.gate_half is None:
        gate, up = gate(x), up(x)
    else:
        halves = up(x).chunk(2, -1)
        gate, up = halves[spec.gate_half], halves[1 - spec.gate_half]
    return down((act(gate.float()) * up.float()).to(gate.dtype) if spec.upcast else act(gate) * up)
