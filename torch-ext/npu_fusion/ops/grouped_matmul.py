"""One matrix product per expert over rows that are sorted by expert."""

from typing import Optional

import torch


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
    if x.device.type == "meta":  # no counts to read there
        return x @ (weight[0] if transposed else weight[0].t())
    counts = tokens_per_expert.tolist()
    rows = x[: sum(counts)].split(counts)
    products = [r @ (w if transposed else w.t()) for r, w in zip(rows, weight.unbind())]
    if bias is not None:
        products = [p + b for p, b in zip(products, bias.to(x.dtype).unbind())]
    products.append(x.new_zeros(x.shape[0] - sum(counts), products[0].shape[1]))
    return torch.cat(products)


grouped_matmul = grouped_matmul_reference
