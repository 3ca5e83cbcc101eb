"""Which layer serves which spec, and the layer map for device "npu"."""

import logging
import os
import warnings
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Dict, Optional, Sequence, Tuple, Union

from . import layers
from .doctor import REPOSITORY as HUB_REPOSITORY
from .doctor import refusal
from .specs import MLP, Declined, DecoderLayer, Experts, GatedNorm, Norm, Rotary, Router

HERE = Path(__file__).resolve().parent
HUB_VERSION = 1  # as in build.toml
logger = logging.getLogger(__name__)

# What transformers calls a decorated layer -> our layer. Classes that nobody decorated get our layer's name with a prefix.
UPSTREAM_LAYERS = {
    "RMSNorm": "RMSNorm",
    "RMSNormGated": "RMSNormGated",
    "RMSNormZeroCentered": "RMSNormZeroCentered",
    "rotary_pos_emb": "rotary_pos_emb",
    "SoftmaxTopKRouter": "TopKRouter",
}
OWN_LAYERS = ("RMSNorm", "RMSNormGated", "RMSNormZeroCentered", "SwiGLUMLP", "GeGLUMLP", "MoEExperts", "TopKRouter")
PREFIX = "npu_fusion."


def layer_for(spec) -> Union[str, Declined]:
    """Name of the layer that computes what `spec` says, or why none does."""
    if isinstance(spec, Declined):
        return spec
    if isinstance(spec, Norm):
        return "RMSNormZeroCentered" if spec.offset else "RMSNorm"
    if isinstance(spec, GatedNorm):
        return "RMSNormGated"
    if isinstance(spec, Rotary):
        return "rotary_pos_emb"
    if isinstance(spec, MLP):
        layer = {"silu": "SwiGLUMLP", "gelu": "GeGLUMLP", "gelu_tanh": "GeGLUMLP"}.get(spec.activation)
        return layer or Declined(f"no fused op multiplies by {spec.activation}(gate)")
    if isinstance(spec, Experts):
        return "MoEExperts"
    if isinstance(spec, DecoderLayer):
        return "PreNormDecoderLayer"
    return why_not_routed(spec) or "TopKRouter"


def why_not_routed(spec: Router) -> Optional[Declined]:
    """What torch_npu's two gating operators do not compute."""
    if spec.score not in ("softmax", "sigmoid"):
        return Declined(f"scores its choice with {spec.score}, which no gating operator does", "router")
    if spec.score == "sigmoid" and not spec.renormalize:
        return Declined("its sigmoid weights are not divided by their sum, as npu_moe_gating_top_k does", "router")
    if spec.score == "softmax" and (spec.correction_bias or spec.groups):
        return Declined("chooses among softmax scores by a bias or by groups", "router")
    if spec.groups and spec.groups[2:] != ("top2sum", float("-inf")):
        return Declined(f"keeps groups by {spec.groups[2]} and scores the others {spec.groups[3]}", "router")
    if "probs" in spec.returns or not spec.flatten or (spec.correction_bias or "").startswith("argument"):
        return Declined("returns all probabilities, or takes more than tokens", "router")
    return None


class OwnRepository:
    """What kernels calls a repository, if it is ours: kernels only needs its `load`."""


@dataclass(frozen=True)
class LoadedLayerRepository(OwnRepository):
    """A layer of this kernel, as it was loaded: what kernels calls a repository, without a request or a second import."""

    layer_name: str
    path: Path = HERE

    def load(self) -> type:
        return getattr(layers, self.layer_name)

    def __str__(self) -> str:
        return f"`{self.path}`, layer `{self.layer_name}`"


@dataclass(frozen=True)
class HubLayerRepository(OwnRepository):
    """A layer of the kernel that the Hub names, or of this one where the Hub does not give it."""

    layer_name: str
    trust_remote_code: Union[bool, Tuple[str, ...]]

    def load(self) -> type:
        return getattr(hub_layers(self.trust_remote_code), self.layer_name)

    def __str__(self) -> str:
        return f"`{HUB_REPOSITORY}` (version {HUB_VERSION}), layer `{self.layer_name}`"


@cache
def hub_layers(trust_remote_code: Union[bool, Tuple[str, ...]]) -> Any:
    """The layers that the Hub gives, else those of this directory; says once, on rank 0, which they are."""
    trusted = list(trust_remote_code) if isinstance(trust_remote_code, tuple) else trust_remote_code
    try:
        found = import_kernels().get_kernel(HUB_REPOSITORY, version=HUB_VERSION, trust_remote_code=trusted).layers
        used = f"{HUB_REPOSITORY}, version {HUB_VERSION}"
    except Exception as error:  # no network, no such version, not trusted: the kernel in hand is as good
        found, used = layers, f"{HERE}, as the Hub did not give {HUB_REPOSITORY} ({type(error).__name__}: {error})"
    if os.environ.get("RANK", "0") == "0":
        logger.warning("npu-fusion uses the layers of %s", used)
    return found


def layer_map(
    hub: bool = False, trust_remote_code: Union[bool, Sequence[str]] = False
) -> Dict[str, Dict[str, OwnRepository]]:
    """{layer name: {"npu": repository}} as kernels.register_kernel_mapping takes it; every mode is served.

    The repositories are this very kernel, from the directory that it was loaded from: nothing asks the network.

    Args:
        hub: name the Hub's repository and version instead. Where it cannot be had, this directory takes its place.
        trust_remote_code: for `hub`, as for kernels.get_kernel.
    """
    names = (*UPSTREAM_LAYERS.items(), *((PREFIX + name, name) for name in OWN_LAYERS))
    trusted = trust_remote_code if isinstance(trust_remote_code, bool) else tuple(trust_remote_code)

    def repository(layer: str) -> OwnRepository:
        return HubLayerRepository(layer, trusted) if hub else LoadedLayerRepository(layer)

    return {name: {"npu": repository(layer)} for name, layer in names}


def import_kernels():
    try:
        import kernels
    except ImportError as error:
        raise ImportError(
            f"npu-fusion joins the layer map of kernels, which cannot be imported: {error}. {PAIRS}"
        ) from error
    if not hasattr(kernels, "use_kernelized_func"):  # before 0.16; npu itself is known since 0.10.3
        raise ImportError(f"this kernels is too old to be joined; npu.kernelize(model) works without it. {PAIRS}")
    refused = refusal()
    if refused:
        warnings.warn(": ".join(refused), stacklevel=4)
    return kernels


PAIRS = "Versions that go together: transformers 5.22 with kernels 0.17.2 (pip install transformers==5.22.2 kernels==0.17.2)."


def registered(layer_name: str) -> Dict[Any, Any]:
    """{mode: repository} that kernels' map holds for `layer_name` on npu now."""
    try:
        from kernels.layer.globals import _KERNEL_MAPPING
    except ImportError:
        return {}
    entry = _KERNEL_MAPPING.get().get(layer_name, {}).get("npu")
    return dict(entry.repos) if entry is not None else {}


def users_entries(layer_name: str, defaults: Dict[Any, Any]) -> Dict[Any, Any]:
    """What `registered` holds beside this kernel's entries and transformers' own `defaults`."""
    return {
        mode: repository
        for mode, repository in registered(layer_name).items()
        if not isinstance(repository, OwnRepository) and defaults.get(mode) is not repository
    }
