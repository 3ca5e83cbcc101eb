"""Stand-ins: the same class and settings as a module, with small random tensors on the CPU."""

import copy
import itertools
import sys
import types
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn


class Mismatch(Exception):
    """Why a target is declined. `candidate` is False where it only looked like a layer of its kind."""

    def __init__(self, reason, candidate=True):
        super().__init__(reason)
        self.candidate = candidate


def random(seed, *shape, scale=1.0, dtype=torch.float32):
    generator = torch.Generator("cpu").manual_seed(seed)
    return (torch.randn(shape, generator=generator, device="cpu", dtype=torch.float32) * scale).to(dtype)


def own_tensors(module):
    """Parameters, buffers and plain attributes of the module itself, by name."""
    owned = itertools.chain(module._parameters.items(), module._buffers.items(), vars(module).items())
    return {name: whole(value) for name, value in owned if isinstance(value, torch.Tensor)}


def whole(tensor):
    """DeepSpeed's ZeRO-3 leaves an empty tensor in place of a weight; nothing here reads more than its shape."""
    shape = getattr(tensor, "ds_shape", None)
    return tensor if shape is None else torch.empty(shape, dtype=tensor.dtype, device="meta")


def written_class(module):
    """The class without the subclass of FSDP2, which works only on what it has sharded."""
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", None)
    return type(module).__mro__[2] if fsdp is not None and isinstance(module, fsdp) else type(module)


def shape_in_forward(module, tensor):
    """transformers' expert parallelism leaves num_experts of the experts here, in weights that say the number of all."""
    if vars(module).get("_is_expert_parallel") and tensor.dim() > 1:
        return (module.num_experts, *tensor.shape[1:])
    return tensor.shape


def is_linear(module):
    """Whether it maps in_features to out_features, in whatever way: nn.Linear, quantized, wrapped by LoRA."""
    return type(getattr(module, "in_features", None)) is int and type(getattr(module, "out_features", None)) is int


def shrink(sizes):
    """{real: small} for the sizes above 32; equal sizes stay equal, and the double of another stays its double."""
    sizes = set(sizes)
    small = {size: size for size in sizes if size <= 32}
    fresh = (size for size in (6, 10, 14, 22, 26, 34, 38, 46, 58, 62, 74, 82, 86, 94) if size not in small)
    for size in sorted(sizes - small.keys()):
        small[size] = 2 * small[size // 2] if size % 2 == 0 and size // 2 in small else next(fresh)
    return small


class Config:
    """A transformers config as a stand-in sees it: eager experts, small sizes. What a forward writes stays here."""

    _experts_implementation = "eager"

    def __init__(self, config, sizes):
        self.__dict__.update(_real=config, _sizes=sizes)

    def __getattr__(self, name):
        value = getattr(self._real, name)
        return self._sizes.get(value, value) if type(value) is int else value


class Opaque(nn.Linear):
    """Stands for a linear child that is only called. Its weight and bias are NaN, so that reading them shows."""

    def __init__(self, in_features, out_features, bias, seed, dtype):
        nn.Module.__init__(self)
        self.in_features, self.out_features = in_features, out_features
        nan = torch.full((out_features, in_features), float("nan"), dtype=dtype)
        self.weight = nn.Parameter(nan, requires_grad=False)
        self.bias = nn.Parameter(nan[:, 0].clone(), requires_grad=False) if bias else None
        self.matrix = nn.Parameter(random(seed, out_features, in_features, scale=0.6, dtype=dtype))
        self.shift = nn.Parameter(random(seed + 1, out_features, scale=0.6, dtype=dtype))

    def forward(self, x):
        return F.linear(x, self.matrix, self.shift)


def stand_in(module, sizes=None, dtype=torch.float32, training=False, scale=0.6, opaque=False, seed=100):
    """A copy of `module` to probe, without the hooks and the forward of the instance. No weight is read.

    Args:
        sizes: {real: small} for dimensions and whole numbers among the settings.
        scale: of the random weights.
        opaque: linear children become `Opaque`.
    """
    sizes = sizes or {}
    state = {name: _attribute(value, sizes) for name, value in vars(module).items() if name != "forward"}
    state.update({name: OrderedDict() for name, value in state.items() if "hooks" in name and isinstance(value, dict)})
    state.update(training=training, _parameters={}, _buffers={}, _modules={})
    for name, tensor in own_tensors(module).items():
        if not tensor.is_floating_point() or tensor.dtype.itemsize == 1:
            raise Mismatch(f"{name} is {str(tensor.dtype)[6:]}: quantized, or not a weight")
        shape = [sizes.get(size, size) for size in shape_in_forward(module, tensor)]
        if torch.Size(shape).numel() > 1 << 22:
            raise Mismatch(f"{name} is too large to probe: {tuple(tensor.shape)}")
        seed += 2
        value = random(seed, *shape, scale=scale, dtype=dtype)
        if name in module._parameters:
            state["_parameters"][name] = nn.Parameter(value)
        else:
            (state["_buffers"] if name in module._buffers else state)[name] = value
    for kind in ("_parameters", "_buffers"):
        state[kind].update({name: None for name, tensor in getattr(module, kind).items() if tensor is None})
    for name, child in module._modules.items():
        seed += 20
        if child is not None and opaque and is_linear(child):
            features = (sizes.get(size, size) for size in (child.in_features, child.out_features))
            child = Opaque(*features, getattr(child, "bias", None) is not None, seed, dtype)
        elif child is not None:
            child = stand_in(child, sizes, dtype, training, scale, False, seed)
        state["_modules"][name] = child
    result = object.__new__(written_class(module))
    result.__dict__.update(state)
    return result


def _attribute(value, sizes):
    """A setting for the stand-in. What a forward may change is copied, one level deep."""
    if type(value) is int:
        return sizes.get(value, value)
    if type(value) is tuple:
        return tuple(_attribute(item, sizes) for item in value)
    if isinstance(value, (list, dict, set)):
        return copy.copy(value)
    if hasattr(type(value), "to_dict"):
        return Config(value, sizes)
    plain = hasattr(value, "__dict__") and not callable(value) and not isinstance(value, types.ModuleType)
    return copy.copy(value) if plain else value
