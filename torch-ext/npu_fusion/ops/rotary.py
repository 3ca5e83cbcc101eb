"""Rotary position embedding."""

from typing import Tuple

import torch


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


rotary = rotary_reference


def apply_rotary_pos_emb(
    q: torch.Tensor,
    k: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    unsqueeze_dim: int = 1,
    interleaved: bool = False,
) -> Tuple[torch.Tensor, torch.Tensor]:
    """`rotary` of q and k, with cos and sin [B, S, width] unsqueezed at the heads (1: BNSD, 2: BSND)."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return rotary(q, cos, sin, interleaved), rotary(k, cos, sin, interleaved)
