"""Rotary position embedding."""

from typing import Tuple

import torch
from torch.autograd.function import once_differentiable

from ._dispatch import FLOATS, needs_grad, npu_op, record, remembered, wraps_tensors


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
    way = _way(x.shape, x.stride(), cos.shape, interleaved)
    if way is None:
        return rotary_reference(x, cos, sin, interleaved)
    if not x.dtype == cos.dtype == sin.dtype:  # the op would round the tables to x's dtype; eager promotes
        dtype = torch.promote_types(torch.promote_types(x.dtype, cos.dtype), sin.dtype)
        x, cos, sin = x.to(dtype), cos.to(dtype), sin.to(dtype)
    return rotate_as_planned((needs_grad(x), None, False, _mode(interleaved), (way,)), (x,), cos, sin)[0]


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
    """Keeps the tables only, as eager does; torch_npu's own backward would keep the tensors as well."""

    @staticmethod
    def forward(ctx, plan, cos, sin, *tensors):
        ctx.save_for_backward(cos, sin)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        return _rotate(_rotate_one, torch.ops.npu.npu_rotary_mul, plan, cos, sin, tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):
        return (None, None, None, *_rotate(_rotate_gradient, _backward, ctx.plan, *ctx.saved_tensors, grads))


def _rotate(rotate_one, op, plan, cos, sin, tensors):
    _, place, turned, mode, ways = plan
    if place is not None:
        cos, sin = cos.unsqueeze(place), sin.unsqueeze(place)
    if turned:
        tensors = _turn(tensors)
    rotated = [rotate_one(op, x, cos, sin, mode, way) for x, way in zip(tensors, ways)]
    return tuple(_turn(rotated) if turned else rotated)


def _turn(tensors):
    return [None if x is None else x.transpose(1, 2) for x in tensors]


def _mode(interleaved):
    return ("interleave",) if interleaved else ()  # "half" is the default, and costs the host something when said


def _rotate_gradient(op, grad, cos, sin, mode, way):
    if grad is None:  # of a result that nobody used
        return None
    # Where the gradient lies in memory in no legal way, the tensor's way is, at the price of a copy.
    way = _way(grad.shape, grad.stride(), cos.shape, bool(mode)) or way
    return _rotate_one(op, grad, cos, sin, mode, way)


def _backward(grad, cos, sin, *mode):
    # The second argument serves the gradients of cos and sin, which nobody asks for.
    return torch.ops.npu.npu_rotary_mul_backward(grad, grad, cos, sin, *mode)[0]


def _rotate_one(op, x, cos, sin, mode, way):
    """x brought into the shape that `way` says, rotated, and brought back."""
    if way is AS_IT_IS:
        return op(x, cos, sin, *mode)
    order, inverse, x_shape, cos_shape = way
    width = cos.shape[-1]
    part = rows = x if width == x.shape[-1] else x[..., :width]
    if order is not None:
        rows, cos, sin = rows.permute(order), cos.permute(order), sin.permute(order)
    ordered = rows.shape
    if ordered != x_shape:
        rows = rows.reshape(x_shape)
    if cos.shape != cos_shape:
        cos, sin = cos.reshape(cos_shape), sin.reshape(cos_shape)
    rows = op(rows, cos, sin, *mode)
    if ordered != x_shape:
        rows = rows.view(ordered)
    if order is not None:
        rows = rows.permute(inverse)
    return rows if part is x else torch.cat((rows, x[..., width:]), dim=-1)


AS_IT_IS = "as it is"  # the way of what is legal without any view


@remembered
def _way(shape, strides, cos_shape, interleaved):
    """How to show x and cos to npu_rotary_mul: (order, inverse, x's shape, cos's shape), or AS_IT_IS, or None if no way
    is legal; order is None where the dimensions stay as they are.

    The op wants four dimensions, contiguous, and takes few patterns of broadcasting. So the dimensions are brought
    into the order in which x lies in memory (transformers' BNSD tensors are views of BSND memory), neighbours that
    are broadcast alike are merged, and the two or three that remain are named by what cos does there. No bytes move.
    """
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
    as_it_is = (*x_dims, width) == tuple(shape) and (*cos_dims, width) == tuple(cos_shape)
    x_shape, cos_shape = (*x_dims, width), (*cos_dims, width)
    if order == sorted(order):
        return AS_IT_IS if as_it_is else (None, None, x_shape, cos_shape)
    return tuple(order), tuple(order.index(i) for i in range(last + 1)), x_shape, cos_shape


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
    return rotate_heads((q, k), cos, sin, unsqueeze_dim, interleaved)


def rotate_heads(tensors, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int, interleaved: bool = False):
    """`rotary` of each of the tensors, with cos and sin [B, S, width] unsqueezed at the heads."""
    plan = _remembered_plan(unsqueeze_dim, interleaved, *heads_facts(tensors, cos, sin))
    if plan is not None:
        return rotate_as_planned(plan, tensors, cos, sin)
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return tuple([rotary(x, cos, sin, interleaved) for x in tensors])


def heads_facts(tensors, cos: torch.Tensor, sin: torch.Tensor) -> tuple:
    """All that `plan_heads` decides by."""
    grads = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad, *[x.requires_grad for x in tensors])
    tables = (grads, cos.device, type(cos), cos.dtype, cos.shape, type(sin), sin.dtype, sin.shape)
    return (tables, *[(type(x), x.dtype, x.shape, x.stride()) for x in tensors])


def plan_heads(unsqueeze_dim, interleaved, tables, *heads):
    """How to rotate tensors that are alike together, which costs the host less than one by one: (whether gradients are
    recorded, where the tables are unsqueezed, whether dimensions 1 and 2 change places meanwhile, the op's mode, the
    `_way` of each); or None.

    transformers' BNSD tensors are views of BSND memory: turned around, they need no copy, and the tables no turning.
    """
    grads, device, kind, dtype, cos_shape, *sin = tables
    kinds, dtypes, _, _ = zip(*heads)
    alike = sin == [kind, dtype, cos_shape] and {*dtypes} == {dtype}
    if device.type in ("cpu", "meta") or not alike or dtype not in FLOATS or any(map(wraps_tensors, (kind, *kinds))):
        return None
    tables_require_grad, *recorded = grads or (False, False)
    if not hasattr(torch.ops.npu, "npu_rotary_mul") or tables_require_grad or len({*recorded}) > 1:
        return None
    ranks = len(cos_shape) + 1
    if not -ranks <= unsqueeze_dim < ranks:  # unsqueeze itself says so
        return None
    for turned in (False, True) if unsqueeze_dim == 1 else (False,):
        place = 2 if turned else unsqueeze_dim % ranks
        table = (*cos_shape[:place], 1, *cos_shape[place:])
        ways = []
        for _, _, shape, strides in heads:
            if len(shape) != ranks or (turned and ranks != 4):
                return None
            if turned:
                shape, strides = ((t[0], t[2], t[1], t[3]) for t in (shape, strides))
            ways.append(_way(shape, strides, table, interleaved))
        if None in ways:
            return None
        if all(way is AS_IT_IS or way[0] is None for way in ways):
            return recorded[0], place, turned, _mode(interleaved), ways
    return None


_remembered_plan = remembered(plan_heads)


def rotate_as_planned(plan, tensors, cos: torch.Tensor, sin: torch.Tensor) -> Tuple[torch.Tensor, ...]:
    if plan[0]:
        return record(_Rotary, plan, cos, sin, *tensors)
    return _rotate(_rotate_one, torch.ops.npu.npu_rotary_mul, plan, cos, sin, tensors)
