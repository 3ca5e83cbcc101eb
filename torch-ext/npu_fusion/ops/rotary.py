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
        return _Rotary.apply(x, cos, sin, interleaved, plan)
    return _rotate(torch.ops.npu.npu_rotary_mul, x, cos, sin, interleaved, plan)


def _fusable(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    return (
        x.dtype in FLOATS
        and cos.dtype in FLOATS
        and sin.dtype in FLOATS
        and cos.shape == sin.shape
        and cos.dim() <= x.dim()
        and not (cos.requires_grad or sin.requires_grad)
    )


class _Rotary(torch.autograd.Function):
    """Keeps the tables only, as eager does; torch_npu's own backward would keep x as well."""

    @staticmethod
    def forward(ctx, x, cos, sin, interleaved, plan):
        ctx.save_for_backward(cos, sin)
        ctx.interleaved, ctx.plan = interleaved, plan
        return _rotate(torch.ops.npu.npu_rotary_mul, x, cos, sin, interleaved, plan)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        cos, sin = ctx.saved_tensors
        # Where the gradient lies in memory in a way that is not legal, x's way is, at the price of a copy.
        plan = _plan(grad.shape, grad.stride(), cos.shape, ctx.interleaved) or ctx.plan
        return _rotate(_backward, grad, cos, sin, ctx.interleaved, plan), None, None, None, None


def _backward(grad, cos, sin, mode):
    # The second argument serves the gradients of cos and sin, which nobody asks for.
    return torch.ops.npu.npu_rotary_mul_backward(grad, grad, cos, sin, mode)[0]


def _rotate(op, x, cos, sin, interleaved, plan):
    """x brought into the shape that `plan` says, rotated, and brought back."""
    order, inverse, x_shape, cos_shape = plan
    width = cos.shape[-1]
    part = rows = x if width == x.shape[-1] else x[..., :width]
    if order is not None:
        rows, cos, sin = rows.permute(order), cos.permute(order), sin.permute(order)
    ordered = rows.shape
    if ordered != x_shape:
        rows = rows.reshape(x_shape)
    if cos.shape != cos_shape:
        cos, sin = cos.reshape(cos_shape), sin.reshape(cos_shape)
    rows = op(rows, cos, sin, "interleave" if interleaved else "half")
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
    return (_make_plan if torch.compiler.is_compiling() else _cached_plan)(shape, strides, cos_shape, interleaved)


def _make_plan(shape, strides, cos_shape, interleaved):
    last, width = len(shape) - 1, cos_shape[-1]
    if 0 in shape or width == 0 or width % 2 or width > shape[last] or width >= 896:
        return None
    if any(c != 1 and c != s for s, c in zip(shape[:last], cos_shape)):
        return None
    order = [*range(last + 1)]
    long = [i for i in range(last) if shape[i] != 1]  # the stride of a single element says nothing
    if any(strides[i] < strides[j] for i, j in zip(long, long[1:])):
        order = [last]
        for i in range(last):  # by falling stride; torch.compile cannot sort sizes that it does not know
            place = 0
            while order[place] != last and strides[order[place]] >= strides[i]:
                place += 1
            order.insert(place, i)
    pattern, sizes = "", []  # of what remains: f where cos spans the dimension, b where it is broadcast
    for i in order[:last]:
        if shape[i] != 1:
            letter = "b" if cos_shape[i] == 1 else "f"
            if pattern.endswith(letter):
                sizes[-1] = sizes[-1] * shape[i]
            else:
                pattern, sizes = pattern + letter, [*sizes, shape[i]]
    legal = (_interleaved_layout if interleaved else _half_layout)(pattern, sizes)
    if legal is None:
        return None
    x_dims, cos_dims = legal
    x_shape, cos_shape = (*x_dims, width), (*cos_dims, width)
    if order == sorted(order):
        return None, None, x_shape, cos_shape
    return tuple(order), tuple(order.index(i) for i in range(last + 1)), x_shape, cos_shape


_cached_plan = lru_cache(maxsize=1024)(_make_plan)

LIMIT = 1000  # of what the op calls batch and heads


def _half_layout(pattern, sizes):
    """The shapes of x and cos as BNSD or BSND, for the merged dimensions from the outermost to the innermost."""
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


def _interleaved_layout(pattern, sizes):
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
    q, k = rotate_heads((q, k), cos, sin, unsqueeze_dim, interleaved)
    return q, k


def rotate_heads(tensors, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int, interleaved: bool = False):
    """`rotary` of each of the tensors, with cos and sin [B, S, width] unsqueezed at the heads."""
    # BNSD tensors that lie in memory as BSND: turned around, they need no copy and the tables no turning
    turned = unsqueeze_dim == 1
    for x in tensors:
        turned = turned and x.dim() == 4 and not x.is_contiguous() and x.stride(1) < x.stride(2)
    heads = 2 if turned else unsqueeze_dim
    cos, sin = cos.unsqueeze(heads), sin.unsqueeze(heads)
    if not turned:
        return [rotary(x, cos, sin, interleaved) for x in tensors]
    return [rotary(x.transpose(1, 2), cos, sin, interleaved).transpose(1, 2) for x in tensors]
