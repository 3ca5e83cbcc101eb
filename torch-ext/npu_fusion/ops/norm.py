"""RMSNorm, its gated form, and residual add + RMSNorm."""

from typing import Optional

import torch

from .activation import ACTIVATIONS


def rms_norm_reference(
    hidden_states: torch.Tensor,
    weight: Optional[torch.Tensor],
    eps: float,
    offset: float = 0,
    casting_mode: str = "llama",
) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) over the last dimension, in fp32, times `offset + weight`.

    `casting_mode` names when the result is rounded (the terms are Liger-Kernel's): "llama" rounds the normalized
    values to the input's dtype and then multiplies, so that a wider weight widens the result; "gemma" multiplies in
    fp32 and rounds once. An offset is added in fp32 in both: in bf16, 1 + 0.0039 is 1.
    """
    dtype = hidden_states.dtype
    wide = torch.promote_types(dtype, torch.float32)
    normalized = hidden_states.to(wide)
    normalized = normalized * torch.rsqrt(normalized.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return normalized.to(dtype)
    if casting_mode == "gemma":
        return ((offset + weight.to(wide)) * normalized).to(dtype)
    if offset:
        return ((offset + weight.to(wide)) * normalized.to(dtype)).to(torch.promote_types(weight.dtype, dtype))
    return weight * normalized.to(dtype)


def rms_norm_gated_reference(
    hidden_states: torch.Tensor,
    gate: Optional[torch.Tensor],
    weight: torch.Tensor,
    eps: float,
    activation: str = "silu",
    gate_first: bool = False,
    group_size: Optional[int] = None,
    casting_mode: str = "llama",
) -> torch.Tensor:
    """RMSNorm with a gate that multiplies in fp32: after the norm (Qwen3-Next) or before it (Mamba2, Zamba2).

    With `group_size`, every run of that many features is normalized by itself; `weight` spans all features.
    """
    dtype = hidden_states.dtype
    wide = torch.promote_types(dtype, torch.float32)
    act = ACTIVATIONS[activation]
    if gate is not None and gate_first:
        hidden_states = hidden_states.to(wide) * act(gate.to(wide))
    grouped = hidden_states if group_size is None else hidden_states.unflatten(-1, (-1, group_size))
    normalized = rms_norm_reference(grouped.to(wide), None, eps).view(hidden_states.shape)
    normed = (weight.to(wide) * normalized).to(dtype) if casting_mode == "gemma" else weight * normalized.to(dtype)
    if gate is not None and not gate_first:
        normed = (normed * act(gate.to(wide))).to(dtype)
    return normed


def add_rms_norm_reference(hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float):
    """(rms_norm(hidden_states + residual), hidden_states + residual): the seam between two blocks of a pre-norm layer."""
    residual = residual + hidden_states
    return rms_norm_reference(residual, weight, eps), residual


rms_norm = rms_norm_reference
rms_norm_gated = rms_norm_gated_reference
add_rms_norm = add_rms_norm_reference
