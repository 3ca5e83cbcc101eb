"""Running a target and a reference on the same inputs, and comparing what comes out."""

import inspect
import types
from functools import lru_cache

import torch
from torch import nn

from .stand_in import Mismatch, random

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
GRADIENTS = "in its gradients"  # name of the case that compares those, too


@lru_cache(maxsize=4096)
def _signature(function, skip):
    parameters = list(inspect.signature(function).parameters.values())[skip:]
    return tuple(p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD))


def parameters(target):
    """Positional parameters of a function, or of a module's forward without self."""
    is_module = isinstance(target, nn.Module)
    return _signature(type(target).forward if is_module else target, int(is_module))


def required(target):
    return [p.name for p in parameters(target) if p.default is p.empty]


def forward(target, *args, **kwargs):
    """The class's own forward, whatever was put on the instance. A compiled one is run as it was written."""
    if not isinstance(target, nn.Module):
        return target(*args, **kwargs)
    function = type(target).forward
    return getattr(function, "_torchdynamo_orig_callable", function)(target, *args, **kwargs)


def run(function, target, args, gradients=False):
    """List of the results of function(target, *args), then of the gradients for its arguments and parameters.

    Raises:
        Mismatch: it raises, draws random numbers, or changes the target or its arguments.
    """
    leaves = [a.detach().requires_grad_(gradients and a.is_floating_point()) if _is_tensor(a) else a for a in args]
    inputs = [a.clone() if _is_tensor(a) else a for a in leaves]
    versions = [a._version for a in inputs if _is_tensor(a)]
    before, state = _trace(target), torch.get_rng_state()
    with torch.set_grad_enabled(gradients):
        try:
            out = function(target, *inputs)
            outs = list(out) if isinstance(out, (tuple, list)) else [out]
            if gradients:
                wanted = [a for a in leaves if _is_tensor(a) and a.requires_grad]
                if isinstance(target, nn.Module):
                    wanted += [p for p in target.parameters() if p.requires_grad]
                cotangents = [random(900 + i, *o.shape, dtype=o.dtype) for i, o in enumerate(outs)]
                outs += torch.autograd.grad(outs, wanted, cotangents, allow_unused=True)
        except Exception as error:
            raise Mismatch(f"the probe raised {type(error).__name__}: {str(error)[:100]}") from None
    if not torch.equal(state, torch.get_rng_state()):
        raise Mismatch("its forward draws random numbers")
    after = _trace(target)
    unchanged = len(before) == len(after) and all(a[0] is b[0] and a[1] == b[1] for a, b in zip(before, after))
    if not unchanged:
        raise Mismatch("its forward changes the module's state")
    if versions != [a._version for a in inputs if _is_tensor(a)]:
        raise Mismatch("its forward changes its input in place")
    return outs


def _is_tensor(value):
    return isinstance(value, torch.Tensor)


def _trace(module):
    """Every attribute with the version of every tensor: what a forward with side effects changes."""
    seen = []
    for child in module.modules() if isinstance(module, nn.Module) else ():
        for value in vars(child).values():
            items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, set)) else ()
            seen += [(item, item._version if _is_tensor(item) else 0) for item in (value, *items)]
    return seen


def near(a, b, tolerance=5e-6):
    """Same dtype and shape, finite in the same places, and close relative to the largest value of each row."""
    if not _is_tensor(a) or not _is_tensor(b):
        return a is b
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    if not a.is_floating_point():
        return torch.equal(a, b)
    finite = b.isfinite()
    if not torch.equal(finite, a.isfinite()):
        return False
    a, b = (t.double().masked_fill(~finite, 0).reshape(-1, t.shape[-1] if t.dim() else 1) for t in (a, b))
    return bool(((a - b).abs() <= tolerance * b.abs().amax(-1, keepdim=True) + 1e-30).all())


def all_near(outs, references, tolerance=5e-6):
    return len(outs) == len(references) and all(near(a, b, tolerance) for a, b in zip(outs, references))


def same_rounding(a, b):
    """Of half-precision results: hardly an element differs at all."""
    return near(a, b, 0.02) and (a != b).float().mean().item() <= 0.02


def with_special_values(x):
    """A copy of [B, S, D] with rows that hold inf, nan and nothing but zeros."""
    x = x.clone()
    x[0, 1, 0], x[0, 2, 0], x[0, 3] = float("inf"), float("nan"), 0
    return x


def settle(hypotheses, cases, otherwise):
    """The first hypothesis that agrees with the target in every case.

    Args:
        hypotheses: (spec, reference, what it computes); a reference takes what the class's forward takes.
        cases: (when, target, args). A case in which the target raises is one that eager does not support either, and
            says nothing; only the first must run.
        otherwise: the reason if no hypothesis agrees in the first case.

    Returns:
        (spec, reference)
    """
    results, complaint = {}, None
    for spec, reference, description in hypotheses:
        for when, target, args in cases:
            if when not in results:
                results[when] = _first_run(target, args, when == GRADIENTS, may_raise=results and when != GRADIENTS)
            if results[when] is None:
                continue
            expected = run(reference, target, args, when == GRADIENTS)
            if not all_near(results[when], expected, 2e-5 if when == GRADIENTS else 5e-6):
                if when != cases[0][0]:
                    complaint = complaint or f"computes {description}, but differs {when}"
                break
        else:
            return spec, reference
    raise Mismatch(complaint or otherwise)


def _first_run(target, args, gradients, may_raise):
    try:
        return run(forward, target, args, gradients)
    except Mismatch as mismatch:
        if may_raise and str(mismatch).startswith("the probe raised"):
            return None
        raise


def same_in_training(target, trained, args):
    """Whether the stand-in in training mode computes the same, without random numbers or changes of state."""
    try:
        return all_near(run(forward, trained, args), run(forward, target, args))
    except Mismatch:
        return False


def lengths(target):
    """Sequence lengths worth a look: around the whole numbers that the code and the settings of the target hold."""
    found, functions = set(), [target]
    if isinstance(target, nn.Module):
        found = {value for value in vars(target).values() if type(value) is int}
        functions = [f for cls in type(target).__mro__ if cls not in nn.Module.__mro__ for f in vars(cls).values()]
    seen = set()
    for function in functions:
        found.update(_numbers(function, seen))
    return sorted({length for n in found if 16 < n <= 1 << 14 for length in (n, n + 1)})


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
