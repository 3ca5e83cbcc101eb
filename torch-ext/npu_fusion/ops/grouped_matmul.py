"""One matrix product per expert over rows that are sorted by expert."""

from typing import Optional

import torch
from torch.autograd.function import once_differentiable

from ._dispatch import FLOATS, needs_grad, npu_op, record


def grouped_matmul_reference(
    x: torch.Tensor,
    weight: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    bias: Optional[torch.Tensor] = None,
    transposed: bool = False,
) -> torch.Tensor:
    """x[rows of e] @ weight[e] + bias[e] for every expert e.

    Args:
        x: [M, K], the rows of expert 0 first.
        weight: [E, N, K] as nn.Linear stores it, or [E, K, N] with `transposed`.
        tokens_per_expert: int64 [E]. Rows beyond its sum (expert parallelism) come out as zeros.
        bias: [E, N] or None.

    Returns:
        [M, N] in x's dtype.
    """
    if x.device.type == "meta" or x.shape[0] == 0:  # nothing to count
        out = x @ (weight[0] if transposed else weight[0].t())
        return out if bias is None else out + bias[0].to(x.dtype)
    counts = tokens_per_expert.tolist()
    rows = x[: sum(counts)].split(counts)
    products = [r @ (w if transposed else w.t()) for r, w in zip(rows, weight.unbind())]
    if bias is not None:
        products = [p + b for p, b in zip(products, bias.to(x.dtype).unbind())]
    products.append(x.new_zeros(x.shape[0] - sum(counts), products[0].shape[1]))
    return torch.cat(products)


def grouped_matmul(
    x: torch.Tensor,
    weight: torch.Tensor,
    tokens_per_expert: torch.Tensor,
    bias: Optional[torch.Tensor] = None,
    transposed: bool = False,
    zero_tail: bool = True,
) -> torch.Tensor:
    """`grouped_matmul_reference` in one launch, without a copy of the weights and without asking the device for counts.

    Args:
        zero_tail: the fused op leaves rows beyond the sum of `tokens_per_expert` unwritten. Zeroing them takes another
            pass over the result; pass False where there are none, or where nobody reads them.
    """
    if npu_op("npu_grouped_matmul", x, weight, tokens_per_expert, bias) is None or not _fusable(x, weight, bias):
        return grouped_matmul_reference(x, weight, tokens_per_expert, bias, transposed)
    arguments = (x, weight, tokens_per_expert.long(), bias, transposed, zero_tail)
    return record(_GroupedMatmul, *arguments) if needs_grad(x, weight, bias) else _grouped_matmul(*arguments)


def _fusable(x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor]) -> bool:
    return (
        x.dim() == 2
        and weight.dim() == 3
        and x.dtype == weight.dtype
        and x.dtype in FLOATS
        and (bias is None or bias.dtype in FLOATS)
        and x.numel() > 0
        and weight.numel() > 0
        and weight.shape[0] <= 1024
        and max(weight.shape[1:]) <= 65535
    )


def _grouped_matmul(x, weight, tokens_per_expert, bias, transposed, zero_tail):
    """The op reads a transposed view in place, but no other strides."""
    weight = weight if transposed else weight.transpose(1, 2)
    if not (weight.is_contiguous() or weight.transpose(1, 2).is_contiguous()):
        weight = weight.contiguous()
    if bias is not None:  # bf16 products take an fp32 bias
        bias = [bias.to(torch.float32 if x.dtype == torch.bfloat16 else x.dtype)]
    out = torch.ops.npu.npu_grouped_matmul(
        [x.contiguous()],
        [weight],
        bias=bias,
        group_list=tokens_per_expert,
        split_item=3,
        group_type=0,
        group_list_type=1,
    )[0]
    if zero_tail:
        tail = torch.arange(x.shape[0], device=x.device) >= tokens_per_expert.sum()
        out.masked_fill_(tail.unsqueeze(1), 0)
    return out


def _product_per_group(x, y, tokens_per_expert):
    """x[rows of e].T @ y[rows of e] for every expert e; zeros where it has no rows. [M, A], [M, B] -> [E, A, B]."""
    return torch.ops.npu.npu_grouped_matmul(
        [x.t()], [y], group_list=tokens_per_expert, split_item=3, group_type=2, group_list_type=1
    )[0]


class _GroupedMatmul(torch.autograd.Function):
    """npu_grouped_matmul has no backward, and says so only in a warning: gradients would stay None."""

    @staticmethod
    def forward(ctx, x, weight, tokens_per_expert, bias, transposed, zero_tail):
        ctx.save_for_backward(x, weight, tokens_per_expert)
        ctx.transposed, ctx.zero_tail = transposed, zero_tail
        return _grouped_matmul(x, weight, tokens_per_expert, bias, transposed, zero_tail)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        x, weight, tokens_per_expert = ctx.saved_tensors
        grad = grad.contiguous()
        need_x, need_weight, _, need_bias, _, _ = ctx.needs_input_grad
        grad_x = grad_weight = grad_bias = None
        if need_x:
            grad_x = _grouped_matmul(grad, weight, tokens_per_expert, None, not ctx.transposed, ctx.zero_tail)
        if need_weight:
            pair = (x.contiguous(), grad) if ctx.transposed else (grad, x.contiguous())
            grad_weight = _product_per_group(*pair, tokens_per_expert)
        if need_bias:
            grad_bias = _product_per_group(grad.new_ones(grad.shape[0], 1), grad, tokens_per_expert).squeeze(1)
        return grad_x, grad_weight, None, grad_bias, None, None
