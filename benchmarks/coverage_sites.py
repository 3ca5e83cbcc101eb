"""Every layer of transformers that could be swapped, built by itself.

census.csv lists them for transformers 5.22.2: norms, gated MLPs, packed experts, routers and rotary functions, by
modeling module and name, with the name under which transformers decorates them for kernels. `build` makes one with its
class's own __init__, from its own config's defaults where it needs one: on the meta device in the sizes of the
checkpoint that the defaults describe, or small and with random weights.
"""

from __future__ import annotations

import copy
import csv
import functools
import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # torch is imported once the device is there
    from torch import nn

CENSUS = Path(__file__).with_name("census.csv")

# Constructor parameters that are not taken from a config. Sizes differ, so that no two can be mixed up.
HIDDEN, INNER, GROUP = 64, 96, 16
ARGUMENTS = {
    **dict.fromkeys(("hidden_size", "dim", "num_features", "embed_dim", "d_model", "embedding_dim", "d"), HIDDEN),
    **dict.fromkeys(("intermediate_size", "hidden_features", "inner_dim", "context_dim", "ffn_dim"), INNER),
    **dict.fromkeys(("hidden_act", "hidden_activation", "activation", "act"), "silu"),
    **dict.fromkeys(("in_features", "in_dim", "input_dim", "out_features", "hidden_dim"), HIDDEN),
    "group_size": GROUP,
    "input_size": HIDDEN,
    "output_size": HIDDEN,
    "swiglu_limit": 7.0,
    "num_experts": 8,
    "top_k": 2,
    "eps": 1e-6,
    "layer_idx": 0,
    "bias": False,
    "multiple_of": 16,
}
# Settings that a default config leaves open (None, 0 or one expert), so that it describes a layer nobody builds.
CONFIG = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 8),
    **dict.fromkeys(("num_experts_per_tok", "top_k_experts", "moe_topk"), 2),
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size", "shared_intermediate_size"), 256),
    "mlp_bias": False,
}


@dataclass(frozen=True)
class Site:
    kind: str  # norm | mlp | experts | router | rotary
    module: str
    name: str
    decorated: str

    def load(self) -> Any:
        """The class or function."""
        modeling = importlib.import_module(f"transformers.models.{self.module}.modeling_{self.module}")
        return getattr(modeling, self.name)


def census() -> list[Site]:
    with CENSUS.open() as file:
        return [Site(**row) for row in csv.DictReader(file)]


@functools.cache
def config_classes(module: str) -> list[type]:
    """Config classes that the modeling module knows, then those of its configuration module."""
    from transformers import PreTrainedConfig

    found: list[type] = []
    for part in ("modeling", "configuration"):
        try:
            namespace = vars(importlib.import_module(f"transformers.models.{module}.{part}_{module}"))
        except ImportError:
            continue
        found += [
            value
            for value in namespace.values()
            if inspect.isclass(value) and issubclass(value, PreTrainedConfig) and value is not PreTrainedConfig
        ]
    return list(dict.fromkeys(found))


def configs(site: Site, cls: type) -> Iterator[Any]:
    """Configs from which the class may be built, the likeliest first."""
    annotation = inspect.signature(cls.__init__).parameters["config"].annotation
    names = getattr(annotation, "__name__", str(annotation))

    def likelihood(config: type) -> tuple:
        stem = config.__name__.removesuffix("Config")
        common = next(
            (i for i, (a, b) in enumerate(zip(stem, site.name, strict=False)) if a != b), min(len(stem), len(site.name))
        )
        return config.__name__ not in names, -common, len(stem)

    for candidate in sorted(config_classes(site.module), key=likelihood):
        try:
            config = candidate()
        except Exception:
            continue
        yield config
        text = config.get_text_config()
        if text is not config:
            yield text


def arguments(cls: type) -> dict[str, Any]:
    """What __init__ requires beside a config, and sizes that it would leave None."""
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    takes = [p for p in parameters if p.kind is not p.VAR_KEYWORD and p.name != "config"]
    alone = "config" not in {p.name for p in parameters}
    return {
        p.name: ARGUMENTS[p.name]
        for p in takes
        if p.default is p.empty or (alone and p.default is None and p.name in ("dim", "intermediate_size"))
    }


def build(site: Site, small: bool = False) -> Any:
    """The site's function, or a module of its class.

    Args:
        small: sizes that a test can afford, with random weights on the CPU; else default sizes on the meta device.

    Raises:
        ValueError: no config of the modeling module fits; says what was tried.
    """
    import torch

    cls = site.load()
    if site.kind == "rotary" and not inspect.isclass(cls):
        return cls
    parameters = inspect.signature(cls.__init__).parameters
    problems = []
    for config in configs(site, cls) if "config" in parameters else (None,):
        try:
            with torch.device("meta"):
                module = make(cls, config)
            return module if not small else shrunk(cls, config, module)
        except Exception as error:
            problems.append(f"{type(config).__name__}: {type(error).__name__}: {error}")
    raise ValueError(f"{site.module}.{site.name} cannot be built: {'; '.join(problems)}")


def make(cls: type, config: Any) -> nn.Module:
    more = arguments(cls)
    if config is None:
        return cls(**more)
    config = copy.deepcopy(config)
    for name, value in CONFIG.items():
        current = getattr(config, name, None)
        if current in (None, 0) or (current == 1 and value == 8):
            setattr(config, name, value)
    config._experts_implementation = "eager"
    return cls(config, **more).eval()


def shrunk(cls: type, config: Any, like: nn.Module) -> nn.Module:
    """The same layer in small sizes: equal sizes stay equal, a multiple of another stays that multiple."""
    import torch

    sizes = {size for tensor in (*like.parameters(), *like.buffers()) for size in tensor.shape if size > 64}
    small: dict[int, int] = {}
    for size in sorted(sizes):
        base = next((other for other in sorted(small, reverse=True) if size % other == 0 and size // other <= 4), None)
        small[size] = small[base] * (size // base) if base else 32 + 16 * len(small)
    if config is not None:
        config = copy.deepcopy(config)
        resize(config, small)
    module = make(cls, config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.5)
    return module


def resize(config: Any, small: dict[int, int]) -> None:
    for name, value in list(vars(config).items()):
        if type(value) is int and value in small:
            setattr(config, name, small[value])
        elif hasattr(value, "to_dict"):
            resize(value, small)
