"""RMSNorm, its gated form, and residual add + RMSNorm."""

from typing import Optional, Tuple

import torch
from torch.autograd.function import once_differentiable

from ._dispatch import FLOATS, in_order, needs_grad, npu_op, record
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
    fp32 and rounds once. An offset is added in fp32 in both.
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


def rms_norm(
    hidden_states: torch.Tensor,
    weight: Optional[torch.Tensor] = None,
    eps: float = 1e-6,
    offset: float = 0,
    casting_mode: str = "llama",
) -> torch.Tensor:
    """`rms_norm_reference` in one launch, [..., N] with weight [N] or None.

    The fused op multiplies in fp32 and rounds once, in either casting mode; the result's dtype is the reference's.
    """
    op = npu_op("npu_rms_norm", hidden_states, weight)
    if op is None or not _fusable(hidden_states, weight):
        return rms_norm_reference(hidden_states, weight, eps, offset, casting_mode)
    hidden_states, dtype = in_order(hidden_states), hidden_states.dtype
    if weight is None:
        return op(hidden_states, hidden_states.new_ones(hidden_states.shape[-1:]), eps)[0]
    if weight.dtype == dtype and not offset:
        return op(hidden_states, weight, eps)[0]
    if weight.dtype == dtype and offset == 1 and npu_op("npu_gemma_rms_norm", hidden_states) is not None:
        if needs_grad(hidden_states, weight):
            return record(_ZeroCenteredRMSNorm, hidden_states, weight, eps)
        return torch.ops.npu.npu_gemma_rms_norm(hidden_states, weight, eps)[0]
    # The op takes a gamma in x's dtype or fp32. An offset is added in fp32: in bf16, 1 + 0.0039 is 1.
    gamma = weight.float() + offset if offset else weight.float()
    normed = op(hidden_states, gamma, eps)[0]
    return normed if casting_mode == "gemma" else normed.to(torch.promote_types(weight.dtype, dtype))


def _fusable(hidden_states: torch.Tensor, weight: Optional[torch.Tensor]) -> bool:
    if not (hidden_states.dtype in FLOATS and 2 <= hidden_states.dim() <= 8 and hidden_states.numel() > 0):
        return False
    if weight is None:
        return True
    return weight.dtype in FLOATS and weight.dim() == 1 and weight.numel() == hidden_states.size(-1)


class _ZeroCenteredRMSNorm(torch.autograd.Function):
    """npu_gemma_rms_norm, which has no backward: that of npu_rms_norm with gamma = 1 + weight."""

    @staticmethod
    def forward(ctx, hidden_states, weight, eps):
        normed, rstd = torch.ops.npu.npu_gemma_rms_norm(hidden_states, weight, eps)
        ctx.save_for_backward(hidden_states, weight, rstd)
        return normed

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        hidden_states, weight, rstd = ctx.saved_tensors
        grads = torch.ops.npu.npu_rms_norm_backward(grad, hidden_states, weight.float() + 1, rstd)
        return (*grads, None)


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
    normed = weight.to(wide) * normalized if casting_mode == "gemma" else weight * normalized.to(dtype)
    if gate is not None and not gate_first:
        return (normed * act(gate.to(wide))).to(dtype)
    return normed.to(dtype) if casting_mode == "gemma" else normed


def rms_norm_gated(
    hidden_states: torch.Tensor,
    gate: Optional[torch.Tensor],
    weight: torch.Tensor,
    eps: float = 1e-6,
    activation: str = "silu",
    gate_first: bool = False,
    group_size: Optional[int] = None,
    casting_mode: str = "llama",
) -> torch.Tensor:
    """`rms_norm_gated_reference` around the fused norm: 3 launches, 5 with groups.

    In bf16 the activated gate is rounded, too: casting both tensors to fp32 and back would cost more than it gains.
    fp16 does so where the gate comes first, as the product may leave its range.
    """
    if npu_op("npu_rms_norm", hidden_states, gate, weight) is None or not _fusable(hidden_states, weight):
        return rms_norm_gated_reference(
            hidden_states, gate, weight, eps, activation, gate_first, group_size, casting_mode
        )
    dtype = hidden_states.dtype
    out_dtype = dtype if casting_mode == "gemma" else torch.promote_types(weight.dtype, dtype)
    if gate is not None and gate_first:
        wide = torch.float32 if dtype == torch.float16 else dtype
        hidden_states = hidden_states.to(wide) * ACTIVATIONS[activation](gate.to(wide))
    if group_size is None or group_size == hidden_states.shape[-1]:
        normed = rms_norm(hidden_states, weight, eps, casting_mode="gemma")
    else:
        normed = rms_norm(hidden_states.unflatten(-1, (-1, group_size)), None, eps).flatten(-2) * weight
    if gate is not None and not gate_first:
        return (normed * ACTIVATIONS[activation](gate)).to(dtype)
    return normed.to(out_dtype)


def add_rms_norm_reference(
    hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> Tuple[torch.Tensor, torch.Tensor]:
    """(rms_norm(sum), sum) of hidden_states + residual: the seam between two blocks of a pre-norm layer."""
    residual = residual + hidden_states
    return rms_norm_reference(residual, weight, eps), residual


def add_rms_norm(
    hidden_states: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float = 1e-6
) -> Tuple[torch.Tensor, torch.Tensor]:
    """`add_rms_norm_reference` in one launch. All three in one dtype, else an addition and a norm."""
    op = npu_op("npu_add_rms_norm", hidden_states, residual, weight)
    fusable = (
        op is not None
        and _fusable(hidden_states, weight)
        and hidden_states.shape == residual.shape
        and hidden_states.dtype == residual.dtype == weight.dtype
    )
    if not fusable:
        residual = residual + hidden_states
        return rms_norm(residual, weight, eps), residual
    hidden_states = in_order(hidden_states)
    if needs_grad(hidden_states, residual, weight):
        return record(_AddRMSNorm, hidden_states, residual, weight, eps)
    normed, _, residual = op(hidden_states, residual, weight, eps)
    return normed, residual


class _AddRMSNorm(torch.autograd.Function):
    """npu_add_rms_norm has no backward; that of npu_rms_norm takes the sum and rstd as they come out of it."""

    @staticmethod
    def forward(ctx, hidden_states, residual, weight, eps):
        normed, rstd, residual = torch.ops.npu.npu_add_rms_norm(hidden_states, residual, weight, eps)
        ctx.save_for_backward(residual, weight, rstd)
        ctx.set_materialize_grads(False)
        return normed, residual

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_normed, grad_residual):
        if grad_normed is None:
            return grad_residual, grad_residual, None, None
        residual, weight, rstd = ctx.saved_tensors
        grad, grad_weight = torch.ops.npu.npu_rms_norm_backward(grad_normed, residual, weight, rstd)
        if grad_residual is not None:
            grad = grad.add_(grad_residual)
        return grad, grad, grad_weight, None
