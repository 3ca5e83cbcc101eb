"""Gated activations, and the two linears in front of them."""

from functools import partial
from typing import Optional

import torch
import torch.nn.functional as F

ACTIVATIONS = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "sigmoid": torch.sigmoid,
}


def swiglu_reference(gate_up: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """silu(first half) * second half along `dim`. Eager rounds twice in half precision; the fused op once."""
    gate, up = gate_up.chunk(2, dim)
    return F.silu(gate) * up


def geglu_reference(gate_up: torch.Tensor, dim: int = -1, approximate: str = "tanh") -> torch.Tensor:
    """gelu(first half) * second half along `dim`; `approximate` as in torch.nn.functional.gelu."""
    gate, up = gate_up.chunk(2, dim)
    return F.gelu(gate, approximate=approximate) * up


def gated_linear_reference(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    gate_bias: Optional[torch.Tensor] = None,
    up_bias: Optional[torch.Tensor] = None,
    activation: str = "silu",
) -> torch.Tensor:
    """act(hidden_states @ gate_weight.T + gate_bias) * (hidden_states @ up_weight.T + up_bias); [..., H] -> [..., I]."""
    gate = F.linear(hidden_states, gate_weight, gate_bias)
    return ACTIVATIONS[activation](gate) * F.linear(hidden_states, up_weight, up_bias)


def gated_activation(gate: torch.Tensor, up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """act(gate) * up where the halves are two tensors: joining them would cost more than the fused op saves."""
    return ACTIVATIONS[activation](gate) * up


swiglu = swiglu_reference
geglu = geglu_reference
gated_linear = gated_linear_reference
