"""Routers: logits to the k experts of each token and their weights."""

from typing import Optional, Tuple

import torch


def top_k_softmax_reference(
    logits: torch.Tensor, k: int, renormalize: bool = True, index_dtype: torch.dtype = torch.int64
) -> Tuple[torch.Tensor, torch.Tensor]:
    """Softmax over all experts in fp32, the k largest, renormalized to sum 1 if asked (Mixtral, Qwen3-MoE).

    Args:
        logits: [T, E].

    Returns:
        weights [T, k] in the logits' dtype, rounded once, largest first; index [T, k].
    """
    weights, index = torch.softmax(logits, dim=-1, dtype=torch.float32).topk(k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(logits.dtype), index.to(index_dtype)


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


top_k_softmax = top_k_softmax_reference
group_top_k_sigmoid = group_top_k_sigmoid_reference
