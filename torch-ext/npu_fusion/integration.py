"""Where the layers meet models: finding what may be swapped, swapping it, giving it back."""

import functools
import inspect
import sys
import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import FunctionType, MethodType
from typing import Any, Dict, Iterator, Optional, Sequence, Tuple, Union

import torch
from torch import nn

from . import layers
from .layers import SPEC
from .mapping import layer_for, users_entries
from .matching import match
from .specs import MLP, Declined, Experts

LEFT_OUT = "left out by only= or exclude="
DISPLACED = "_npu_fusion_displaced"  # on experts: the experts_implementation that ours took the place of
USERS = "_npu_fusion_users"  # on a shared function: the models that asked for it


@dataclass(frozen=True)
class Site:
    """A place of a model where a layer may be swapped in.

    `target` is the module, or for rotary embedding the function that `module`'s forward looks up as `scope[attribute]`.
    `spec` is what it computes by itself, whatever was swapped in before.
    """

    name: str
    module: nn.Module
    target: Any
    spec: Any
    scope: Optional[Dict[str, Any]] = None
    attribute: Optional[str] = None

    @property
    def class_name(self) -> str:
        return type(self.module).__name__ if self.scope is None else f"{self.attribute} of {type(self.module).__name__}"


@functools.cache
def rotary_functions(cls: type) -> Tuple[Tuple[Dict[str, Any], str], ...]:
    """(globals, name) of every function with cos and sin that the forward of `cls` looks up in its module."""
    forward = inspect.unwrap(cls.forward)
    scope, code = getattr(forward, "__globals__", {}), getattr(forward, "__code__", None)
    found = []
    for name in code.co_names if code else ():
        value = scope.get(name)
        function = type(value).forward if isinstance(value, nn.Module) else value
        if isinstance(function, FunctionType) and {"cos", "sin"} <= set(inspect.signature(function).parameters):
            found.append((scope, name))
    return tuple(found)


def sites(model: nn.Module) -> Iterator[Site]:
    """Every place of `model` that computes, or nearly computes, what some layer does; in the order of its modules."""
    for name, module in model.named_modules():
        spec = match(module)
        if not isinstance(spec, Declined) or spec.kind is not None:
            yield Site(name, module, module, spec)
        for scope, attribute in rotary_functions(type(module)):
            function = scope[attribute]
            spec = match(function if isinstance(function, nn.Module) else original_function(function))
            yield Site(f"{name}.{attribute}", module, function, spec, scope, attribute)


def original_function(function: FunctionType) -> FunctionType:
    return function.__wrapped__ if SPEC in function.__dict__ else function


def chosen(site: Site, layer: str, only: Sequence[str], exclude: Sequence[str]) -> bool:
    """Patterns name layers ("RMSNorm"), classes ("LlamaMLP") or places ("model.layers.0.*")."""

    def named(patterns):
        names = (layer, type(site.target).__name__, site.name)
        return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)

    return (not only or named(only)) and not named(exclude)


def wrapper_of(module: nn.Module) -> Optional[str]:
    """Name of the function that wraps `module.forward` on the instance, as tensor parallelism does; None if there is none."""
    forward = module.__dict__.get("forward")
    if forward is None or (isinstance(forward, MethodType) and forward.__self__ is module):
        return None
    if "_old_forward" in module.__dict__:  # accelerate's hook calls this attribute, which can be swapped
        return None
    return getattr(forward, "__qualname__", type(forward).__name__)


def is_wrapped(module: nn.Module) -> bool:
    """Whether something else stands in `module.forward`, so that replacing it would lose that."""
    return "_old_forward" in module.__dict__ or wrapper_of(module) is not None


def current_forward(module: nn.Module) -> Any:
    return module.__dict__.get("_old_forward", module.__dict__.get("forward"))


def set_forward(module: nn.Module, forward: Any) -> None:
    if "_old_forward" in module.__dict__:
        module._old_forward = forward or MethodType(type(module).forward, module)
    elif forward is not None:
        module.forward = forward
    else:
        module.__dict__.pop("forward", None)


# what the forward of a swapped instance is bound to
FORWARDS = {
    layer.forward for layer in vars(layers).values() if isinstance(layer, type) and issubclass(layer, nn.Module)
}
ROTARY = layers.rotary_pos_emb.forward


def is_ours(forward: Any) -> bool:
    return getattr(forward, "__func__", None) in FORWARDS or SPEC in getattr(forward, "__dict__", ())


def swapped_layer(site: Site) -> Optional[str]:
    """Name of the layer of this kernel that runs at the site now."""
    is_module = isinstance(site.target, nn.Module)
    if is_ours(current_forward(site.target) if is_module else site.target):
        if not is_module:
            return "rotary_pos_emb"
        layer = layer_for(site.target.__dict__.get(SPEC) or site.spec)
        return layer if isinstance(layer, str) else None
    interface = getattr(getattr(site.target, "config", None), "_experts_implementation", None)
    if interface == layers.EXPERTS_IMPLEMENTATION and isinstance(site.target.__dict__.get(SPEC), Experts):
        return "MoEExperts"
    return None


def check_arguments(model: nn.Module, device: Union[str, torch.device]) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"kernelize takes a torch.nn.Module, got {type(model).__name__}")
    kind = torch.device(device).type if isinstance(device, torch.device) else str(device).partition(":")[0]
    if kind != "npu":
        raise ValueError(f"npu-fusion has layers for device 'npu' only, got {str(device)!r}")
    if next(model.parameters(), None) is None:
        raise ValueError(
            f"{type(model).__name__} has no parameters, so there is nothing to swap; pass the model itself"
        )


def kernelize(
    model: nn.Module,
    mode: Any = None,
    device: Union[str, torch.device] = "npu",
    only: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> nn.Module:
    """Swap in a fused layer wherever a module of `model` computes exactly what that layer computes.

    Weights, hooks and state stay where they are: only `forward` of the instances changes, and `restore` gives it back. A
    rotary function is shared by all models of its file, and so is its swap. The model may be on any device: the layers
    run the same definition in plain PyTorch until the tensors are on an NPU.

    Args:
        model: any module, a transformers model or not.
        mode: kernels.Mode; only needed to choose among entries that the user registered. Default: from `model.training`.
        device: "npu"; for the sake of the same call as kernels.kernelize.
        only, exclude: patterns (fnmatch) on names of layers ("RMSNorm"), classes ("LlamaMLP") or places ("model.layers.0.*").

    Returns:
        `model`.

    Raises:
        TypeError: `model` is no module.
        ValueError: another device, or a model without parameters.
    """
    check_arguments(model, device)
    users_choice = UsersChoice(model, mode)
    for site in sites(model):
        layer = layer_for(site.spec)
        if isinstance(layer, str) and not chosen(site, layer, only, exclude):
            layer = Declined(LEFT_OUT)
        elif isinstance(layer, str) and users_choice.take(site):
            continue
        swap(model, site, layer)
    return model


def swap(model: nn.Module, site: Site, layer: Union[str, Declined]) -> None:
    """Bring the site to what was decided: `layer` runs there, or the original does and the reason is on record."""
    if site.scope is None:
        swap_module(site.module, site.spec, layer)
    elif isinstance(layer, str):
        share(model, site)
    else:
        release(model, site)


def swap_module(module: nn.Module, spec: Any, layer: Union[str, Declined]) -> None:
    wrapper = wrapper_of(module)
    reached = wrapper is None or (isinstance(spec, Experts) and use_experts_interface(module))
    if isinstance(layer, str) and not reached:
        layer = Declined(f"its forward is wrapped on the instance ({wrapper})")
    module.__dict__[SPEC] = layer if isinstance(layer, Declined) else spec
    if wrapper is not None:
        return
    if isinstance(layer, str):
        set_forward(module, MethodType(getattr(layers, layer).forward, module))
    elif is_ours(current_forward(module)):
        set_forward(module, None)


def use_experts_interface(module: nn.Module) -> bool:
    """Reach experts whose forward is wrapped (expert parallelism) through transformers' experts interface instead."""
    if not hasattr(module, "_is_expert_parallel") or not offer_experts_implementation():
        return False
    if module.config._experts_implementation != layers.EXPERTS_IMPLEMENTATION:
        module.__dict__[DISPLACED] = module.config._experts_implementation
        module.config._experts_implementation = layers.EXPERTS_IMPLEMENTATION
    return True


def offer_experts_implementation() -> bool:
    """Make `experts_implementation="npu_fusion"` a valid choice; False where transformers has no experts interface."""
    try:
        from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    except ImportError:
        return False
    ALL_EXPERTS_FUNCTIONS.register(layers.EXPERTS_IMPLEMENTATION, layers.experts_forward)
    return True


def share(model: nn.Module, site: Site) -> None:
    """Swap the function of the whole file; whoever asked is remembered, so that `release` knows when to give it back."""
    function = site.scope[site.attribute]
    if isinstance(function, nn.Module):
        function.__dict__[SPEC] = site.spec
        original = type(function).forward
        if list(inspect.signature(original).parameters) == list(inspect.signature(ROTARY).parameters):
            function.forward = MethodType(ROTARY, function)
        else:
            function.forward = layers.rotary_function(MethodType(original, function), site.spec)
    elif SPEC not in function.__dict__:
        function = site.scope[site.attribute] = layers.rotary_function(function, site.spec)
    function.__dict__.setdefault(USERS, weakref.WeakSet()).add(model)


def release(model: nn.Module, site: Site) -> None:
    """Give a shared function back once no model that asked for its swap is left."""
    function = site.scope[site.attribute]
    users = function.__dict__.get(USERS, weakref.WeakSet())  # none where plain kernels.kernelize swapped it
    users.discard(model)
    if users or not swapped_layer(site):
        return
    if isinstance(function, nn.Module):
        for attribute in (SPEC, USERS, "forward"):
            function.__dict__.pop(attribute, None)
    elif SPEC in function.__dict__:  # several modules of a file share the function: the first one gave it back
        site.scope[site.attribute] = function.__wrapped__


def is_kernelized(model: nn.Module) -> bool:
    return any(SPEC in module.__dict__ for module in model.modules())


def restore(model: nn.Module) -> nn.Module:
    """Undo `kernelize`: every module runs its own forward again, shared rotary functions once no other model needs them.

    Returns:
        `model`.
    """
    for site in list(sites(model)):
        if site.scope is not None:
            release(model, site)
        elif swapped_layer(site):
            set_forward(site.module, None)
    for module in model.modules():
        module.__dict__.pop(SPEC, None)
        if DISPLACED in module.__dict__:
            module.config._experts_implementation = module.__dict__.pop(DISPLACED)
    return model


def model_on_meta(config: Any) -> nn.Module:
    """The model of a transformers config, without memory for its weights."""
    import transformers

    if not isinstance(config, getattr(transformers, "PreTrainedConfig", transformers.PretrainedConfig)):
        raise TypeError(f"plan takes a torch.nn.Module or a transformers config, got {type(config).__name__}")
    automatic = transformers.AutoModelForCausalLM
    if type(config) not in automatic._model_mapping:
        automatic = transformers.AutoModel
    with torch.device("meta"):
        return automatic.from_config(config)


@contextmanager
def merged_gate_up(config: Any) -> Iterator[None]:
    """Inside, from_pretrained builds the gated MLPs of a config's model with gate and up merged; afterwards, as before.

    The checkpoint stays what it was: any that the plain model loads is loaded, and save_pretrained writes the original
    names and values. Not for tensor parallelism, whose plans name the two projections.

    Args:
        config: of the model that is loaded inside.

    Raises:
        ValueError: the model has no MLP with the projections gate_proj, up_proj and down_proj.

    Example:
        with npu.merged_gate_up(AutoConfig.from_pretrained(path)):
            model = AutoModelForCausalLM.from_pretrained(path)
        npu.kernelize(model)
    """
    from transformers import monkey_patching
    from transformers.conversion_mapping import (
        extract_weight_conversions_for_model,
        register_checkpoint_conversion_mapping,
    )

    model = model_on_meta(config)
    classes = {type(site.module).__name__ for site in sites(model) if mergeable(site)}
    if not classes:
        raise ValueError(f"{type(model).__name__} has no MLP with gate_proj, up_proj and down_proj to merge")
    before, patched = extract_weight_conversions_for_model(model) or [], monkey_patching.get_patch_mapping()
    model_type = model.config.model_type
    monkey_patching.register_patch_mapping(dict.fromkeys(classes, layers.SwiGLUMLPLayout), overwrite=True)
    register_checkpoint_conversion_mapping(
        model_type, [*before, *layers.SwiGLUMLPLayout.conversion_mapping], overwrite=True
    )
    try:
        yield
    finally:
        register_checkpoint_conversion_mapping(model_type, before, overwrite=True)
        monkey_patching.unregister_patch_mapping([name for name in classes if name not in patched])
        monkey_patching.register_patch_mapping({n: patched[n] for n in classes if n in patched}, overwrite=True)


def mergeable(site: Site) -> bool:
    spec, names = site.spec, ("gate_proj", "up_proj", "down_proj")
    plain = isinstance(spec, MLP) and (spec.gate, spec.up, spec.down) == names and spec.gate_half is None
    if not plain or not site.name.endswith("mlp") or not hasattr(site.module, "config"):
        return False
    gate = site.module.gate_proj
    with torch.device("meta"):
        merged = layers.SwiGLUMLPLayout(site.module.config, gate.out_features).gate_up_proj
    return merged.in_features == gate.in_features and (merged.bias is None) == (gate.bias is None)


def transformers_layer_map() -> Dict[str, Any]:
    """transformers' own layer map, which it registers anew at every `use_kernels=True`; empty without transformers."""
    try:
        from transformers.integrations import hub_kernels
    except ImportError:
        return {}
    get = getattr(hub_kernels, "get_kernel_mapping_transformers", None)
    return get() if get else getattr(hub_kernels, "_KERNEL_MAPPING", {})


class UsersChoice:
    """Entries for npu that the user registered with kernels or gave in the model's kernel_config: they win over ours."""

    def __init__(self, model: nn.Module, mode: Any):
        self.kernels = sys.modules.get("kernels")  # not imported: nobody registered anything
        self.mode = mode
        self.training = model.training

    def take(self, site: Site) -> bool:
        """Swap in the user's own kernel at the site, if there is one."""
        name = getattr(type(site.target), "kernel_layer_name", None)
        if self.kernels is None or name is None:
            return False
        default = transformers_layer_map().get(name, {}).get("npu")
        repositories = users_entries(name, default or {})
        if not repositories:
            return False
        from kernels.layer.layer import KernelizeFallback, kernelize_layer

        modes = self.kernels.Mode
        mode = self.mode or (modes.TRAINING if self.training else modes.INFERENCE)
        kernelize_layer(
            site.target, mode=mode, device_type=self.kernels.Device("npu"), use_fallback=KernelizeFallback.DEFAULT
        )
        site.target.__dict__[SPEC] = Declined(f"the user registered another kernel for {name}")
        return True
