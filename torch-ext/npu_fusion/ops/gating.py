"""Routers: logits to the k experts of each token and their weights."""

from typing import Optional, Tuple

import torch
from torch.autograd.function import once_differentiable

from ._dispatch import needs_grad, npu_op, record


def top_k_softmax_reference(
    logits: torch.Tensor, k: int, renormalize: bool = True, index_dtype: torch.dtype = torch.int64
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts in fp32, the k largest, renormalized to sum 1 if asked (Mixtral, Qwen3-MoE).

    Args:
        logits: [T, E].

    Returns:
        weights [T, k] in the logits' dtype, rounded once, largest first; index [T, k].
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    weights, index = torch.softmax(logits, dim=-1, dtype=wide).topk(k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), index.to(index_dtype)


def top_k_softmax(
    logits: torch.Tensor, k: int, renormalize: bool = True, index_dtype: torch.dtype = torch.int64
) -> Tuple[torch.Tensor, torch.Tensor]:
    """`top_k_softmax_reference` in one launch, and a cast of the indices. Equal values go to the lower expert.

    npu_moe_gating_top_k_softmax_v2 renormalizes before it rounds, and gives what the backward needs. Of the first
    version only what is as good is taken: no gradients, and no division of weights that were rounded to bf16.
    """
    v2, v1 = (npu_op(name, logits) for name in ("npu_moe_gating_top_k_softmax_v2", "npu_moe_gating_top_k_softmax"))
    if (v2 is None and v1 is None) or not _fusable(logits, k):
        return top_k_softmax_reference(logits, k, renormalize, index_dtype)
    if needs_grad(logits):
        if v2 is None:
            return top_k_softmax_reference(logits, k, renormalize, index_dtype)
        return record(_TopKSoftmax, logits, k, renormalize, index_dtype)
    if v1 is not None and not renormalize:
        weights, index, _ = v1(logits, k=k)
    elif v2 is not None:
        weights, index, _ = v2(logits, k=k, renorm=int(renormalize))
    elif logits.dtype == torch.float32:
        weights, index, _ = v1(logits, k=k)
        weights = weights / weights.sum(-1, keepdim=True)
    else:
        return top_k_softmax_reference(logits, k, renormalize, index_dtype)
    return weights, index.to(index_dtype)


def _fusable(logits: torch.Tensor, k: int) -> bool:
    """fp16 is left out: the first version computes some shapes in half precision."""
    return (
        logits.dtype in (torch.float32, torch.bfloat16)
        and logits.dim() == 2
        and logits.numel() > 0
        and k <= min(1024, logits.shape[-1])
    )


class _TopKSoftmax(torch.autograd.Function):
    """Renormalized weights are the softmax of the chosen logits, so that its backward needs nothing but them."""

    @staticmethod
    def forward(ctx, logits, k, renormalize, index_dtype):
        weights, index, probabilities = torch.ops.npu.npu_moe_gating_top_k_softmax_v2(
            logits, k=k, renorm=int(renormalize), output_softmax=not renormalize
        )
        index = index.to(index_dtype)
        ctx.save_for_backward(weights if renormalize else probabilities, index)
        ctx.renormalize, ctx.shape, ctx.dtype = renormalize, logits.shape, logits.dtype
        ctx.mark_non_differentiable(index)
        ctx.set_materialize_grads(False)
        return weights, index

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, _):
        if grad is None:
            return None, None, None, None
        softmax, index = ctx.saved_tensors
        backward, index = torch.ops.aten._softmax_backward_data, index.long()
        if ctx.renormalize:
            grad = backward(grad, softmax, -1, softmax.dtype)
            return grad.new_zeros(ctx.shape).scatter_(-1, index, grad), None, None, None
        grad = softmax.new_zeros(ctx.shape).scatter_(-1, index, grad.to(softmax.dtype))
        return backward(grad, softmax, -1, softmax.dtype).to(ctx.dtype), None, None, None


def group_top_k_sigmoid_reference(
    logits: torch.Tensor,
    correction_bias: Optional[torch.Tensor],
    k: int,
    num_groups: int = 1,
    top_k_groups: int = 1,
    renormalize: bool = True,
    scaling_factor: float = 1.0,
    index_dtype: torch.dtype = torch.int64,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """DeepSeek-V3's router: sigmoid scores; the choice adds a bias and keeps the groups with the best two in sum.

    Args:
        logits: [T, E].
        correction_bias: [E], added to the scores for the choice only, or None.

    Returns:
        weights [T, k] fp32: the chosen scores, over their sum + 1e-20 if `renormalize`, times `scaling_factor`;
        index [T, k]. The order of the k is not part of the definition.
    """
    scores = logits.float().sigmoid()
    choice = scores if correction_bias is None else scores + correction_bias.float()
    if num_groups > 1:
        groups = choice.unflatten(-1, (num_groups, -1))
        best = groups.topk(min(2, groups.shape[-1]), dim=-1).values.sum(-1).topk(top_k_groups, dim=-1).indices
        kept = torch.zeros_like(groups[..., 0], dtype=torch.bool).scatter(-1, best, True)
        choice = groups.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(-2)
    index = choice.topk(k, dim=-1).indices
    weights = scores.gather(-1, index)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scaling_factor, index.to(index_dtype)


def group_top_k_sigmoid(
    logits: torch.Tensor,
    correction_bias: Optional[torch.Tensor],
    k: int,
    num_groups: int = 1,
    top_k_groups: int = 1,
    renormalize: bool = True,
    scaling_factor: float = 1.0,
    index_dtype: torch.dtype = torch.int64,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """`group_top_k_sigmoid_reference` in one launch where nothing asks for gradients; fp32 logits, always renormalized.

    Largest choice first; equal values go to the lower expert.
    """
    op = npu_op("npu_moe_gating_top_k", logits, correction_bias)
    fusable = (
        op is not None
        and logits.dtype == torch.float32
        and renormalize
        and _fusable(logits, k)
        and not needs_grad(logits, correction_bias)
        and logits.shape[1] <= 2048
        and logits.shape[1] % num_groups == 0
        and (num_groups == 1 or logits.shape[1] // num_groups > 2)
        and (num_groups == 1 or k <= top_k_groups * (logits.shape[1] // num_groups))
    )
    if not fusable:
        return group_top_k_sigmoid_reference(
            logits, correction_bias, k, num_groups, top_k_groups, renormalize, scaling_factor, index_dtype
        )
    weights, index, _ = op(
        logits,
        k,
        bias=None if correction_bias is None else correction_bias.float(),
        k_group=top_k_groups if num_groups > 1 else 1,
        group_count=num_groups,
        group_select_mode=int(num_groups > 1),  # 1: the sum of its best two, which the op wants to exist; 0: its best
        renorm=0,
        norm_type=1,  # sigmoid
        routed_scaling_factor=scaling_factor,
        eps=1e-20,
    )
    return weights, index.to(index_dtype)
