"""Joining the layer maps of kernels and transformers, so that plain `kernels.kernelize` and `from_pretrained` use ours.

Classes that nobody decorated are reached through torch's public hook for module registration: when the first instance of
a class is attached to a parent, the class gets the name of the layer that its structure suggests, and kernels asks
`condition`, which probes the instance, before it swaps. `unregister` takes all of it back.
"""

import functools
import inspect
from types import FunctionType
from typing import Any, Dict, List, Optional, Tuple

from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from . import integration, layers
from .layers import SPEC
from .mapping import PREFIX, LoadedLayerRepository, import_kernels, layer_for, layer_map, registered, users_entries
from .matching import candidate, match
from .specs import Declined, Rotary

# the layer whose signature a class of this kind must have; which fused op runs is decided by the instance's spec
LAYER_OF_KIND = {"norm": "RMSNorm", "gated_norm": "RMSNormGated", "mlp": "SwiGLUMLP", "experts": "MoEExperts"}


def condition(module: nn.Module) -> bool:
    """kernels asks this for every instance right before it swaps; the answer is kept for the layer's forward."""
    spec = module.__dict__.get(SPEC)
    if spec is None:
        spec = module.__dict__[SPEC] = match(module)
    return isinstance(layer_for(spec), str)


def remember(module: nn.Module) -> bool:
    """As `condition`, for classes that transformers decorated: kernels of other devices must not depend on the answer."""
    condition(module)
    return True


def kinds(forward: Any) -> List[Any]:
    return [parameter.kind for parameter in inspect.signature(forward).parameters.values()]


def function_layer(original: FunctionType, spec: Rotary) -> type:
    """A layer with the signature of `original`, a plain rotary function: kernels compares signatures before it swaps."""
    fused = layers.rotary_function(original, spec)

    class rotary_function(nn.Module):
        can_torch_compile = True

        def forward(self, *args, **kwargs):
            return fused(*args, **kwargs)

    parameters = inspect.signature(original).parameters.values()
    self_parameter = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    rotary_function.forward.__signature__ = inspect.Signature([self_parameter, *parameters])
    return rotary_function


class FunctionRepository:
    """What kernels calls a repository, for the layer of one rotary function."""

    def __init__(self, original: FunctionType, spec: Rotary):
        self.layer = function_layer(original, spec)

    def __deepcopy__(self, memo):  # kernels copies its map and compares the copies
        return self

    def load(self) -> type:
        return self.layer


class Registration:
    """Everything that register() changed, so that unregister() can take it back."""

    def __init__(self, mapping: Dict[str, Any]):
        self.kernels = import_kernels()
        self.users_mapping = mapping
        self.upstream = integration.transformers_layer_map()
        self.defaults: Dict[str, Any] = {}
        self.decorated: Dict[type, Optional[Any]] = {}  # class -> kernel_condition that it had; None: we named the class
        self.seen: set = set()
        self.functions: Dict[Tuple[int, str], Tuple[Dict[str, Any], FunctionType, nn.Module, str]] = {}

        self.kernels.register_kernel_mapping(mapping)
        for name, entry in layer_map().items():
            default = self.upstream.get(name, {}).pop("npu", None)
            if default is not None:
                self.defaults[name] = default
            self.fill(name, entry["npu"])
        self.hook = register_module_module_registration_hook(self.see)

    def fill(self, name: str, repository: Any) -> None:
        """Serve every mode of `name` that the user left open."""
        modes = self.kernels.Mode
        default = self.defaults.get(name)
        theirs = users_entries(name, default if isinstance(default, dict) else {modes.FALLBACK: default})
        # kernels asks for FALLBACK last, so beside a user's FALLBACK any entry of ours would win over it
        open_modes = () if modes.FALLBACK in theirs else (modes.INFERENCE, modes.TRAINING, modes.FALLBACK)
        ours = {mode: repository for mode in open_modes}
        self.kernels.register_kernel_mapping({name: {"npu": {**ours, **theirs}}})

    def see(self, parent: nn.Module, name: str, module: Optional[nn.Module]) -> None:
        if module is None:
            return
        cls = type(module)
        if cls not in self.seen:
            self.seen.add(cls)
            self.decorate(module)
            for scope, attribute in integration.rotary_functions(cls):
                self.wrap(scope, attribute)
        for scope, attribute in integration.rotary_functions(cls):
            if (id(scope), attribute) in self.functions:
                module.__dict__.setdefault("_kernel_funcs", {})[attribute] = scope[attribute]

    def decorate(self, module: nn.Module) -> None:
        cls = type(module)
        layer = LAYER_OF_KIND.get(candidate(module))
        if layer is None:
            return
        if hasattr(cls, "kernel_layer_name"):
            if "kernel_condition" in vars(cls) and cls.kernel_layer_name in layer_map():
                self.decorated[cls] = vars(cls)["kernel_condition"]
                cls.kernel_condition = staticmethod(remember)
        elif kinds(cls.forward) == kinds(getattr(layers, layer).forward):
            replace = self.kernels.replace_kernel_forward_from_hub
            asks = "condition" in inspect.signature(replace).parameters
            if asks or condition(module):  # kernels 0.16 cannot ask later; the layer itself asks again then
                replace(cls, PREFIX + layer, **({"condition": condition} if asks else {}))
                self.decorated[cls] = None

    def wrap(self, scope: Dict[str, Any], attribute: str) -> None:
        """Make a plain rotary function one that kernels can swap."""
        original = scope[attribute]
        if not isinstance(original, FunctionType) or SPEC in original.__dict__:
            return
        spec = match(original)
        if not isinstance(spec, Rotary):
            return
        name = f"{PREFIX}{original.__module__}.{original.__qualname__}"
        function = self.kernels.use_kernel_forward_from_hub(name)(original)
        functools.update_wrapper(function, original, updated=())
        self.functions[id(scope), attribute] = scope, original, function, name
        scope[attribute] = function
        self.fill(name, FunctionRepository(original, spec))

    def take_back(self) -> None:
        self.hook.remove()
        for cls, kernel_condition in self.decorated.items():
            if kernel_condition is None:
                del cls.kernel_layer_name
                if "kernel_condition" in vars(cls):
                    del cls.kernel_condition
            else:
                cls.kernel_condition = kernel_condition
        names = list(layer_map())
        for scope, original, function, name in self.functions.values():
            if scope.get(original.__name__) is function:
                scope[original.__name__] = original
            names.append(name)
        given = [repository for entry in self.users_mapping.values() for repository in repositories(entry.get("npu"))]
        for name in {*names, *self.users_mapping}:
            kept = {
                mode: repository
                for mode, repository in registered(name).items()
                if not isinstance(repository, (LoadedLayerRepository, FunctionRepository)) and repository not in given
            }
            self.kernels.register_kernel_mapping({name: {"npu": kept}})
        for name, default in self.defaults.items():
            self.upstream[name]["npu"] = default


def repositories(entry: Any) -> List[Any]:
    return list(entry.values()) if isinstance(entry, dict) else [] if entry is None else [entry]


_active: Optional[Registration] = None


def register(mapping: Optional[Dict[str, Any]] = None) -> None:
    """Join the layer maps of kernels and transformers under device "npu".

    From then on plain `kernels.kernelize(model, mode=..., device="npu")` and `from_pretrained(..., use_kernels=True)` swap
    in this kernel's layers, in models built from now on, where a module computes what the layer does. What the user
    registered, before or after, wins for its layer and mode. Calling it twice is calling it once.

    Args:
        mapping: the user's own entries, as for kernels.register_kernel_mapping; they win over ours.

    Raises:
        ImportError: kernels is missing, or too old to know npu.
    """
    global _active
    if _active is not None and mapping:
        unregister()
    if _active is None:
        _active = Registration(mapping or {})


def unregister() -> None:
    """Take back what `register` did. Models that were swapped stay so: see `restore`."""
    global _active
    if _active is not None:
        _active.take_back()
        _active = None
