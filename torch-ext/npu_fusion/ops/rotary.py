"""Rotary position embedding."""

from functools import lru_cache
from typing import Tuple

import torch
from torch.autograd.function import once_differentiable

from ._dispatch import FLOATS, needs_grad, npu_op


def rotary_reference(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """Rotates the first cos.shape[-1] features of x; the rest passes through.

    The pair of feature i is i + width / 2 (GPT-NeoX, transformers), or with `interleaved` its neighbour (GPT-J).

    Args:
        x: [..., D], any layout.
        cos, sin: [..., width], broadcastable to x in front of the last dimension; every pair's angle stands twice
            (halves repeated, or with `interleaved` neighbours repeated).
        interleaved: which features make a pair.

    Returns:
        x's shape, in the dtype that x, cos and sin promote to.
    """
    width = cos.shape[-1]
    rotated = x[..., :width]
    if interleaved:
        turned = torch.stack((-rotated[..., 1::2], rotated[..., 0::2]), dim=-1).flatten(-2)
    else:
        turned = torch.cat((-rotated[..., width // 2 :], rotated[..., : width // 2]), dim=-1)
    rotated = rotated * cos + turned * sin
    return rotated if width == x.shape[-1] else torch.cat((rotated, x[..., width:]), dim=-1)


def rotary(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool = False) -> torch.Tensor:
    """`rotary_reference` in one launch; three where a part passes through; a cast more for each dtype that differs."""
    if npu_op("npu_rotary_mul", x, cos, sin) is None or not _fusable(x, cos, sin):
        return rotary_reference(x, cos, sin, interleaved)
    if cos.dim() < x.dim():
        shape = (1,) * (x.dim() - cos.dim()) + cos.shape
        cos, sin = cos.view(shape), sin.view(shape)
    plan = _plan(x.shape, x.stride(), cos.shape, interleaved)
    if plan is None:
        return rotary_reference(x, cos, sin, interleaved)
    if not x.dtype == cos.dtype == sin.dtype:  # the op would round the tables to x's dtype; eager promotes
        dtype = torch.promote_types(torch.promote_types(x.dtype, cos.dtype), sin.dtype)
        x, cos, sin = x.to(dtype), cos.to(dtype), sin.to(dtype)
    if needs_grad(x):
        return _Rotary.apply(x, cos, sin, interleaved)
    return _rotate(x, cos, sin, interleaved, plan)


def _fusable(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    width = cos.shape[-1]
    return (
        x.dtype in FLOATS
        and cos.dtype in FLOATS
        and sin.dtype in FLOATS
        and x.numel() > 0
        and cos.shape == sin.shape
        and cos.dim() <= x.dim()
        and width % 2 == 0
        and 0 < width <= x.shape[-1]
        and width < 896
        and not needs_grad(cos, sin)
    )


class _Rotary(torch.autograd.Function):
    """Keeps the tables only, as eager does; torch_npu's own backward would keep x as well."""

    @staticmethod
    def forward(ctx, x, cos, sin, interleaved):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.strides = interleaved, x.stride()
        return _rotate(x, cos, sin, interleaved, _plan(x.shape, x.stride(), cos.shape, interleaved))

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        plan = _plan(grad.shape, grad.stride(), cos.shape, ctx.interleaved)
        if plan is None:  # legal in x's memory order, at the price of a copy
            plan = _plan(grad.shape, ctx.strides, cos.shape, ctx.interleaved)
        return _rotate(grad, cos, sin, ctx.interleaved, plan, backward=True), None, None, None


def _rotate(x, cos, sin, interleaved, plan, backward=False):
    """x brought into the shape that `plan` says, rotated by the fused op, and brought back."""
    order, inverse, x_shape, cos_shape = plan
    width, mode = cos.shape[-1], "interleave" if interleaved else "half"
    part = x if width == x.shape[-1] else x[..., :width]
    rows = part
    if order is not None:
        rows = rows.permute(order)
        cos, sin = cos.permute(order), sin.permute(order)
    ordered = rows.shape
    if ordered != x_shape:
        rows = rows.reshape(x_shape)
    if cos.shape != cos_shape:
        cos, sin = cos.reshape(cos_shape), sin.reshape(cos_shape)
    if backward:  # the second argument serves the gradients of cos and sin, which nobody asks for
        rows = torch.ops.npu.npu_rotary_mul_backward(rows, rows, cos, sin, mode)[0]
    else:
        rows = torch.ops.npu.npu_rotary_mul(rows, cos, sin, mode)
    if ordered != x_shape:
        rows = rows.view(ordered)
    if order is not None:
        rows = rows.permute(inverse)
    return rows if part is x else torch.cat((rows, x[..., width:]), dim=-1)


def _plan(shape, strides, cos_shape, interleaved):
    """How to show x and cos to npu_rotary_mul: (order, inverse, x's shape, cos's shape), or None if no way is legal;
    order is None where the dimensions stay as they are.

    The op wants four dimensions, contiguous, and takes few patterns of broadcasting. So the dimensions are brought
    into the order in which x lies in memory (transformers' BNSD tensors are views of BSND memory), neighbours that
    are broadcast alike are merged, and the two or three that remain are named by what cos does there. No bytes move.
    """
    make = _make_plan if torch.compiler.is_compiling() else _cached_plan
    return make(tuple(shape), tuple(strides), tuple(cos_shape), interleaved)


def _make_plan(shape, strides, cos_shape, interleaved):
    last = len(shape) - 1
    if any(c != 1 and c != s for s, c in zip(shape[:last], cos_shape)):
        return None
    order = [*sorted(range(last), key=lambda i: -strides[i]), last]
    groups = []  # [size, does cos span it]
    for size, spanned in [(shape[i], cos_shape[i] != 1) for i in order[:last] if shape[i] != 1]:
        if groups and groups[-1][1] == spanned:
            groups[-1][0] *= size
        else:
            groups.append([size, spanned])
    legal = (_interleaved_layout if interleaved else _half_layout)(
        "".join("f" if spanned else "b" for _, spanned in groups), [size for size, _ in groups], cos_shape[last]
    )
    if legal is None:
        return None
    x_dims, cos_dims = legal
    x_shape, cos_shape = (*x_dims, cos_shape[last]), (*cos_dims, cos_shape[last])
    if order == sorted(order):
        return None, None, x_shape, cos_shape
    return tuple(order), tuple(sorted(range(last + 1), key=order.__getitem__)), x_shape, cos_shape


_cached_plan = lru_cache(maxsize=1024)(_make_plan)

LIMIT = 1000  # of what the op calls batch and heads


def _half_layout(pattern, sizes, width):
    """f: cos spans the dimension, b: it is broadcast there. Outermost first."""
    if pattern in ("", "f"):
        rows = sizes[0] if sizes else 1
        return (1, 1, rows), (1, 1, rows)
    if pattern == "b" and sizes[0] < LIMIT:
        return (1, sizes[0], 1), (1, 1, 1)
    if pattern == "bf" and sizes[0] < LIMIT:
        # One merged batch of heads: with batch and heads apart, the op refuses short sequences (error 561002).
        return (1, *sizes), (1, 1, sizes[1])
    if pattern == "fb" and sizes[1] < LIMIT:
        return (1, *sizes), (1, sizes[0], 1)
    if pattern == "bfb" and max(sizes[0], sizes[2]) < LIMIT:
        return tuple(sizes), (1, sizes[1], 1)
    if pattern == "fbf" and max(sizes[0], sizes[1]) < LIMIT:
        return tuple(sizes), (sizes[0], 1, sizes[2])
    return None


def _interleaved_layout(pattern, sizes, width):
    """The op takes no batch of tables here; a merged batch and sequence is one long sequence to it."""
    if pattern in ("", "f"):
        rows = sizes[0] if sizes else 1
        return (1, rows, 1), (1, rows, 1)
    if pattern == "b" and sizes[0] < LIMIT:
        return (1, sizes[0], 1), (1, 1, 1)
    if pattern == "bf" and sizes[0] < LIMIT:
        return (1, *sizes), (1, 1, sizes[1])
    if pattern == "fb" and sizes[1] < LIMIT:
        return (1, *sizes), (1, sizes[0], 1)
    if pattern == "bfb" and sizes[0] * sizes[2] < LIMIT:
        return tuple(sizes), (1, sizes[1], 1)
    return None


def apply_rotary_pos_emb(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: int = 1,
    interleaved: bool = False,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """`rotary` of q and k, with cos and sin [B, S, width] unsqueezed at the heads (1: BNSD, 2: BSND).

    Two launches. npu_apply_rotary_pos_emb would make one, but writes into the q and k that it is given, and whether
    the caller still needs those cannot be seen from here; copying them first costs what it saves.
    """
    if unsqueeze_dim == 1 and q.dim() == k.dim() == 4 and q.stride(1) < q.stride(2):
        # BNSD tensors that lie in memory as BSND: turned around, the tables need no turning
        q, k = apply_rotary_pos_emb(q.transpose(1, 2), k.transpose(1, 2), cos, sin, 2, interleaved)
        return q.transpose(1, 2), k.transpose(1, 2)
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return rotary(q, cos, sin, interleaved), rotary(k, cos, sin, interleaved)
