"""Gated activations, and the two linears in front of them."""

from functools import partial
from typing import Optional

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from ._dispatch import FLOATS, in_order, needs_grad, npu_op, record


def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """F.gelu. On an NPU npu_gelu: torch_npu's own F.gelu gives the tanh form on A2 and A3, whatever is asked for."""
    op = npu_op("npu_gelu", x)
    if op is None or x.dtype not in FLOATS or x.numel() == 0:
        return F.gelu(x, approximate=approximate)
    return op(in_order(x), approximate=approximate)


ACTIVATIONS = {
    "silu": F.silu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "sigmoid": torch.sigmoid,
}


GELUS = {"gelu": "none", "gelu_tanh": "tanh"}  # what F.gelu and npu_geglu are told to approximate by


def swiglu_reference(gate_up: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """silu(first half) * second half along `dim`. Eager rounds twice in half precision; the fused op once."""
    gate, up = gate_up.chunk(2, dim)
    return F.silu(gate) * up


def swiglu(gate_up: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """`swiglu_reference` in one launch."""
    op = npu_op("npu_swiglu", gate_up)
    if op is None or not _halves(gate_up, dim):
        return swiglu_reference(gate_up, dim)
    return op(in_order(gate_up), dim)


def geglu_reference(gate_up: torch.Tensor, dim: int = -1, approximate: str = "tanh") -> torch.Tensor:
    """gelu(first half) * second half along `dim`; `approximate` as in torch.nn.functional.gelu."""
    gate, up = gate_up.chunk(2, dim)
    return gelu(gate, approximate) * up


def geglu(gate_up: torch.Tensor, dim: int = -1, approximate: str = "tanh") -> torch.Tensor:
    """`geglu_reference` in one launch."""
    op = npu_op("npu_geglu", gate_up)
    if op is None or approximate not in ("tanh", "none") or not _halves(gate_up, dim) or _traced(gate_up):
        return geglu_reference(gate_up, dim, approximate)
    return op(gate_up, dim, int(approximate == "tanh"), True)[0]


def _halves(gate_up: torch.Tensor, dim: int) -> bool:
    return gate_up.dtype in FLOATS and gate_up.numel() > 0 and gate_up.shape[dim] % 2 == 0


def _traced(x: torch.Tensor) -> bool:
    """Under torch.compile or fake tensors npu_geglu has no backward: its meta function returns a tuple of two."""
    return torch.compiler.is_compiling() or isinstance(x, FakeTensor)


def gated_activation_reference(gate: torch.Tensor, up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """act(gate) * up."""
    return ACTIVATIONS[activation](gate) * up


def gated_activation(gate: torch.Tensor, up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """act(gate) * up where the halves are two tensors, as LoRA leaves them. Where gradients are recorded, the fused op does it.

    A copy joins the halves for it, which saves two of five launches, moves no more and keeps less (SiLU: 2 tensors, not 3).
    Without gradients, joining would move 7 tensors where eager moves 5.
    """
    fusable = needs_grad(gate, up) and _known(activation, gate) and gate.shape == up.shape and gate.dtype == up.dtype
    if not fusable or npu_op("npu_swiglu" if activation == "silu" else "npu_geglu", gate, up) is None:
        return gated_activation_reference(gate, up, activation)
    gate_up = torch.stack((gate, up))
    return (swiglu(gate_up, 0) if activation == "silu" else geglu(gate_up, 0, GELUS[activation])).squeeze(0)


def _known(activation: str, x: torch.Tensor) -> bool:
    return activation == "silu" or (activation in GELUS and not _traced(x))


def gated_linear_reference(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    gate_bias: Optional[torch.Tensor] = None,
    up_bias: Optional[torch.Tensor] = None,
    activation: str = "silu",
) -> torch.Tensor:
    """act(x @ gate_weight.T + gate_bias) * (x @ up_weight.T + up_bias); [..., H] -> [..., I]."""
    gate = F.linear(hidden_states, gate_weight, gate_bias)
    return gated_activation_reference(gate, F.linear(hidden_states, up_weight, up_bias), activation)


def gated_linear(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    gate_bias: Optional[torch.Tensor] = None,
    up_bias: Optional[torch.Tensor] = None,
    activation: str = "silu",
) -> torch.Tensor:
    """`gated_linear_reference` in three launches.

    The two products are the halves of one buffer, where the fused activation splits dimension 0: nothing is
    concatenated, and nothing but the input and that buffer (and for GELU its value) is kept for the backward.
    """
    tensors = (hidden_states, gate_weight, up_weight)
    if gate_bias is not None or up_bias is not None:
        tensors = (*tensors, gate_bias, up_bias)
    op = npu_op("npu_swiglu" if activation == "silu" else "npu_geglu", *tensors)
    if op is not None and torch.is_autocast_enabled("npu"):
        dtype = torch.get_autocast_dtype("npu")
        tensors = [t if t is None or t.dtype not in FLOATS else t.to(dtype) for t in tensors]
    if op is None or not _known(activation, hidden_states) or not _fusable(*tensors):
        return gated_linear_reference(*tensors, activation=activation)
    products = record(_TwoLinears, *tensors) if needs_grad(*tensors) else _two_linears(*tensors)
    hidden = op(products, 0) if activation == "silu" else op(products, 0, int(activation == "gelu_tanh"), True)[0]
    return hidden.squeeze(0) if torch.compiler.is_compiling() else hidden


def _fusable(hidden_states, gate_weight, up_weight, *biases) -> bool:
    dtype, shape = hidden_states.dtype, gate_weight.shape
    for bias in biases:
        if bias is not None and not (bias.dtype == dtype and bias.shape == shape[:1]):
            return False
    return (
        dtype in FLOATS
        and dtype == gate_weight.dtype == up_weight.dtype
        and len(shape) == 2
        and shape == up_weight.shape
        and 0 not in shape
        and hidden_states.dim() > 1
        and hidden_states.numel() > 0
    )


def _two_linears(hidden_states, gate_weight, up_weight, gate_bias=None, up_bias=None):
    """[2B, ..., I] of [B, ..., H]: both products, one behind the other; [2, B, ..., I] under torch.compile.

    There, out= would be bound to one length and end as a copy, and npu_swiglu's meta function does not see that half of
    an unknown 2B is B.
    """
    if torch.compiler.is_compiling():
        return torch.stack(
            (F.linear(hidden_states, gate_weight, gate_bias), F.linear(hidden_states, up_weight, up_bias))
        )
    (batch, *rest, in_features), out_features = hidden_states.shape, gate_weight.shape[0]
    products = hidden_states.new_empty(2 * batch, *rest, out_features)
    gate, up = products.view(2, -1, out_features).unbind()
    rows = hidden_states.reshape(-1, in_features)  # of two dimensions, linear adds a bias in the same launch
    F.linear(rows, gate_weight, gate_bias, out=gate)
    F.linear(rows, up_weight, up_bias, out=up)
    return products


class _TwoLinears(torch.autograd.Function):
    """A node of its own, so that the activation's node lets go of the products before the weights' gradients are made."""

    @staticmethod
    def forward(ctx, hidden_states, gate_weight, up_weight, *biases):
        ctx.save_for_backward(hidden_states, gate_weight, up_weight)
        return _two_linears(hidden_states, gate_weight, up_weight, *biases)

    @staticmethod
    @once_differentiable
    def backward(ctx, grads):
        hidden_states, gate_weight, up_weight = ctx.saved_tensors
        need_input, need_gate, need_up, *need_biases = ctx.needs_input_grad
        grad_gate, grad_up = grads.reshape(2, -1, gate_weight.shape[0]).unbind()
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        return (
            torch.mm(grad_gate, gate_weight).addmm_(grad_up, up_weight).view(hidden_states.shape)
            if need_input
            else None,
            grad_gate.t() @ rows if need_gate else None,
            grad_up.t() @ rows if need_up else None,
            *[grad.sum(0) if need else None for grad, need in zip((grad_gate, grad_up), need_biases)],
        )
