"""What `match` says about a module or function: plain, frozen, picklable data that a layer reads in its forward.

Attribute names are those of the matched module, so `getattr(module, spec.weight)` is its tensor and
`getattr(module, spec.gate)` its submodule. `training=False` means that the module differs from the spec while
`module.training` is set (dropout, noise): the layer calls the module's own forward then. Inputs outside the envelope
that a spec states (dtypes, ranks, layouts) belong to the module's own forward too.
"""

from dataclasses import dataclass
from typing import Optional, Tuple

import torch


@dataclass(frozen=True)
class Declined:
    """The module is left alone. `reason` is for the person who reads the report: its subject is the module."""

    reason: str
    # norm | mlp | rotary | experts | router: what it nearly is; unknown: it raised; None: nothing that could be fused
    kind: Optional[str] = None


@dataclass(frozen=True)
class Norm:
    """`ops.rms_norm(x, weight, eps, offset, casting_mode)` over the last dimension; forward takes x alone."""

    weight: Optional[str]  # vector; None: not multiplied by a weight
    eps: float
    offset: int = 0  # 1: multiplied by 1 + weight
    casting_mode: str = "llama"  # as in ops.rms_norm
    # (x, weight) pairs seen to agree, output dtype included
    dtypes: Tuple[Tuple[torch.dtype, Optional[torch.dtype]], ...] = ()
    training: bool = True


@dataclass(frozen=True)
class GatedNorm:
    """`ops.rms_norm_gated(x, gate, weight, eps, activation, gate_first, group_size, casting_mode)`."""

    weight: str
    eps: float
    activation: str = "silu"  # silu | sigmoid | gelu | gelu_tanh
    gate_first: bool = False  # the gate multiplies before the norm (Mamba2), else after (Qwen3-Next)
    group_size: Optional[int] = None  # rows of this many elements are normalised; None: the whole last dimension
    gate_optional: bool = False  # gate=None gives the plain norm
    casting_mode: str = "llama"
    dtypes: Tuple[Tuple[torch.dtype, torch.dtype], ...] = ()
    training: bool = True


@dataclass(frozen=True)
class MLP:
    """`down(act(gate(x)) * up(x))`, where gate, up and down are submodules that the forward only calls.

    With one merged projection `gate == up`, and `gate_half` is the half of its output (0 or 1) that is activated.
    """

    gate: str
    up: str
    down: str
    activation: str  # silu | gelu | gelu_tanh | sigmoid
    gate_half: Optional[int] = None
    upcast: bool = False  # act(gate) * up is computed in fp32 and rounded once
    training: bool = True


@dataclass(frozen=True, eq=False)  # hashed by identity, which is quick: layers.rotate looks decisions up by it
class Rotary:
    """`ops.rotary` for each tensor of a function or module that takes cos and sin."""

    # parameter names in order, up to and including cos and sin: (q, k, cos, sin), (x, sin, cos), ...
    arguments: Tuple[str, ...]
    style: str  # half | interleaved | interleaved_to_half (pairs come in interleaved and leave as two halves)
    cos: str  # full | first_half (only its first half is read) | half_width (has head_dim / 2 columns)
    sign: int = 1  # -1: rotates the other way, as if sin were negated
    # where x is wider than cos, its "first" or "last" columns are rotated; None: it must not be
    partial: Optional[str] = None
    unsqueeze: Optional[int] = None  # cos and sin are unsqueezed there by default; None: broadcast as they come
    unsqueeze_argument: bool = False  # a parameter unsqueeze_dim says otherwise
    # parameters that do not change the result (position_ids); others must be left at their default
    ignored: Tuple[str, ...] = ()
    dtypes: Tuple[Tuple[torch.dtype, torch.dtype, torch.dtype], ...] = ()  # (x, cos, result) dtypes seen to agree
    upcast: bool = False  # half precision is computed in fp32 and rounded once
    ranks: Tuple[Tuple[int, int], ...] = ()  # ranks of (x, cos) seen to agree; cos has as many positions as x


@dataclass(frozen=True)
class Experts:
    """Packed experts: forward(hidden_states [T, H], top_k_index [T, k], top_k_weights [T, k]) -> [T, H].

    `activation` names the gate: silu | gelu | gelu_tanh | sigmoid for `act(gate) * up`; "apply_gate" for the module's
    own `_apply_gate(gate_up)`; "act_fn" for ungated experts, `act_fn(up)`.
    """

    gate_up: str  # [E, 2I, H], or [E, H, 2I] where transposed
    down: str  # [E, H, I], or [E, I, H]
    activation: str
    gate_up_bias: Optional[str] = None  # [E, 2I]
    down_bias: Optional[str] = None  # [E, H]
    transposed: bool = False
    interleaved: bool = False  # gate and up alternate in gate_up instead of being its halves
    gate_half: int = 0
    sentinel: bool = False  # index == num_experts is skipped (tokens of other ranks)
    dtypes: Tuple[torch.dtype, ...] = ()  # of hidden states and weights, seen to agree
    training: bool = True


@dataclass(frozen=True)
class Router:
    """Scores of `linear(x, weight)`, the top k of them, and their weights. Inference only: no gradient is compared."""

    weight: str  # dotted name of the [E, H] matrix
    k: int
    score: str  # softmax | sigmoid of all logits | softmax_topk | sigmoid_topk of the k chosen ones
    renormalize: bool = False  # weights are divided by their sum
    scale: float = 1.0
    bias: Optional[str] = None  # dotted name, added to the logits
    correction_bias: Optional[str] = None  # dotted name or "argument NAME", added to the scores for the choice only
    groups: Optional[Tuple[int, int, str, float]] = None  # (groups, groups kept, "top2sum" | "max", fill of the others)
    returns: Tuple[str, ...] = ()  # role of each returned tensor: logits | probs | weights | indices
    upcast: bool = False  # the linear is computed in fp32
    # (x, weight, results) seen to agree
    dtypes: Tuple[Tuple[torch.dtype, torch.dtype, Tuple[torch.dtype, ...]], ...] = ()
    flatten: bool = True  # takes [T, H] too; False: only [B, S, H]
    training: bool = True


@dataclass(frozen=True)
class DecoderLayer:
    """x + attention(norm(x)), and to that its own mlp(norm(...)): the four are submodules that the forward only calls."""

    input_norm: str
    attention: str  # called with hidden_states=, and returns a tuple of which the first is used
    post_norm: str
    mlp: str
    # parameters that are handed on to the attention, with their defaults
    arguments: Tuple[Tuple[str, object], ...] = ()
    ignored: Tuple[str, ...] = ()  # parameters that are not
