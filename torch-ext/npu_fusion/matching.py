"""Does this module compute what a fused layer computes?

`match` answers by behaviour. A stand-in of the module (same class, same settings, small random CPU tensors) is run through
`type(module).forward` and compared with the reference definitions in `ops`: values, dtypes and gradients, at several
scales, shapes and lengths, in eval and in training mode. Structure (how many linears, which ranks) only picks what is
compared; a class name, an attribute name or a weight's value is never evidence. Modules on the meta device work too.
"""

import copy
import inspect
import itertools
import threading
import types
import warnings
import weakref
from collections import OrderedDict
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache, partial

import torch
import torch.nn.functional as F
from torch import nn

from . import ops
from .ops.activation import ACTIVATIONS
from .specs import MLP, Declined, Experts, GatedNorm, Norm, Rotary, Router

__all__ = ["MLP", "Declined", "Experts", "GatedNorm", "Norm", "Rotary", "Router", "candidate", "match"]

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
UNFUSED = {  # activations that are recognised for the sake of the reason
    "relu": F.relu,
    "relu squared": lambda x: F.relu(x).square(),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "tanh": torch.tanh,
    "identity": lambda x: x,
}


class _No(Exception):
    """Why a target is declined. `candidate` is False where the target only looked like this kind."""

    def __init__(self, reason, candidate=True):
        super().__init__(reason)
        self.candidate = candidate


# ---- stand-ins ------------------------------------------------------------------------------------------------------
def _random(seed, *shape, scale=1.0, dtype=torch.float32):
    generator = torch.Generator("cpu").manual_seed(seed)
    return (torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32) * scale).to(dtype)


def _tensors(module):
    """Own tensors by name, plain attributes included."""
    owned = itertools.chain(module._parameters.items(), module._buffers.items(), vars(module).items())
    return {name: t for name, t in owned if isinstance(t, torch.Tensor)}


def _is_linear(module):
    return type(getattr(module, "in_features", None)) is int and type(getattr(module, "out_features", None)) is int


def _shrink(dims):
    """Small sizes for the real ones, equal where those are equal and double where those are double. Up to 32 stays."""
    dims = set(dims)
    small, fresh = {d: d for d in dims if d <= 32}, iter((6, 10, 14, 22, 26, 34, 38, 46, 58, 62))
    for size in sorted(dims - set(small)):
        small[size] = 2 * small[size // 2] if size % 2 == 0 and size // 2 in small else next(fresh)
    return small


class _Config:
    """A transformers config as the stand-in sees it: eager experts, small sizes. Writes stay here."""

    _experts_implementation = "eager"

    def __init__(self, config, sizes):
        self.__dict__.update(_real=config, _sizes=sizes)

    def __getattr__(self, name):
        value = getattr(self._real, name)
        return self._sizes.get(value, value) if type(value) is int else value


class _Opaque(nn.Linear):
    """Stands for a child that is only called: plain, quantized or wrapped by LoRA. Its `weight` is not what it applies."""

    def __init__(self, rows, columns, bias, seed, dtype):
        nn.Module.__init__(self)
        self.in_features, self.out_features = columns, rows
        self.weight = nn.Parameter(torch.full((rows, columns), float("nan"), dtype=dtype), requires_grad=False)
        self.bias = nn.Parameter(torch.full((rows,), float("nan"), dtype=dtype), requires_grad=False) if bias else None
        self.matrix = nn.Parameter(_random(seed, rows, columns, scale=0.6, dtype=dtype))
        self.shift = nn.Parameter(_random(seed + 1, rows, scale=0.6, dtype=dtype))

    def forward(self, x):
        return F.linear(x, self.matrix, self.shift)


def _attribute(value, sizes):
    if type(value) is int:
        return sizes.get(value, value)
    if type(value) is tuple:
        return tuple(_attribute(v, sizes) for v in value)
    if isinstance(value, (list, dict, set)):
        return copy.copy(value)
    if hasattr(type(value), "to_dict"):
        return _Config(value, sizes)
    plain = hasattr(value, "__dict__") and not callable(value) and not isinstance(value, types.ModuleType)
    return copy.copy(value) if plain else value


def _stand_in(module, sizes=None, dtype=torch.float32, training=False, scale=0.6, opaque=False, seed=100):
    """The same class and settings with random CPU tensors; hooks and a replaced forward are left behind."""
    sizes = sizes or {}
    state = {k: _attribute(v, sizes) for k, v in vars(module).items() if k != "forward"}
    state.update({k: OrderedDict() for k, v in state.items() if "hooks" in k and isinstance(v, dict)}, training=training)
    state.update(_parameters={}, _buffers={}, _modules={})
    for name, tensor in _tensors(module).items():
        if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
            raise _No(f"{name} is {str(tensor.dtype)[6:]}: quantized or not a weight")
        shape = [sizes.get(size, size) for size in tensor.shape]
        if torch.Size(shape).numel() > 1 << 22:
            raise _No(f"{name} is too large to probe: {tuple(tensor.shape)}")
        seed += 2
        value = _random(seed, *shape, scale=scale, dtype=dtype)
        where = next((kind for kind in ("_parameters", "_buffers") if name in getattr(module, kind)), None)
        (state if where is None else state[where])[name] = nn.Parameter(value) if where == "_parameters" else value
    for kind in ("_parameters", "_buffers"):
        state[kind].update({name: None for name, tensor in getattr(module, kind).items() if tensor is None})
    for name, child in module._modules.items():
        seed += 20
        if child is not None and opaque and _is_linear(child):
            size = [sizes.get(n, n) for n in (child.out_features, child.in_features)]
            child = _Opaque(*size, getattr(child, "bias", None) is not None, seed, dtype)
        elif child is not None:
            child = _stand_in(child, sizes, dtype, training, scale, False, seed)
        state["_modules"][name] = child
    result = object.__new__(type(module))
    result.__dict__.update(state)
    return result


# ---- running and comparing ------------------------------------------------------------------------------------------
def _trace(module):
    """Every attribute, with the version of every tensor: what a forward with side effects changes."""
    seen = []
    for child in module.modules() if isinstance(module, nn.Module) else ():
        for name, value in vars(child).items():
            items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, set)) else ()
            seen += [(name, v, v._version if isinstance(v, torch.Tensor) else 0) for v in (value, *items)]
    return seen


def _run(function, target, args, gradients=False, **kwargs):
    """Results of function(target, *args), then the gradients for floating arguments and for the target's parameters.

    Raises _No if it raises, draws random numbers, or changes the target or its arguments.
    """
    leaves = [a.detach().requires_grad_(gradients) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    inputs = [a.clone() if isinstance(a, torch.Tensor) else a for a in leaves]
    versions = [a._version for a in inputs if isinstance(a, torch.Tensor)]
    before, random = _trace(target), torch.get_rng_state()
    with torch.set_grad_enabled(gradients):
        try:
            out = function(target, *inputs, **kwargs)
            outs = list(out) if isinstance(out, (tuple, list)) else [out]
            if gradients:
                wanted = [a for a in leaves if isinstance(a, torch.Tensor) and a.requires_grad]
                if isinstance(target, nn.Module):
                    wanted += [p for p in target.parameters() if p.requires_grad]
                cotangents = [_random(900 + i, *o.shape, dtype=o.dtype) for i, o in enumerate(outs)]
                outs += torch.autograd.grad(outs, wanted, cotangents, allow_unused=True)
        except Exception as error:
            raise _No(f"the probe raised {type(error).__name__}: {str(error)[:100]}") from None
    if not torch.equal(random, torch.get_rng_state()):
        raise _No("its forward draws random numbers")
    after = _trace(target)
    if len(before) != len(after) or any(a[0] != b[0] or a[1] is not b[1] or a[2] != b[2] for a, b in zip(before, after)):
        raise _No("its forward changes the module's state")
    if versions != [a._version for a in inputs if isinstance(a, torch.Tensor)]:
        raise _No("its forward changes its input in place")
    return outs


def _forward(target, *args, **kwargs):
    """The class's own forward, whatever was put on the instance. A compiled one is run as it was written."""
    if not isinstance(target, nn.Module):
        return target(*args, **kwargs)
    forward = type(target).forward
    return getattr(forward, "_torchdynamo_orig_callable", forward)(target, *args, **kwargs)


def _near(a, b, tolerance=5e-6):
    """Same dtype and shape, finite in the same places, and close relative to the largest value of each row."""
    if a is None or b is None:
        return a is b
    if not isinstance(a, torch.Tensor) or a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    finite = b.isfinite()
    if not torch.equal(finite, a.isfinite()):
        return False
    a, b = (t.double().masked_fill(~finite, 0).reshape(-1, t.shape[-1] if t.dim() else 1) for t in (a, b))
    return bool(((a - b).abs() <= tolerance * b.abs().amax(-1, keepdim=True) + 1e-30).all())


def _all_near(outs, references, tolerance=5e-6):
    return len(outs) == len(references) and all(_near(a, b, tolerance) for a, b in zip(outs, references))


def _same_rounding(a, b):
    """Of half-precision results: same dtype, and hardly an element that differs at all."""
    if not isinstance(a, torch.Tensor) or a.dtype != b.dtype or a.shape != b.shape:
        return False
    return (a != b).float().mean().item() <= 0.02 and _near(a, b, 0.02)


def _settle(hypotheses, cases, otherwise):
    """(spec, reference) of the first hypothesis that agrees with the target in every case.

    Args:
        hypotheses: (spec, reference, description); reference takes what the class's forward takes.
        cases: (when, target, args); the one named "in its gradients" compares those too. A case in which the
            target raises is one that eager does not support either, and says nothing.
        otherwise: the reason if no hypothesis agrees in the first case.
    """
    results, complaint = {}, None
    for spec, reference, description in hypotheses:
        for when, target, args in cases:
            gradients = when == "in its gradients"
            if when not in results:
                try:
                    results[when] = _run(_forward, target, args, gradients)
                except _No as no:
                    if not results or gradients or not str(no).startswith("the probe raised"):
                        raise
                    results[when] = None
            if results[when] is None:
                continue
            if not _all_near(results[when], _run(reference, target, args, gradients), 2e-5 if gradients else 5e-6):
                if when != cases[0][0]:
                    complaint = complaint or f"computes {description}, but differs {when}"
                break
        else:
            return spec, reference
    raise _No(complaint or otherwise)


def _same_in_training(target, trained, args):
    """Whether the stand-in in training mode still computes the same, without random numbers."""
    try:
        return _all_near(_run(_forward, trained, args), _run(_forward, target, args))
    except _No:
        return False


@lru_cache(maxsize=None)
def _signature(function, skip):
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    return tuple(p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def _parameters(target):
    """Positional parameters of a function, or of a module's forward without self."""
    is_module = isinstance(target, nn.Module)
    return _signature(type(target).forward if is_module else target, int(is_module))


def _required(target):
    return [p.name for p in _parameters(target) if p.default is p.empty]


def _numbers(function, seen):
    """Whole numbers in the code of a function and of what it calls in its own module."""
    if not isinstance(function, types.FunctionType) or function in seen:
        return
    seen.add(function)
    yield from (value for value in function.__code__.co_consts if type(value) is int)
    called = [cell.cell_contents for cell in function.__closure__ or ()]
    called += [function.__globals__.get(name) for name in function.__code__.co_names]
    for other in called:
        if getattr(other, "__module__", None) == function.__module__:
            yield from _numbers(other, seen)


def _lengths(target):
    """Sequence lengths worth a look: the whole numbers that the code and the settings of the target hold."""
    found, functions = set(), [target]
    if isinstance(target, nn.Module):
        found = {value for value in vars(target).values() if type(value) is int}
        functions = [f for cls in type(target).__mro__ if cls not in nn.Module.__mro__ for f in vars(cls).values()]
    seen = set()
    for function in functions:
        found.update(_numbers(function, seen))
    return sorted({length for n in found if 16 < n <= 1 << 14 for length in (n, n + 1)})


# ---- norms ----------------------------------------------------------------------------------------------------------
def _match_norm(module):
    tensors, gated = _tensors(module), len(_parameters(module)) == 2
    name = next(iter(tensors), None)
    dim = tensors[name].numel() if name else 48
    target = _stand_in(module, scale=1.0)
    rows = torch.tensor([1e-12, 1e-3, 1.0, 1e6]).repeat(max(2, 1024 // dim))[:, None]
    x = _random(1, 2, len(rows), dim) * rows
    args = (x, _random(2, *x.shape, scale=3)) if gated else (x,)
    y = _run(_forward, target, args)
    if len(y) != 1 or not isinstance(y[0], torch.Tensor) or y[0].shape != x.shape:
        raise _No("does not return one tensor like its input", candidate=False)
    if not gated and not _near(_run(_forward, target, (x[:, 2::4] * 64,))[0], y[0][:, 2::4], 1e-3):
        raise _No("does not normalize", candidate=False)

    found = (_gated_norms if gated else _plain_norms)(target, name, args, y[0])
    cases = [("", target, args), *_norm_cases(module, dim, gated)]
    spec, reference = _settle(found, cases, "normalizes, but not to scale * x / sqrt(mean(x²) + eps)")
    spec = replace(spec, eps_attr=_eps_attribute(module, spec, args))
    if spec.eps_attr:
        spec = replace(spec, eps=getattr(module, spec.eps_attr))
    if gated:
        try:
            alone = _run(_forward, target, (x, None))
            spec = replace(spec, gate_optional=_all_near(alone, _run(_norm_reference(spec), target, (x, None))))
        except _No:
            pass
    casting_mode, dtypes = _norm_dtypes(module, spec, dim, gated)
    trained = _stand_in(module, scale=1.0, training=True)
    return replace(spec, casting_mode=casting_mode, dtypes=dtypes, training=_same_in_training(target, trained, args))


def _norm_reference(spec):
    if isinstance(spec, Norm):
        options = (spec.eps, spec.offset, spec.casting_mode)
        return lambda m, x: ops.rms_norm_reference(x, getattr(m, spec.weight) if spec.weight else None, *options)
    options = (spec.eps, spec.activation, spec.gate_first, spec.group_size, spec.casting_mode)
    return lambda m, x, gate: ops.rms_norm_gated_reference(x, gate, getattr(m, spec.weight), *options)


def _snap(eps):
    """Measured to six digits; people write two."""
    exact = (float(f"{eps:.1e}"), torch.finfo(torch.float32).eps, torch.finfo(torch.bfloat16).eps)
    return next((value for value in exact if abs(value - eps) <= 2e-5 * eps), eps)


def _plain_norms(target, name, args, y):
    (x,), tiny = args, slice(0, None, 4)
    weight = getattr(target, name).detach() if name else None
    for used, offset in ((True, 0), (True, 1), (False, 0)) if name else ((False, 0),):
        # in rows near zero, y = scale * x / sqrt(eps)
        eps = ((offset + weight if used else 1.0) * x / y)[:, tiny].double().square().median().item()
        if eps > 0:
            spec = Norm(name if used else None, _snap(eps), None, offset)
            yield spec, _norm_reference(spec), "an RMS norm"


def _gated_norms(target, name, args, y):
    (x, gate), tiny = args, slice(0, None, 4)
    if name is None:
        raise _No("a gated norm without a weight has no fused form")
    weight, dim = getattr(target, name).detach(), x.shape[-1]
    groups = [None] + [size for size in range(dim // 2, 1, -1) if dim % size == 0]
    for activation, act in ACTIVATIONS.items():
        eps = (weight * x * act(gate) / y)[:, tiny].double().square().median().item()
        for gate_first, group_size in itertools.product((False, True), groups) if eps > 0 else ():
            spec = GatedNorm(name, _snap(eps), None, activation, gate_first, group_size)
            yield spec, _norm_reference(spec), f"a gated RMS norm ({activation})"


def _norm_cases(module, dim, gated):
    def case(when, x, **options):
        return when, _stand_in(module, **options), (x, _random(3, *x.shape)) if gated else (x,)

    x = _random(4, 2, 5, dim)
    special = x.clone()
    special[0, 1, 0], special[0, 2, 0], special[0, 3] = float("inf"), float("nan"), 0
    spikes = torch.eye(min(dim, 8), dim).repeat(2, 1, 1) * 10
    yield case("for large weights or peaks (a clamp?)", spikes, scale=1e3)
    yield case("for inf, nan or zeros", special)
    yield case("for a single position", x[:, :1])
    yield case("for 2-D input", x[0])
    yield case("for 4-D input", _random(5, 2, 3, 4, dim))
    small = _shrink([dim])
    width = small.get(dim, dim)
    for length in _lengths(module):
        yield case(f"at length {length}", _random(6, 1, length, width), sizes=small)
    yield case("in its gradients", x)


def _eps_attribute(module, spec, args):
    """The attribute whose change changes eps, if there is one."""
    for name, value in vars(module).items():
        if type(value) is float and abs(value - spec.eps) <= 1e-3 * spec.eps:
            changed = _stand_in(module, scale=1.0)
            setattr(changed, name, 4 * value)
            reference = _norm_reference(replace(spec, eps=4 * value))
            if _all_near(_run(_forward, changed, args), _run(reference, changed, args)):
                return name
    return None


def _norm_dtypes(module, spec, dim, gated):
    """(casting_mode, dtype pairs) with the most pairs whose rounding and output dtype agree."""
    rows = torch.tensor([1.0, 0.1, 300.0, 8e3]).repeat(max(2, 1024 // dim))[:, None]
    x, gate = _random(7, 2, len(rows), dim) * rows, _random(8, 2, len(rows), dim, scale=2)
    own = next((t.dtype for t in _tensors(module).values()), None) if spec.weight else None
    seen = {}
    for x_dtype, w_dtype in itertools.product(FLOATS, FLOATS if spec.weight else (None,)):
        target = _stand_in(module, dtype=w_dtype or torch.float32, scale=1.0)
        args = (x.to(x_dtype), gate.to(x_dtype)) if gated else (x.to(x_dtype),)
        try:
            seen[x_dtype, w_dtype] = target, args, _run(_forward, target, args)[0]
        except _No:
            pass

    def agreeing(mode):
        reference = _norm_reference(replace(spec, casting_mode=mode))
        for pair, (target, args, out) in seen.items():
            agree = _near if out.dtype == torch.float32 == pair[0] else _same_rounding
            if agree(out, _run(reference, target, args)[0]):
                yield pair

    dtypes = {mode: tuple(agreeing(mode)) for mode in (("llama", "gemma") if spec.weight else ("llama",))}
    best = max(dtypes, key=lambda mode: len(dtypes[mode]))
    for pair in ((own, own),) if own else ((torch.float32, None), (torch.bfloat16, None)):
        if pair not in dtypes[best]:
            raise _No(f"computes an RMS norm, but rounds elsewhere in {str(pair[0])[6:]}")
    return best, dtypes[best]


# ---- gated MLPs -----------------------------------------------------------------------------------------------------
def _match_mlp(module):
    linears = {name: child for name, child in module._modules.items() if child is not None and _is_linear(child)}
    options = []
    for order in itertools.permutations(linears):
        down, up, gate = order[0], order[1], order[-1]
        inner, rows = linears[down].in_features, linears[up].out_features
        if len(order) == 3 and rows == linears[gate].out_features == inner and linears[gate].in_features == linears[up].in_features:
            options.append((gate, up, down, None))
        if len(order) == 2 and rows == 2 * inner:
            options += [(up, up, down, 0), (up, up, down, 1)]
    if not options:
        raise _No("the shapes of its linear layers are not those of a gated MLP", candidate=False)

    sizes = _shrink(size for child in linears.values() for size in (child.in_features, child.out_features))
    hypotheses = [
        (MLP(gate, up, down, name, half), partial(_mlp_reference, names=(gate, up, down), half=half, act=act), f"a gated MLP ({name})")
        for (gate, up, down, half), (name, act) in itertools.product(options, [*ACTIVATIONS.items(), *UNFUSED.items()])
    ]
    width = linears[options[0][1]].in_features
    width = sizes.get(width, width)
    target, x = _stand_in(module, sizes, opaque=True), _random(10, 4, 16, width)
    special = x[:2].clone()
    special[0, 1, 0], special[0, 2, 0], special[0, 3] = float("inf"), float("nan"), 0
    cases = [("", target, (x,))]
    cases += [(f"for inputs near {scale:g} (a clamp?)", target, (x * scale,)) for scale in (30.0, 1e6, 1e-5)]
    cases += [("for inf, nan or zeros", target, (special,)), ("for 2-D input", target, (x[0],)), ("for a single position", target, (x[:, :1],))]
    cases += [(f"at length {n}", target, (_random(11, 1, n, width),)) for n in _lengths(module)]
    cases += [("in its gradients", target, (x[:1],))]
    others = [n for n, child in module._modules.items() if n not in linears and child is not None and any(True for _ in child.parameters())]
    beside = f" ({', '.join(others)} takes part, too)" if others else ""
    spec, reference = _settle(hypotheses, cases, f"does not compute down(act(gate(x)) * up(x)){beside}")
    if spec.activation in UNFUSED:
        raise _No(f"a gated MLP whose activation, {spec.activation}, has no fused form")

    low, args = _stand_in(module, sizes, torch.bfloat16, opaque=True), (x.bfloat16(),)
    (out,), (native,) = _run(_forward, low, args), _run(reference, low, args)
    if not _near(out, native, 0.03):  # an activation written in steps rounds at each: a few ulp of 2^-8
        raise _No("computes a gated MLP, but another one in bfloat16")
    spec = replace(spec, upcast=not _same_rounding(out, native) and _same_rounding(out, _run(partial(reference, upcast=True), low, args)[0]))
    trained = _stand_in(module, sizes, training=True, opaque=True)
    return replace(spec, training=_same_in_training(target, trained, (x,)))


def _mlp_reference(module, x, names, half, act, upcast=False):
    gate, up, down = (getattr(module, name) for name in names)
    if half is None:
        gate, up = gate(x), up(x)
    else:
        halves = up(x).chunk(2, -1)
        gate, up = halves[half], halves[1 - half]
    return down((act(gate.float()) * up.float()).to(gate.dtype) if upcast else act(gate) * up)


# ---- rotary ---------------------------------------------------------------------------------------------------------
def _rotary_reference(x, cos, sin, style, columns, sign, partial):
    """ops.rotary_reference after what the other styles do to cos, sin and x."""
    if columns != "full":
        half = cos.shape[-1] // (2 if columns == "first_half" else 1)
        cos, sin = cos[..., :half], sin[..., :half]
        cos, sin = ((t.repeat_interleave(2, -1) if style == "interleaved" else torch.cat((t, t), -1)) for t in (cos, sin))
    rest, width = None, cos.shape[-1]
    if partial == "last":
        rest, x = x[..., :-width], x[..., -width:]
    if style == "interleaved_to_half":
        x = torch.cat((x[..., :width:2], x[..., 1:width:2], x[..., width:]), -1)
    out = ops.rotary_reference(x, cos, sign * sin, style == "interleaved")
    return out if rest is None else torch.cat((rest.to(out.dtype), out), -1)


_RANKS = {  # of x and cos: shapes in front of the last dimension. Heads == positions, so that values alone tell layouts apart
    (4, 3): ((2, 5, 5), (2, 5)),
    (3, 2): ((5, 5), (5,)),
    (4, 2): ((2, 5, 5), (5,)),
    (4, 4): ((2, 5, 5), (2, 1, 5)),
    (3, 3): ((2, 5), (2, 5)),
    (2, 2): ((5,), (5,)),
}


def _match_rotary(function):
    names = [p.name for p in _parameters(function)]
    count = min(names.index("cos"), names.index("sin"))
    if count not in (1, 2) or sorted(names[count : count + 2]) != ["cos", "sin"]:
        raise _No("does not take one or two tensors, then cos and sin", candidate=False)
    if set(_required(function)) - set(names[: count + 2]):
        raise _No(f"needs {', '.join(_required(function)[count + 2 :])} beside cos and sin", candidate=False)
    kind = unsqueeze = ranks = None
    results = {}

    def forward(target, *args, **options):
        return _forward(target, *args[:count], **dict(zip(("cos", "sin"), args[count:])), **options)

    def inputs(shape, positions, dim, columns, dtypes=FLOATS[:1] * 2, scale=1.0):
        xs = [_random(20 + i, *shape, dim, dtype=dtypes[0], scale=scale) for i in range(count)]
        return (*xs, *(_random(30 + i, *positions, columns, dtype=dtypes[1]) for i in range(2)))

    def reference(kind, unsqueeze, _, *args, upcast=False):
        cos, sin = (t if unsqueeze is None else t.unsqueeze(unsqueeze) for t in args[count:])
        if upcast:
            return [_rotary_reference(x.float(), cos.float(), sin.float(), *kind).to(x.dtype) for x in args[:count]]
        return [_rotary_reference(x, cos, sin, *kind) for x in args[:count]]

    def agrees(kind, unsqueeze, args, gradients=False, cached=None, **options):
        try:
            outs = results.get(cached) or _run(partial(forward, **options), function, args, gradients)
            results[cached] = outs if cached else None
            alike = all(o.shape == x.shape for o, x in zip(outs, args[:count]))
            return alike and _all_near(outs, _run(partial(reference, kind, unsqueeze), None, args, gradients), 2e-5)
        except (_No, AttributeError):
            return False

    width = {"full": 16, "first_half": 16, "half_width": 8}
    kinds = itertools.product(("half", "interleaved", "interleaved_to_half"), width, (1, -1), (None,))
    for option in itertools.product(kinds, (1, -2, None)):
        columns = width[option[0][1]]
        seen = tuple(r for r in _RANKS if agrees(*option, inputs(*_RANKS[r], 16, columns), cached=(r, columns)))
        if len(seen) > len(ranks or ()):
            (kind, unsqueeze), ranks = option, seen
        if (4, 3) in seen:
            break
    if kind is None:
        raise _No("does not rotate x by cos and sin in a way that we know")

    shapes, columns = _RANKS[ranks[0]], width[kind[1]]

    def at_length(n):
        heads_first = unsqueeze in (1, None)
        x = {4: (1, 1, n) if heads_first else (1, n, 1), 3: (n, 1) if ranks[0] == (3, 2) and unsqueeze else (1, n), 2: (n,)}
        return x[ranks[0][0]], tuple(n if size == 5 else 1 for size in shapes[1])

    checks = [
        ("for large inputs (a clamp?)", dict(args=inputs(*shapes, 16, columns, scale=1e5))),
        ("for another head_dim", dict(args=inputs(*shapes, 128, columns * 8))),
    ]
    checks += [(f"at length {n}", dict(args=inputs(*at_length(n), 16, columns))) for n in (1, *_lengths(function))]
    checks += [("in its gradients", dict(args=inputs(*shapes, 16, columns), gradients=True))]
    for when, check in checks:
        if not agrees(kind, unsqueeze, **check):
            raise _No(f"computes a rotation, but differs {when}")
    args = inputs(*shapes, 16, columns)
    narrow = inputs(*shapes, 16, columns // 2)
    partly = next((part for part in ("first", "last") if agrees((*kind[:3], part), unsqueeze, narrow)), None)
    layouts = inputs(*_RANKS[4, 3], 16, columns)
    by_argument = "unsqueeze_dim" in names and all(agrees(kind, d, layouts, unsqueeze_dim=d) for d in (1, 2))
    others = (name for name in names[count + 2 :] if name != "unsqueeze_dim")
    ignored = tuple(name for name in others if agrees(kind, unsqueeze, args, **{name: torch.arange(4, -1, -1)}))

    dtypes, upcast = [], False
    for pair in itertools.product(FLOATS, FLOATS):
        args = inputs(*shapes, 16, columns, pair)
        try:
            outs = _run(forward, function, args)
        except _No:
            continue
        exact = _run(partial(reference, kind, unsqueeze), None, [a.double() for a in args])
        if len({o.dtype for o in outs}) == 1 and all(_near(o.double(), e, 0.02) for o, e in zip(outs, exact)):
            dtypes.append((*pair, outs[0].dtype))
        if pair == (torch.bfloat16, torch.bfloat16):
            rounded_once = _run(partial(reference, kind, unsqueeze, upcast=True), None, args)
            upcast = all(_same_rounding(o, r) for o, r in zip(outs, rounded_once))
    style, cos, sign, _ = kind
    return Rotary(tuple(names[: count + 2]), style, cos, sign, partly, unsqueeze, by_argument, ignored, tuple(dtypes), upcast, ranks)


# ---- packed experts -------------------------------------------------------------------------------------------------
def _match_experts(module):
    tensors = _tensors(module)
    packed = {name: t for name, t in tensors.items() if t.dim() == 3}
    biases = {name: t for name, t in tensors.items() if t.dim() == 2}
    if len(packed) != 2 or len(packed) + len(biases) != len(tensors) or len({t.shape[0] for t in tensors.values()}) != 1:
        raise _No("is not two packed projections, each with a bias at most", candidate=False)
    if any(True for child in module.children() for _ in child.parameters()):
        raise _No("applies submodules with weights of their own (a norm after each expert?)")
    options = []
    for (up, a), (down, b) in itertools.permutations(packed.items()):
        for transposed in (False, True):
            hidden, rows = a.shape[1:] if transposed else reversed(a.shape[1:])
            inner, out = b.shape[1:] if transposed else reversed(b.shape[1:])
            if hidden != out or rows not in (inner, 2 * inner):
                continue
            up_bias = [name for name, t in biases.items() if t.shape[1] == rows] or [None]
            down_bias = [name for name, t in biases.items() if t.shape[1] == hidden] or [None]
            for pair in itertools.product(up_bias, down_bias):
                if len(set(pair) - {None}) == len(biases):
                    options.append((up, down, *pair, transposed, rows == 2 * inner))
    if not options:
        raise _No("the shapes of its projections are not those of experts", candidate=False)

    sizes = _shrink(size for t in tensors.values() for size in t.shape)
    target = _stand_in(module, sizes)
    up, down, _, _, transposed, _ = options[0]
    experts, hidden = target._parameters[up].shape[0], target._parameters[up].shape[1 if transposed else 2]
    tokens, k = 9, min(3, experts)
    index = torch.stack([torch.randperm(experts, generator=torch.Generator("cpu").manual_seed(s))[:k] for s in range(tokens)])
    x, weights = _random(40, tokens, hidden), _random(41, tokens, k).softmax(-1)
    hypotheses = list(_experts_hypotheses(module, options))
    cases = [("", target, (x, index, weights))]
    cases += [("for large inputs (a clamp?)", target, (x * 1e4, index, weights))]
    cases += [("for weights that do not sum to 1", target, (x, index, weights * -3))]
    cases += [("for a single token", target, (x[:1], index[:1], weights[:1]))]
    cases += [(f"at {n} tokens", target, (_random(42, n, hidden), index[:1].expand(n, -1), weights[:1].expand(n, -1))) for n in _lengths(module)]
    cases += [("in its gradients", target, (x, index, weights))]
    spec, reference = _settle(hypotheses, cases, "does not compute the weighted sum of down(act(gate) * up) over the chosen experts")

    low, args = _stand_in(module, sizes, torch.bfloat16), (x.bfloat16(), index, weights)
    # sums over hidden and inner features, the experts' weighting included, are rounded in another order
    if not _all_near(_run(_forward, low, args), _run(reference, low, args), 0.05):
        raise _No("computes packed experts, but another result or dtype in bfloat16")
    foreign = index.clone()
    foreign[::3, 0] = experts
    try:
        sentinel = _all_near(_run(_forward, target, (x, foreign, weights)), _run(reference, target, (x, foreign, weights)))
    except _No:
        sentinel = False
    trained = _stand_in(module, sizes, training=True)
    return replace(spec, sentinel=sentinel, training=_same_in_training(target, trained, (x, index, weights)))


def _experts_hypotheses(module, options):
    def halves(gate_up, interleaved, half, act):
        parts = (gate_up[..., ::2], gate_up[..., 1::2]) if interleaved else gate_up.chunk(2, -1)
        return act(parts[half]) * parts[1 - half]

    for up, down, up_bias, down_bias, transposed, gated in options:
        gates = []  # (activation, interleaved, half, function of the module)
        if gated:
            for interleaved, half, (name, act) in itertools.product((False, True), (0, 1), ACTIVATIONS.items()):
                gate = partial(halves, interleaved=interleaved, half=half, act=act)
                gates.append((name, interleaved, half, lambda m, gate=gate: gate))
            if hasattr(type(module), "_apply_gate"):
                gates.append(("apply_gate", False, 0, lambda m: m._apply_gate))
        if callable(getattr(module, "act_fn", None)):
            own = (lambda m: partial(halves, interleaved=False, half=0, act=m.act_fn)) if gated else (lambda m: m.act_fn)
            gates.append(("act_fn", False, 0, own))
        for activation, interleaved, half, gate in gates:

            def reference(m, x, index, weights, names=(up, down, up_bias, down_bias), transposed=transposed, gate=gate):
                w1, w2, b1, b2 = (name and getattr(m, name) for name in names)
                return ops.experts_reference(x, index, weights, w1, w2, gate(m), transposed, b1, b2)

            spec = Experts(up, down, activation, up_bias, down_bias, transposed, interleaved, half)
            yield spec, reference, f"packed experts ({activation})"


# ---- routers --------------------------------------------------------------------------------------------------------
def _route(logits, k, score, renormalize, correction_bias, groups):
    """(weights, indices) [T, k]. `score`: softmax or sigmoid before the choice, softmax_topk or sigmoid_topk after it."""
    before = {"softmax": partial(torch.softmax, dim=-1), "sigmoid": torch.sigmoid}.get(score)
    scores = before(logits) if before else logits
    choice = scores if correction_bias is None else scores + correction_bias
    if groups:
        number, kept, best, fill = groups
        grouped = choice.unflatten(-1, (number, -1))
        best = grouped.topk(min(2, grouped.shape[-1]), -1)[0].sum(-1) if best == "top2sum" else grouped.amax(-1)
        keep = torch.zeros_like(best).scatter_(-1, best.topk(kept, -1)[1], 1).bool()
        choice = grouped.masked_fill(~keep.unsqueeze(-1), fill).flatten(-2)
    index = choice.topk(k, -1)[1]
    weights = scores.gather(-1, index)
    weights = weights.softmax(-1) if score == "softmax_topk" else weights.sigmoid() if score == "sigmoid_topk" else weights
    return (weights / (weights.sum(-1, keepdim=True) + 1e-20) if renormalize else weights), index


def _match_router(module):
    matrices = {n: p for n, p in module.named_parameters() if p.dim() == 2 and p.shape[0] > 1}
    if len(matrices) != 1 or any(p.dim() > 2 for p in module.parameters()):
        raise _No("is not one matrix of scores", candidate=False)
    arguments = [p.name for p in _parameters(module)[1:2] if p.default in (p.empty, None)]  # a bias that the caller holds
    (name, matrix), tokens = next(iter(matrices.items())), 64
    experts, hidden = matrix.shape
    sizes = {} if hidden <= 64 or hidden == experts else {hidden: 38}
    target = _stand_in(module, sizes)
    x = _random(51, tokens, sizes.get(hidden, hidden))

    def vectors(target):
        named = itertools.chain(target.named_parameters(), target.named_buffers())
        found = {n: t.detach().flatten() for n, t in named if t.numel() == experts and n != name}
        return {**found, **{f"argument {a}": _random(52, experts) for a in arguments}}

    def run(target, x):
        extra = [_random(52, experts) for _ in arguments]
        for shape, extra in itertools.product((x.shape, (4, -1, x.shape[-1])), ((), extra)):
            try:
                outs = _run(_forward, target, (x.reshape(shape), *extra))
                return [o.flatten(0, 1) if o.dim() == 3 else o for o in outs], len(shape) == 2
            except _No as no:
                problem = no
        raise problem

    try:
        outs, flat = run(target, x)
        (where,) = (i for i, o in enumerate(outs) if o.dim() == 2 and len(o) == tokens and not o.is_floating_point())
        k = outs[where].shape[1]
        (weighted,) = (i for i, o in enumerate(outs) if o.is_floating_point() and o.shape == (tokens, k))
    except (AttributeError, ValueError):
        raise _No("does not return the weights and indices of a top k", candidate=False) from None

    def reference(spec, target, x):
        found, weight = vectors(target), target.get_parameter(name).detach()
        x, weight = (x.float(), weight.float()) if spec.upcast else (x, weight)
        logits = F.linear(x, weight, found.get(spec.bias))
        correction = found.get(spec.correction_bias)
        weights, index = _route(logits.float(), k, spec.score, spec.renormalize, correction, spec.groups)
        return logits, index.sort(-1)[0], torch.zeros(len(x), experts).scatter_(1, index, weights)

    def chosen(dense, outs):
        return dense.gather(1, outs[where]), outs[weighted].float()

    for spec in _router_hypotheses(module, name, k, experts, list(vectors(target))):
        logits, index, dense = reference(spec, target, x)
        if torch.equal(index, outs[where].sort(-1)[0]):
            expected, weights = chosen(dense, outs)
            scale = float(f"{(weights / expected).median().item():.5g}")
            if _near(weights, expected * scale, 2e-5):
                break
    else:
        raise _No("does not choose the top k of softmax or sigmoid scores of one linear layer")
    roles = [
        "indices"
        if i == where
        else "weights"
        if i == weighted
        else "logits"
        if _near(out.float(), logits)
        else "probs"
        if any(_near(out.float(), p) for p in (logits.softmax(-1), logits.sigmoid()))
        else None
        for i, out in enumerate(outs)
    ]
    if None in roles:
        raise _No("computes top-k routing, but returns something else beside it")
    spec = replace(spec, scale=scale, returns=tuple(roles), flatten=flat)

    def agrees(spec, target, x, tolerance):
        """The outputs, if the choice, its weights and the logits are those of the reference; else None."""
        outs, _ = run(target, x)
        logits, index, dense = reference(spec, target, x)
        expected, weights = chosen(dense, outs)
        same = torch.equal(index, outs[where].sort(-1)[0]) and _near(weights, expected * scale, tolerance)
        same &= all(_near(o.float(), logits.float(), 1e-5) for o, role in zip(outs, roles) if role == "logits")
        return outs if same else None

    for when, probe in (("for larger inputs (a soft cap?)", x * 1.5), ("for small inputs", x * 0.01), ("for few tokens", x[:4])):
        if not agrees(spec, target, probe, 1e-4):
            raise _No(f"computes top-k routing, but differs {when}")
    far = x * 1e3
    if "logits" in roles and not _near(run(target, far)[0][roles.index("logits")].float(), reference(spec, target, far)[0]):
        raise _No("computes top-k routing, but its logits differ for large inputs (a soft cap?)")
    try:
        training = bool(agrees(spec, _stand_in(module, sizes, training=True), x, 2e-5))
    except _No:
        training = False

    def dtypes(spec):
        for pair in itertools.product(FLOATS, FLOATS):
            try:
                outs = agrees(spec, _stand_in(module, sizes, dtype=pair[1]), x.to(pair[0]), 0.01)
            except (_No, RuntimeError):  # the linear refuses two dtypes
                continue
            if outs:
                yield (*pair, tuple(o.dtype for o in outs))

    spec = max((replace(spec, upcast=upcast) for upcast in (False, True)), key=lambda s: len(list(dtypes(s))))
    return replace(spec, dtypes=tuple(dtypes(spec)), training=training)


def _router_hypotheses(module, name, k, experts, vectors):
    numbers = sorted({v for v in vars(module).values() if type(v) is int and 1 <= v < experts})
    groups = [None]
    for number, kept in itertools.product(numbers, numbers):
        if experts % number == 0 and kept < number:
            groups += itertools.product((number,), (kept,), ("top2sum", "max"), (float("-inf"), 0.0))
    scores = ("softmax", "sigmoid", "softmax_topk", "sigmoid_topk")
    for group, bias, correction, score in itertools.product(groups, [None, *vectors], [None, *vectors], scores):
        if bias is None or bias != correction:
            for renormalize in (False, True) if score != "softmax_topk" else (False,):
                yield Router(name, k, score, renormalize, 1.0, bias, correction, group)


# ---- the question ---------------------------------------------------------------------------------------------------
_PROBES = {
    "norm": _match_norm,
    "gated_norm": _match_norm,
    "mlp": _match_mlp,
    "rotary": _match_rotary,
    "experts": _match_experts,
    "router": _match_router,
}


def _structure(target):
    """Name of the only probe that the structure of `target` allows. Raises _No with what keeps it from one."""
    if not isinstance(target, nn.Module):
        if callable(target) and {"cos", "sin"} <= {p.name for p in _parameters(target)}:
            return "rotary"
        raise _No("is no module, and no function of cos and sin", candidate=False)
    if type(target).__module__.startswith("torch.nn.") and type(target) is not getattr(nn, "RMSNorm", None):
        raise _No("is one of torch's own layers", candidate=False)
    tensors, children = _tensors(target), [child for child in target._modules.values() if child is not None]
    ranks, linears = {t.dim() for t in tensors.values()}, sum(map(_is_linear, children))
    arguments, needed = len(_parameters(target)), len(_required(target))
    if 3 in ranks:
        return _if(arguments == 3, "experts", "has packed weights, but does not take hidden states, indices and weights")
    if linears > 1:
        problem = (
            arguments != 1
            and f"its forward takes {arguments} arguments, not hidden states alone"
            or linears > 3
            and f"has {linears} linear layers, a gated MLP has 2 or 3"
            or "has weights beside its linear layers"
        )
        return _if(arguments == 1 and linears <= 3 and not tensors, "mlp", problem)
    if linears == 1 or 2 in ranks:
        return _if(needed in (1, 2), "router", "its forward takes other arguments than a router's")
    if children:
        raise _No("is made of other modules", candidate=False)
    if not tensors and {"cos", "sin"} <= {p.name for p in _parameters(target)}:
        return "rotary"
    one_vector = len(tensors) == 1 and ranks == {1}
    maybe_eps = not tensors and any(type(v) is float and 0 < v < 0.1 for v in vars(target).values())
    one_or_two = arguments in (1, 2) and needed
    return _if((one_vector or maybe_eps) and one_or_two, "norm" if arguments == 1 else "gated_norm", "has no layer's structure")


def _if(holds, kind, problem):
    if not holds:
        raise _No(problem, candidate=False)
    return kind


def candidate(target):
    """Which probe would decide on `target`: norm, gated_norm, mlp, rotary, experts or router; None where none could match."""
    try:
        return _structure(target)
    except _No:
        return None


class _Same:
    """Key of an object without a value to compare: itself. Two lambdas of one name are not the same."""

    def __init__(self, value):
        self.id = id(value)
        try:
            self.reference = weakref.ref(value)
        except TypeError:
            self.reference = lambda: value

    def __eq__(self, other):
        return isinstance(other, _Same) and self.reference() is other.reference() is not None

    def __hash__(self):
        return self.id


def _setting(value):
    if value is None or isinstance(value, (int, float, str, torch.dtype)):
        return type(value), value  # 1, 1.0 and True are three settings
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_setting, value))
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(map(_setting, value))
    if isinstance(value, dict):
        return type(value), tuple((k, _setting(v)) for k, v in value.items())
    if hasattr(type(value), "to_dict"):  # a config
        return type(value), tuple((k, _setting(v)) for k, v in vars(value).items())
    return _Same(value)


# what nn.Module itself keeps on an instance, and what swaps, accelerate and transformers put there
_IGNORED = frozenset(vars(nn.Module())) | {"forward", "_npu_fusion", "_old_forward", "_hf_hook", "_kernel_funcs", "_is_hf_initialized"}


def _key(module, opaque=False):
    """What an answer depends on: class, settings and shapes of the subtree, never a weight's value."""
    if opaque and _is_linear(module):
        return module.in_features, module.out_features
    state = vars(module)
    tensors = tuple((n, tuple(t.shape), t.dtype) for n, t in _tensors(module).items())
    settings = tuple((k, _setting(v)) for k, v in state.items() if k not in _IGNORED and not isinstance(v, torch.Tensor))
    children = tuple((n, _key(m, opaque)) for n, m in state["_modules"].items() if m is not None)
    return type(module), type(module).forward, tensors, settings, children


def _isolated():
    """Shields a probe from the caller's modes, and the caller's random state from the probe."""
    stack = ExitStack()
    if getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)():  # fake tensors, tracing
        from torch.utils._python_dispatch import _disable_current_modes

        stack.enter_context(_disable_current_modes())
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.random.fork_rng(devices=[]))
    stack.enter_context(torch.autocast("cpu", enabled=False))
    if torch.get_default_device().type != "cpu":
        stack.enter_context(torch.device("cpu"))
    if torch.get_default_dtype() != torch.float32:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
    return stack


_ANSWERS = {}
_LOCK = threading.RLock()


def match(target):
    """What `target` computes, as the spec of a fused layer, or `Declined` with the reason.

    Never raises, never reads or changes a weight, and asks once per class, settings and shapes.

    Args:
        target: a module, on any device and in any dtype, or a function with parameters cos and sin.

    Returns:
        Norm, GatedNorm, MLP, Rotary, Experts, Router or Declined (see specs.py).
    """
    try:
        kind = _structure(target)
        key = (kind, _key(target, opaque=kind == "mlp") if isinstance(target, nn.Module) else _Same(target))
        if key in _ANSWERS:
            return _ANSWERS[key]
    except _No as no:
        return Declined(str(no))
    except Exception as error:  # a module that cannot even be looked at
        return Declined(f"could not be looked at: {type(error).__name__}: {error}")
    with _LOCK, _isolated():
        try:
            answer = _PROBES[kind](target)
        except _No as no:
            answer = Declined(str(no), kind if no.candidate else None)
        except Exception as error:  # a module that nobody has thought of is left alone
            answer = Declined(f"could not be probed: {type(error).__name__}: {str(error)[:200]}", kind)
    _ANSWERS[key] = answer
    return answer
