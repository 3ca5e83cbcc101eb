"""Mixture of experts: tokens to experts and back, and the whole block of packed experts."""

from typing import Callable, Optional, Tuple, Union

import torch

from .activation import geglu, geglu_reference, swiglu, swiglu_reference
from .grouped_matmul import grouped_matmul, grouped_matmul_reference


def moe_permute_reference(
    hidden_states: torch.Tensor, top_k_index: torch.Tensor, num_experts: int
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copies every token to each of its experts, the rows of expert 0 first, tokens in order within an expert.

    Args:
        hidden_states: [T, H].
        top_k_index: int [T, k], experts of each token. num_experts stands for an expert of another rank.
        num_experts: E.

    Returns:
        permuted [T * k, H]; row_index int32 [T * k], the row in permuted of slot t * k + j, or T * k for an expert of
        another rank; tokens_per_expert int64 [E]. Rows beyond the sum of tokens_per_expert are zeros here and
        undefined on an NPU.
    """
    flat = top_k_index.reshape(-1).long()
    order = torch.argsort(flat, stable=True)
    row_index = torch.empty_like(order).scatter_(0, order, torch.arange(flat.numel(), device=flat.device))
    here = flat < num_experts
    tokens_per_expert = torch.zeros(num_experts + 1, dtype=torch.int64, device=flat.device)
    tokens_per_expert = tokens_per_expert.scatter_add(0, flat, torch.ones_like(flat))[:num_experts]
    permuted = hidden_states[order // max(top_k_index.shape[1], 1)].masked_fill(~here[order].unsqueeze(1), 0)
    return permuted, row_index.masked_fill(~here, flat.numel()).int(), tokens_per_expert


def moe_unpermute_reference(
    permuted: torch.Tensor, row_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """sum over j of top_k_weights[t, j] * permuted[row_index[t * k + j]], accumulated in fp32; [T * k, H] -> [T, H].

    A row_index of T * k adds nothing, whatever the rows of permuted that nobody wrote hold.
    """
    wide = torch.promote_types(permuted.dtype, torch.float32)
    row_index = row_index.long().view(top_k_weights.shape)
    here = (row_index < permuted.shape[0]).unsqueeze(-1)
    rows = permuted[row_index.clamp(max=max(permuted.shape[0] - 1, 0))].to(wide).masked_fill(~here, 0)
    return (rows * top_k_weights.to(wide).unsqueeze(-1)).masked_fill(~here, 0).sum(1).to(permuted.dtype)


def experts_reference(
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    act: Union[str, Callable[[torch.Tensor], torch.Tensor]] = "silu",
    transposed: bool = False,
    gate_up_bias: Optional[torch.Tensor] = None,
    down_bias: Optional[torch.Tensor] = None,
) -> torch.Tensor:
    """Packed experts as transformers defines them (integrations/moe.py, grouped_mm_experts_forward).

    Args:
        hidden_states: [T, H].
        top_k_index: int [T, k]; num_experts stands for an expert of another rank and adds nothing.
        top_k_weights: [T, k].
        gate_up_proj, down_proj: [E, 2I, H] and [E, H, I]; with `transposed` [E, H, 2I] and [E, I, H].
        act: "silu", "gelu", "gelu_tanh" on the first half times the second, or a function from [M, 2I] to [M, I].
        gate_up_bias, down_bias: [E, 2I] and [E, H], or None.

    Returns:
        [T, H] in hidden_states' dtype.
    """
    permuted, row_index, counts = moe_permute_reference(hidden_states, top_k_index, gate_up_proj.shape[0])
    gate_up = grouped_matmul_reference(permuted, gate_up_proj, counts, gate_up_bias, transposed)
    hidden = _gate(act, swiglu_reference, geglu_reference)(gate_up)
    out = grouped_matmul_reference(hidden, down_proj, counts, down_bias, transposed)
    return moe_unpermute_reference(out, row_index, top_k_weights)


def _gate(act, swiglu, geglu):
    if callable(act):
        return act
    return {
        "silu": swiglu,
        "gelu": lambda gate_up: geglu(gate_up, approximate="none"),
        "gelu_tanh": lambda gate_up: geglu(gate_up, approximate="tanh"),
    }[act]


moe_permute = moe_permute_reference
moe_unpermute = moe_unpermute_reference
moe_experts = experts_reference
