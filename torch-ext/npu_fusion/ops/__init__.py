"""Fused ops for Ascend NPUs: NPU tensors take the fused call or a legal route to it, all others the reference."""

from .activation import (
    gated_activation,
    gated_activation_reference,
    gated_linear,
    gated_linear_reference,
    geglu,
    geglu_reference,
    swiglu,
    swiglu_reference,
)
from .gating import (
    group_top_k_sigmoid,
    group_top_k_sigmoid_reference,
    top_k_softmax,
    top_k_softmax_reference,
)
from .grouped_matmul import grouped_matmul, grouped_matmul_reference
from .moe import (
    experts_reference,
    moe_experts,
    moe_permute,
    moe_permute_reference,
    moe_unpermute,
    moe_unpermute_reference,
)
from .norm import (
    add_rms_norm,
    add_rms_norm_reference,
    rms_norm,
    rms_norm_gated,
    rms_norm_gated_reference,
    rms_norm_reference,
)
from .rotary import apply_rotary_pos_emb, rotary, rotary_reference, rotate_heads

__all__ = [
    "add_rms_norm",
    "add_rms_norm_reference",
    "apply_rotary_pos_emb",
    "experts_reference",
    "gated_activation",
    "gated_activation_reference",
    "gated_linear",
    "gated_linear_reference",
    "geglu",
    "geglu_reference",
    "group_top_k_sigmoid",
    "group_top_k_sigmoid_reference",
    "grouped_matmul",
    "grouped_matmul_reference",
    "moe_experts",
    "moe_permute",
    "moe_permute_reference",
    "moe_unpermute",
    "moe_unpermute_reference",
    "rms_norm",
    "rms_norm_gated",
    "rms_norm_gated_reference",
    "rms_norm_reference",
    "rotary",
    "rotary_reference",
    "rotate_heads",
    "swiglu",
    "swiglu_reference",
    "top_k_softmax",
    "top_k_softmax_reference",
]
