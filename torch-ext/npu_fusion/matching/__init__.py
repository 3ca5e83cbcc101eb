"""Does this module compute what a fused layer computes?

`match` answers by behaviour. A stand-in of the module (same class and settings, small random CPU tensors) is run
through `type(module).forward` and compared with the reference definitions in `ops`: values, dtypes and gradients, at
several scales, shapes and lengths, in eval and in training mode. Structure (how many linears, which ranks) only picks
what is compared; a class name, an attribute name or a weight's value is never evidence. Modules on the meta device
work too.

What no finite probe sees is a forward that changes its behaviour at one particular input, such as a sequence length
that stands neither in its class nor in its settings, or on one particular device.
"""

import threading
import warnings
import weakref
from contextlib import ExitStack

import torch
from torch import nn

from ..specs import MLP, Declined, DecoderLayer, Experts, GatedNorm, Norm, Rotary, Router
from .decoder import match_decoder
from .experts import match_experts
from .mlp import match_mlp
from .norm import match_norm
from .probe import parameters, required
from .rotary import match_rotary
from .router import match_router
from .stand_in import Mismatch, is_linear, own_tensors

__all__ = ["MLP", "Declined", "DecoderLayer", "Experts", "GatedNorm", "Norm", "Rotary", "Router", "candidate", "match"]

PROBES = {
    "norm": match_norm,
    "gated_norm": match_norm,
    "mlp": match_mlp,
    "rotary": match_rotary,
    "experts": match_experts,
    "router": match_router,
    "decoder": match_decoder,
}
# what nn.Module itself keeps on an instance, and what swaps, accelerate and transformers put there
NOT_SETTINGS = frozenset(vars(nn.Module())) | {
    "forward",
    "_npu_fusion",
    "_npu_fusion_displaced",
    "_old_forward",
    "_hf_hook",
    "_kernel_funcs",
}


def match(target):
    """What `target` computes, as the spec of a fused layer, or `Declined` with the reason.

    Never raises, never reads or changes a weight, and probes once per class, settings and shapes.

    Args:
        target: a module, on any device and in any dtype, or a function with parameters cos and sin.

    Returns:
        Norm, GatedNorm, MLP, Rotary, Experts, Router, DecoderLayer or Declined: see specs.py.
    """
    try:
        kind = structure(target)
        key = (kind, key_of(target, kind))
        if key in _answers:
            return _answers[key]
    except Mismatch as mismatch:
        return Declined(str(mismatch))
    except Exception as error:
        return Declined(f"could not be looked at: {type(error).__name__}: {error}", "unknown")
    with _lock, isolated():
        try:
            answer = PROBES[kind](target)
        except Mismatch as mismatch:
            answer = Declined(str(mismatch), kind if mismatch.candidate else None)
        except Exception as error:  # a module that nobody has thought of is left alone, and harms no other
            answer = Declined(f"could not be probed: {type(error).__name__}: {str(error)[:200]}", kind)
    _answers[key] = answer
    return answer


def key_of(target, kind):
    if not isinstance(target, nn.Module):
        return Same(target)
    if kind == "decoder":  # its children are only called, and are matched by themselves
        shell = object.__new__(type(target))
        shell.__dict__.update(vars(target), _modules={name: nn.Identity() for name in target._modules})
        target = shell
    return settings(target, opaque=kind == "mlp")


_answers = {}
_lock = threading.RLock()


def candidate(target):
    """Which of PROBES would decide on `target`; None where none could match."""
    try:
        return structure(target)
    except Exception:  # Mismatch, or a module that cannot even be looked at
        return None


def structure(target):
    """The only one of PROBES that the structure of `target` allows. Raises Mismatch with what keeps it from each."""

    def only_if(holds, kind, problem):
        if not holds:
            raise Mismatch(problem, candidate=False)
        return kind

    if not isinstance(target, nn.Module):
        takes = {p.name for p in parameters(target)} if callable(target) else set()
        return only_if({"cos", "sin"} <= takes, "rotary", "is no module, and no function of cos and sin")
    # FSDP2 makes a subclass of every class that it shards
    owner = next(cls for cls in type(target).__mro__ if "forward" in vars(cls))
    if owner.__module__.startswith("torch.nn.") and owner is not getattr(nn, "RMSNorm", None):
        raise Mismatch("is one of torch's own layers", candidate=False)
    tensors, children = own_tensors(target), [child for child in target._modules.values() if child is not None]
    ranks, linears = {tensor.dim() for tensor in tensors.values()}, sum(map(is_linear, children))
    arguments, needed = len(parameters(target)), len(required(target))
    if 3 in ranks:
        return only_if(arguments == 3, "experts", "does not take hidden states, indices and weights alone")
    if linears > 1:
        only_if(arguments == 1, "mlp", f"its forward takes {arguments} arguments, not hidden states alone")
        only_if(linears < 4, "mlp", f"has {linears} linear layers, a gated MLP has 2 or 3")
        return only_if(not tensors, "mlp", "has weights beside its linear layers")
    if linears == 1 or 2 in ranks:
        return only_if(needed in (1, 2), "router", "its forward takes other arguments than a router's")
    if children:
        norms = sum(candidate(child) == "norm" for child in children)
        holds = norms == 2 and not tensors and required(target) == ["hidden_states"]
        return only_if(holds, "decoder", "is made of other modules")
    if not tensors and {"cos", "sin"} <= {p.name for p in parameters(target)}:
        return "rotary"
    one_vector = len(tensors) == 1 and ranks == {1}
    perhaps_eps = not tensors and any(type(value) is float and 0 < value < 0.1 for value in vars(target).values())
    holds = (one_vector or perhaps_eps) and arguments in (1, 2) and needed
    return only_if(holds, "norm" if arguments == 1 else "gated_norm", "has the structure of no layer known here")


def settings(module, opaque=False):
    """What an answer depends on: class, settings and shapes of the subtree, never a weight's value."""
    if opaque and is_linear(module):
        return module.in_features, module.out_features
    tensors = tuple((name, tuple(t.shape), t.dtype) for name, t in own_tensors(module).items())
    held = tuple(
        (name, setting(value))
        for name, value in vars(module).items()
        if name not in NOT_SETTINGS and not isinstance(value, torch.Tensor)
    )
    children = tuple((name, settings(m, opaque)) for name, m in module._modules.items() if m is not None)
    return type(module), type(module).forward, tensors, held, children


def setting(value, depth=0):
    """A key for the value. What lies deeper than a config's configs counts by identity: some refer to their parents."""
    if value is None or isinstance(value, (int, float, str, torch.dtype)):
        return type(value), value  # 1, 1.0 and True are three settings
    if depth < 6 and isinstance(value, (list, tuple)):
        return type(value), tuple(setting(item, depth + 1) for item in value)
    if isinstance(value, (set, frozenset)):
        return type(value), frozenset(map(setting, value))
    if depth < 6 and (isinstance(value, dict) or hasattr(type(value), "to_dict")):  # a config
        held = value if isinstance(value, dict) else vars(value)
        return type(value), tuple((name, setting(item, depth + 1)) for name, item in held.items())
    return Same(value)


class Same:
    """Key of an object without a value to compare: itself. Two lambdas of one name are not the same."""

    def __init__(self, value):
        self.id = id(value)
        try:
            self.value = weakref.ref(value)
        except TypeError:
            self.value = lambda: value

    def __eq__(self, other):
        return isinstance(other, Same) and self.value() is other.value() is not None

    def __hash__(self):
        return self.id


def isolated():
    """Shields a probe from the caller's modes, and the caller's random state, threads and warnings from the probe."""
    stack = ExitStack()
    if getattr(torch._C, "_len_torch_dispatch_stack", lambda: 0)():  # fake tensors, tracing
        from torch.utils._python_dispatch import _disable_current_modes

        stack.enter_context(_disable_current_modes())
    stack.enter_context(warnings.catch_warnings())
    warnings.simplefilter("ignore")
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.random.fork_rng(devices=[]))
    stack.enter_context(torch.autocast("cpu", enabled=False))
    stack.callback(torch.set_num_threads, torch.get_num_threads())
    torch.set_num_threads(1)  # tensors are too small for more, which would only wait for each other
    if torch.get_default_device().type != "cpu":
        stack.enter_context(torch.device("cpu"))
    if torch.get_default_dtype() != torch.float32:
        stack.callback(torch.set_default_dtype, torch.get_default_dtype())
        torch.set_default_dtype(torch.float32)
    return stack
