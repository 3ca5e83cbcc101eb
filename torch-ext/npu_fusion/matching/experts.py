"""Packed experts: two 3-D weights and forward(hidden_states, top_k_index, top_k_weights)."""

import itertools
from dataclasses import replace
from functools import partial

import torch

from .. import ops
from ..ops.activation import ACTIVATIONS
from ..specs import Experts
from .probe import FLOATS, GRADIENTS, all_near, forward, lengths, near, run, same_in_training, same_rounding, settle
from .stand_in import Mismatch, own_tensors, random, shrink, stand_in


def match_experts(module):
    tensors = own_tensors(module)
    if any(child.parameters() and next(child.parameters(), None) is not None for child in module.children()):
        raise Mismatch("applies submodules with weights of their own (a norm after each expert?)")
    options = list(assignments(tensors))
    if not options:
        raise Mismatch("the shapes of its weights are not those of packed experts", candidate=False)

    sizes = shrink(size for tensor in tensors.values() for size in tensor.shape)
    target, spec = stand_in(module, sizes), options[0][0]
    experts, *features = getattr(target, spec.gate_up).shape
    hidden = features[0 if spec.transposed else 1]
    tokens, k = 9, min(3, experts)
    index = torch.stack([random(40 + token, experts).argsort()[:k] for token in range(tokens)])
    x, weights = random(50, tokens, hidden), random(51, tokens, k).softmax(-1)
    args = (x, index, weights)
    cases = [("", target, (x * 0.1, index, weights))]
    cases += [(f"for inputs near {scale:g} (a clamp?)", target, (x * scale, index, weights)) for scale in (1.0, 1e4)]
    cases += [("for weights that do not sum to 1", target, (x, index, weights * -3))]
    cases += [("for a single token", target, (x[:1], index[:1], weights[:1]))]
    for n in lengths(module):
        cases += [(f"at {n} tokens", target, (random(52, n, hidden), *(t[:1].expand(n, -1) for t in (index, weights))))]
    cases += [(GRADIENTS, target, args)]
    otherwise = "does not compute the weighted sum of down(act(gate) * up) over the chosen experts"
    spec, reference = settle(hypotheses(module, options), cases, otherwise)

    dtypes = tuple(dtype for dtype in FLOATS if agrees_in(dtype, module, sizes, reference, args))
    own = tensors[spec.gate_up].dtype
    if own not in dtypes:
        raise Mismatch(f"computes packed experts, but not with the roundings of {str(own)[6:]}")
    foreign = index.clone()
    foreign[::3, 0] = experts
    try:
        there = (x, foreign, weights)
        sentinel = all_near(run(forward, target, there), run(reference, target, there))
    except Mismatch:
        sentinel = False
    trained = stand_in(module, sizes, training=True)
    training = same_in_training(target, trained, args)
    return replace(spec, sentinel=sentinel, dtypes=dtypes, training=training)


def agrees_in(dtype, module, sizes, reference, args):
    """Whether the result is the reference's in `dtype`, and not that of fp32 rounded once, which is more exact."""
    x, index, weights = args
    target = stand_in(module, sizes, dtype)
    args = (x.to(dtype), index, weights)
    (out,), (expected,) = run(forward, target, args), run(reference, target, args)
    if dtype == torch.float32:
        return True
    # the sums over features and experts are rounded to 2^-8 in another order
    exact = run(reference, target.float(), (args[0].float(), index, weights))[0].to(dtype)
    return near(out, expected, 0.05) and (not same_rounding(out, exact) or same_rounding(expected, exact))


def assignments(tensors):
    """(spec without activation, whether gate and up are both there) that the shapes allow."""
    packed = {name: tensor.shape for name, tensor in tensors.items() if tensor.dim() == 3}
    biases = {name: tensor.shape for name, tensor in tensors.items() if tensor.dim() == 2}
    if (
        len(packed) != 2
        or len(packed) + len(biases) != len(tensors)
        or len({t.shape[0] for t in tensors.values()}) != 1
    ):
        return
    for (up, up_shape), (down, down_shape) in itertools.permutations(packed.items()):
        for transposed in (False, True):
            hidden, rows = up_shape[1:] if transposed else reversed(up_shape[1:])
            inner, out = down_shape[1:] if transposed else reversed(down_shape[1:])
            if hidden != out or rows not in (inner, 2 * inner):
                continue
            up_biases = [name for name, shape in biases.items() if shape[1] == rows] or [None]
            down_biases = [name for name, shape in biases.items() if shape[1] == hidden] or [None]
            for pair in itertools.product(up_biases, down_biases):
                if len(set(pair) - {None}) == len(biases):
                    yield Experts(up, down, "", *pair, transposed), rows == 2 * inner


def hypotheses(module, options):
    for spec, gated in options:
        for activation, interleaved, half, act in activations(module, gated):
            known = replace(spec, activation=activation, interleaved=interleaved, gate_half=half)
            yield known, partial(reference, spec=spec, act=act), f"packed experts ({activation})"


def activations(module, gated):
    """(activation, interleaved, half, function of the module that returns the function of gate_up)."""
    if gated:
        for interleaved, half, name in itertools.product((False, True), (0, 1), ACTIVATIONS):
            act = partial(split, act=ACTIVATIONS[name], interleaved=interleaved, half=half)
            yield name, interleaved, half, lambda m, act=act: act
        if hasattr(type(module), "_apply_gate"):
            yield "apply_gate", False, 0, lambda m: m._apply_gate
    elif callable(getattr(module, "act_fn", None)):
        yield "act_fn", False, 0, lambda m: m.act_fn


def split(gate_up, act, interleaved, half):
    halves = (gate_up[..., ::2], gate_up[..., 1::2]) if interleaved else gate_up.chunk(2, -1)
    return act(halves[half]) * halves[1 - half]


def reference(module, x, index, weights, spec, act):
    names = (spec.gate_up, spec.down, spec.gate_up_bias, spec.down_bias)
    gate_up, down, gate_up_bias, down_bias = (name and getattr(module, name) for name in names)
    biases = (gate_up_bias, down_bias)
    return ops.experts_reference(x, index, weights, gate_up, down, act(module), spec.transposed, *biases)
