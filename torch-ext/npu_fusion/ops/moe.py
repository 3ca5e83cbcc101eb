"""Mixture of experts: tokens to experts and back, and the whole block of packed experts."""

from functools import partial
from typing import Callable, Optional, Tuple, Union

import torch
from torch.autograd.function import once_differentiable

from ._dispatch import FLOATS, npu_op, record
from .activation import GELUS, geglu, geglu_reference, swiglu, swiglu_reference
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


def moe_permute(
    hidden_states: torch.Tensor, top_k_index: torch.Tensor, num_experts: int, expert_parallel: bool = True
) -> Tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`moe_permute_reference` in one launch and two of a few bytes, without a host sync.

    Args:
        expert_parallel: top_k_index may hold num_experts. Pass False where it cannot, which saves a launch.
    """
    op = npu_op("npu_moe_init_routing_v2", hidden_states, top_k_index)
    if op is None or hidden_states.dtype not in FLOATS or hidden_states.numel() == 0 or top_k_index.numel() == 0:
        return moe_permute_reference(hidden_states, top_k_index, num_experts)
    return record(_Permute, hidden_states, top_k_index, num_experts, expert_parallel)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden_states, top_k_index, num_experts, expert_parallel):
        permuted, row_index, tokens_per_expert, _ = torch.ops.npu.npu_moe_init_routing_v2(
            hidden_states,
            top_k_index.int(),
            active_num=-1
            if torch.compiler.is_compiling()
            else top_k_index.numel(),  # a number binds code to its length
            # One more for what is not here. That also keeps torch_npu off aclnnMoeInitRoutingV2, which it takes for
            # exactly 128 experts and H = 2048 on CANN before 8.5, and whose counts are int32.
            expert_num=num_experts + 1,
            drop_pad_mode=0,
            expert_tokens_num_type=1,  # counts
            expert_tokens_num_flag=True,
            quant_mode=-1,
            active_expert_range=[0, num_experts],
            row_idx_type=0,  # of each slot, the row in permuted
        )
        if expert_parallel:  # an expert outside the range gives -1; what reads row_index skips what is too large
            row_index = row_index.remainder(top_k_index.numel() + 1)
        ctx.save_for_backward(row_index)
        ctx.shape = top_k_index.shape
        ctx.mark_non_differentiable(row_index, tokens_per_expert)
        ctx.set_materialize_grads(False)
        return permuted, row_index, tokens_per_expert

    @staticmethod
    @once_differentiable
    def backward(ctx, grad, *_):
        (row_index,) = ctx.saved_tensors
        num_tokens, k = ctx.shape
        op = npu_op("npu_moe_token_permute_grad_v2", grad)
        if op is not None:
            return op(grad, row_index, num_tokens, grad.dtype, k), None, None, None
        return torch.ops.npu.npu_moe_token_unpermute(grad, row_index, grad.new_ones(ctx.shape)), None, None, None


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


def moe_unpermute(permuted: torch.Tensor, row_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
    """`moe_unpermute_reference` in one launch; under torch.compile in some.

    The fused op hands its own input out again, which torch.compile takes for a fault of the op: it warns, and raises where
    the environment variable CI is set.
    """
    compiling = torch.compiler.is_compiling()
    op = None if compiling else npu_op("npu_moe_token_unpermute", permuted, row_index, top_k_weights)
    fusable = op is not None and permuted.dtype in FLOATS and top_k_weights.dtype in FLOATS
    if not fusable or permuted.numel() == 0 or top_k_weights.numel() == 0:
        return moe_unpermute_reference(permuted, row_index, top_k_weights)
    return op(permuted, row_index, top_k_weights)


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
    return moe_unpermute_reference(out, row_index, top_k_weights).to(hidden_states.dtype)


def moe_experts(
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
    gate_up_proj: torch.Tensor,
    down_proj: torch.Tensor,
    act: Union[str, Callable[[torch.Tensor], torch.Tensor]] = "silu",
    transposed: bool = False,
    gate_up_bias: Optional[torch.Tensor] = None,
    down_bias: Optional[torch.Tensor] = None,
    expert_parallel: bool = True,
) -> torch.Tensor:
    """`experts_reference` in five launches and two of a few bytes: the weights are read where they lie, there is no
    host sync, and only experts that have tokens are read.

    Args:
        act: a function has to treat rows one by one: under expert parallelism the rows at the end are unwritten memory,
            which no later step reads.
        expert_parallel: as in `moe_permute`.
    """
    out_dtype = hidden_states.dtype
    if hidden_states.device.type == "npu" and torch.is_autocast_enabled("npu"):
        dtype = torch.get_autocast_dtype("npu")
        hidden_states, gate_up_proj, down_proj = (t.to(dtype) for t in (hidden_states, gate_up_proj, down_proj))
    permuted, row_index, counts = moe_permute(hidden_states, top_k_index, gate_up_proj.shape[0], expert_parallel)
    gate_up = grouped_matmul(permuted, gate_up_proj, counts, gate_up_bias, transposed, zero_tail=False)
    hidden = _gate(act, swiglu, geglu)(gate_up)
    out = grouped_matmul(hidden, down_proj, counts, down_bias, transposed, zero_tail=False)
    return moe_unpermute(out, row_index, top_k_weights).to(out_dtype)


def _gate(act, swiglu, geglu):
    if callable(act):
        return act
    if act == "silu":
        return swiglu
    return partial(geglu, approximate=GELUS[act])
