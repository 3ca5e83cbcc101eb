"""Joining the layer maps of kernels and transformers, so that plain `kernels.kernelize` and `from_pretrained` use ours.

kernels finds a layer by a name on its class. Classes that nobody decorated get one from us: `register` sees every module
through torch's public hook for module registration when it is attached to a parent, a `KernelConfig` has the model in hand.
The name follows from the structure; whether an instance is swapped is decided by `condition`, which kernels asks.
"""

import functools
import inspect
from types import FunctionType
from typing import Any, Callable, Dict, Iterable, List, Optional, Sequence, Set, Tuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook

from . import integration, layers
from .layers import SPEC, spec_of
from .mapping import PREFIX, OwnRepository, import_kernels, layer_for, layer_map, registered, users_entries
from .matching import candidate, match
from .specs import Declined, Rotary

# the layer whose signature a class of this kind must have; which fused op runs is decided by the instance's spec
LAYER_OF_KIND = {
    "norm": "RMSNorm",
    "gated_norm": "RMSNormGated",
    "mlp": "SwiGLUMLP",
    "experts": "MoEExperts",
    "router": "TopKRouter",
    "decoder": "PreNormDecoderLayer",
}


def condition(module: nn.Module) -> bool:
    """kernels asks this for every instance right before it swaps; the answer is kept for the layer's forward.

    Where accelerate's hooks or tensor parallelism stand in `module.forward`, kernels would overwrite them: there we swap
    behind the hooks, or leave the module alone, and send kernels away.
    """
    spec = spec_of(module)
    layer = layer_for(spec)
    if integration.is_wrapped(module):
        integration.swap_module(module, spec, layer)
        return False
    return isinstance(layer, str)


def remember(module: nn.Module) -> bool:
    """As `condition`, for classes that transformers decorated: kernels of other devices must not depend on the answer."""
    return condition(module) or not integration.is_wrapped(module)


def parameter_kinds(forward: Any) -> List[Any]:
    return [parameter.kind for parameter in inspect.signature(forward).parameters.values()]


class SignatureRepository(OwnRepository):
    """For a layer with the very signature of what it takes the place of, since kernels compares the two."""

    def __init__(self, forward: Callable, parameters: Iterable[inspect.Parameter]) -> None:
        class Layer(nn.Module):
            can_torch_compile = True

            def forward(self, *args, **kwargs):
                return forward(self, *args, **kwargs)

        Layer.forward.__signature__ = inspect.Signature(list(parameters))
        integration.FORWARDS.add(Layer.forward)
        self.layer = Layer

    def __deepcopy__(self, memo: Any) -> "SignatureRepository":
        return self  # kernels copies its map and looks layers up by equality

    def load(self) -> type:
        return self.layer


def function_repository(original: FunctionType, spec: Rotary) -> SignatureRepository:
    fused = layers.rotary_function(original, spec)
    itself = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = [itself, *inspect.signature(original).parameters.values()]
    return SignatureRepository(lambda self, *args, **kwargs: fused(*args, **kwargs), parameters)


class Names:
    """The names given to classes and functions that had none, so that they can be taken back. One for the process."""

    def __init__(self) -> None:
        self.kernels = import_kernels()
        self.conditions: Dict[type, Optional[Any]] = {}  # class -> kernel_condition that it had; None: the name is ours
        self.functions: Dict[Tuple[int, str], Tuple[Dict[str, Any], FunctionType, nn.Module]] = {}
        self.repositories: Dict[str, Any] = {name: entry["npu"] for name, entry in layer_map().items()}

    def name_class(self, module: nn.Module) -> None:
        cls, kind = type(module), candidate(module)
        layer = LAYER_OF_KIND.get(kind)
        if layer is None or cls in self.conditions:
            return
        if "kernel_condition" in vars(cls) and cls.kernel_layer_name in self.repositories:
            self.conditions[cls] = vars(cls)["kernel_condition"]
            cls.kernel_condition = staticmethod(remember)
        elif not hasattr(cls, "kernel_layer_name"):
            name, forward = PREFIX + layer, getattr(layers, layer).forward
            if kind == "decoder":  # every class takes other arguments
                name = f"{PREFIX}{cls.__module__}.{cls.__qualname__}"
                parameters = inspect.signature(cls.forward).parameters.values()
                self.repositories[name] = SignatureRepository(forward, parameters)
            elif parameter_kinds(cls.forward) != parameter_kinds(forward):
                return
            replace = self.kernels.replace_kernel_forward_from_hub
            asks = "condition" in inspect.signature(replace).parameters
            if asks or condition(module):  # kernels 0.16 cannot ask; there the layer itself asks at its first forward
                replace(cls, name, **({"condition": condition} if asks else {}))
                self.conditions[cls] = None

    def name_functions(self, cls: type) -> None:
        """Turn the plain rotary functions that `cls` uses into layers that kernels can swap."""
        for scope, attribute in integration.rotary_functions(cls):
            original = scope[attribute]
            if not isinstance(original, FunctionType) or SPEC in original.__dict__:
                continue
            spec = match(original)
            if not isinstance(spec, Rotary):
                continue
            name = f"{PREFIX}{original.__module__}.{original.__qualname__}"
            function = self.kernels.use_kernel_forward_from_hub(name)(original)
            functools.update_wrapper(function, original, updated=())
            self.functions[id(scope), attribute] = scope, original, function
            self.repositories[name] = function_repository(original, spec)
            scope[attribute] = function

    def attach_functions(self, module: nn.Module) -> None:
        """Show the module's functions to kernels, as transformers' use_kernelized_func does."""
        for scope, attribute in integration.rotary_functions(type(module)):
            if (id(scope), attribute) in self.functions:
                module.__dict__.setdefault("_kernel_funcs", {})[attribute] = scope[attribute]

    def take_back(self) -> None:
        for cls, kernel_condition in self.conditions.items():
            if kernel_condition is not None:
                cls.kernel_condition = kernel_condition
                continue
            del cls.kernel_layer_name
            if "kernel_condition" in vars(cls):
                del cls.kernel_condition
        for (_, attribute), (scope, original, function) in self.functions.items():
            if scope.get(attribute) is function:
                scope[attribute] = original


def with_ours(kernels: Any, repository: Any, theirs: Dict[Any, Any]) -> Dict[Any, Any]:
    """{mode: repository} with ours in every mode that the user left open.

    kernels tries FALLBACK last, so beside a user's FALLBACK any entry of ours would win over it.
    """
    modes = kernels.Mode
    open_modes = () if modes.FALLBACK in theirs else (modes.INFERENCE, modes.TRAINING, modes.FALLBACK)
    return {**dict.fromkeys(open_modes, repository), **theirs}


class Registration:
    """Everything that register() changed, so that unregister() can take it back."""

    def __init__(self, mapping: Dict[str, Any]) -> None:
        self.names = names()
        self.seen: Set[type] = set()
        self.mapping = mapping
        self.upstream = integration.transformers_layer_map()
        # transformers registers its own entries anew at every use_kernels=True; those for npu need the network
        self.defaults = {
            name: self.upstream[name].pop("npu") for name in UPSTREAM if "npu" in self.upstream.get(name, {})
        }
        self.register = self.names.kernels.register_kernel_mapping
        self.displaced = {name: self.upstream_entries(name) for name in self.defaults}
        self.register(mapping)
        integration.offer_experts_implementation()
        for name in self.names.repositories:
            self.fill(name)
        self.hook = register_module_module_registration_hook(self.see)

    def upstream_entries(self, name: str) -> Dict[Any, Any]:
        """What kernels' map holds of transformers' own entries: an earlier use_kernels=True put it there."""
        default = self.defaults[name]
        return {mode: repository for mode, repository in registered(name).items() if default.get(mode) is repository}

    def fill(self, name: str) -> None:
        theirs = users_entries(name, self.defaults.get(name, {}))
        self.register({name: {"npu": with_ours(self.names.kernels, self.names.repositories[name], theirs)}})

    def see(self, parent: nn.Module, name: str, module: Optional[nn.Module]) -> None:
        # dynamo traces this hook where a forward attaches a module, as that of transformers does to collect outputs
        if module is None or torch.compiler.is_compiling():
            return
        if type(module) not in self.seen:
            self.seen.add(type(module))
            known = set(self.names.repositories)
            self.names.name_class(module)
            self.names.name_functions(type(module))
            for new in set(self.names.repositories) - known:
                self.fill(new)
        self.names.attach_functions(module)

    def take_back(self) -> None:
        self.hook.remove()
        given = [repository for entry in self.mapping.values() for repository in repositories(entry.get("npu"))]
        for name in {*self.names.repositories, *self.mapping}:
            kept = {
                mode: repository
                for mode, repository in registered(name).items()
                if not isinstance(repository, OwnRepository) and repository not in given
            }
            self.register({name: {"npu": {**self.displaced.get(name, {}), **kept}}})
        for name, default in self.defaults.items():
            self.upstream[name]["npu"] = default


UPSTREAM = tuple(name for name in layer_map() if not name.startswith(PREFIX))


def repositories(entry: Any) -> List[Any]:
    return list(entry.values()) if isinstance(entry, dict) else [] if entry is None else [entry]


_active: Optional[Registration] = None
_names: Optional[Names] = None


def names() -> Names:
    global _names
    if _names is None:
        _names = Names()
    return _names


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
    global _active, _names
    if _active is not None:
        _active.take_back()
    if _names is not None:
        _names.take_back()
    _active = _names = None


@functools.cache
def kernel_config_class() -> type:
    """`KernelConfig`, which exists once transformers is there to derive it from."""
    from transformers.utils.kernel_config import KernelConfig as Base

    class KernelConfig(Base):
        """For `from_pretrained(path, kernel_config=npu.KernelConfig())`: this kernel's layers for one model, by matching.

        Serves training and inference, survives train(), eval() and save_pretrained(), and asks no network.

        Args:
            only, exclude: as for `kernelize`.
            kernel_mapping: the user's own entries, as for transformers' KernelConfig; they win over ours.
        """

        def __init__(self, only: Sequence[str] = (), exclude: Sequence[str] = (), kernel_mapping: Any = None) -> None:
            super().__init__(kernel_mapping)
            self.only, self.exclude = tuple(only), tuple(exclude)

        def create_compatible_mapping(self, model: nn.Module, compile: bool = False) -> None:
            """transformers calls this with the model in hand, right before kernels swaps by name."""
            super().create_compatible_mapping(model, compile)
            known, left_out = names(), set()
            for site in integration.sites(model):
                layer = layer_for(site.spec)
                if isinstance(layer, str) and not integration.chosen(site, layer, self.only, self.exclude):
                    layer = Declined(integration.LEFT_OUT)
                if site.scope is None:
                    site.module.__dict__[SPEC] = layer if isinstance(layer, Declined) else site.spec
                    known.name_class(site.module)
                else:
                    known.name_functions(type(site.module))
                    known.attach_functions(site.module)
                    if isinstance(layer, Declined):
                        left_out.add(type(site.scope[site.attribute]).kernel_layer_name)
            for name, repository in known.repositories.items():
                theirs = self.kernel_mapping.get(name, {}).get("npu", {})
                ours = {} if name in left_out else with_ours(known.kernels, repository, theirs)
                self.kernel_mapping[name] = {"npu": ours or theirs}

    return KernelConfig
