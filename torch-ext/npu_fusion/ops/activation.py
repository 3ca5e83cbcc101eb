"""Gated activations, and the two linears in front of them."""

from functools import partial
from typing import Optional

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.function import once_differentiable

from ._dispatch import FLOATS, needs_grad, npu_op


def gelu(x: torch.Tensor, approximate: str = "none") -> torch.Tensor:
    """F.gelu. On an NPU npu_gelu: torch_npu's own F.gelu gives the tanh form on A2 and A3, whatever is asked for."""
    op = npu_op("npu_gelu", x)
    if op is None or x.dtype not in FLOATS or x.numel() == 0:
        return F.gelu(x, approximate=approximate)
    return op(x, approximate=approximate)


ACTIVATIONS = {
    "silu": F.silu,
    "gelu": gelu,
    "gelu_tanh": partial(gelu, approximate="tanh"),
    "sigmoid": torch.sigmoid,
}


def swiglu_reference(gate_up: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """silu(first half) * second half along `dim`. Eager rounds twice in half precision; the fused op once."""
    gate, up = gate_up.chunk(2, dim)
    return F.silu(gate) * up


def swiglu(gate_up: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """`swiglu_reference` in one launch."""
    op = npu_op("npu_swiglu", gate_up)
    if op is None or not _halves(gate_up, dim):
        return swiglu_reference(gate_up, dim)
    return op(gate_up, dim)


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


def gated_activation(gate: torch.Tensor, up: torch.Tensor, activation: str = "silu") -> torch.Tensor:
    """act(gate) * up where the halves are two tensors: joining them would cost more than the fused op saves."""
    return ACTIVATIONS[activation](gate) * up


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
    return gated_activation(gate, F.linear(hidden_states, up_weight, up_bias), activation)


def gated_linear(
    hidden_states: torch.Tensor,
    gate_weight: torch.Tensor,
    up_weight: torch.Tensor,
    gate_bias: Optional[torch.Tensor] = None,
    up_bias: Optional[torch.Tensor] = None,
    activation: str = "silu",
) -> torch.Tensor:
    """`gated_linear_reference` in three launches.

    The two products are the halves of one [2, T, I] buffer, where the fused activation splits dimension 0: nothing is
    concatenated, and nothing but the input and that buffer (and for GELU its value) is kept for the backward.
    """
    tensors = (hidden_states, gate_weight, up_weight, gate_bias, up_bias)
    op = npu_op("npu_swiglu" if activation == "silu" else "npu_geglu", *tensors)
    if op is not None and torch.is_autocast_enabled("npu"):
        dtype = torch.get_autocast_dtype("npu")
        tensors = tuple(t if t is None or t.dtype not in FLOATS else t.to(dtype) for t in tensors)
    if op is None or not _fusable(activation, *tensors):
        return gated_linear_reference(*tensors, activation)
    products = _TwoLinears.apply(*tensors) if needs_grad(*tensors) else _two_linears(*tensors)
    result = op(products, 0) if activation == "silu" else op(products, 0, int(activation == "gelu_tanh"), True)[0]
    return result.view(*hidden_states.shape[:-1], gate_weight.shape[0])


def _fusable(activation, hidden_states, gate_weight, up_weight, gate_bias, up_bias) -> bool:
    dtype = hidden_states.dtype
    if activation != "silu" and (activation not in ("gelu", "gelu_tanh") or _traced(hidden_states)):
        return False
    for bias in (gate_bias, up_bias):
        if bias is not None and not (bias.dtype == dtype and bias.shape == gate_weight.shape[:1]):
            return False
    return (
        dtype in FLOATS
        and gate_weight.dtype == dtype
        and up_weight.dtype == dtype
        and gate_weight.dim() == 2
        and gate_weight.shape == up_weight.shape
        and hidden_states.numel() > 0
        and gate_weight.numel() > 0
    )


def _two_linears(hidden_states, gate_weight, up_weight, gate_bias, up_bias):
    """[2, T, I]: both linears of the [T, H] rows."""
    rows = hidden_states.reshape(-1, hidden_states.shape[-1])
    if torch.compiler.is_compiling():  # there out= is bound to one length, and ends as a copy of the whole buffer
        return torch.stack((F.linear(rows, gate_weight, gate_bias), F.linear(rows, up_weight, up_bias)))
    products = rows.new_empty(2, rows.shape[0], gate_weight.shape[0])
    for out, weight, bias in zip(products.unbind(), (gate_weight, up_weight), (gate_bias, up_bias)):
        if bias is None:
            torch.mm(rows, weight.t(), out=out)
        else:
            torch.addmm(bias, rows, weight.t(), out=out)
    return products


class _TwoLinears(torch.autograd.Function):
    """A node of its own, so that the activation's node lets go of the products before the weights' gradients are made."""

    @staticmethod
    def forward(ctx, hidden_states, gate_weight, up_weight, gate_bias, up_bias):
        ctx.save_for_backward(hidden_states, gate_weight, up_weight)
        return _two_linears(hidden_states, gate_weight, up_weight, gate_bias, up_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx, grads):
        hidden_states, gate_weight, up_weight = ctx.saved_tensors
        grad_gate, grad_up = grads.unbind()
        need_input, need_gate, need_up, need_gate_bias, need_up_bias = ctx.needs_input_grad
        rows = hidden_states.reshape(-1, hidden_states.shape[-1])
        return (
            torch.mm(grad_gate, gate_weight).addmm_(grad_up, up_weight).view(hidden_states.shape)
            if need_input
            else None,
            grad_gate.t() @ rows if need_gate else None,
            grad_up.t() @ rows if need_up else None,
            grad_gate.sum(0) if need_gate_bias else None,
            grad_up.sum(0) if need_up_bias else None,
        )
