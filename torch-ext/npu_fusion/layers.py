"""Layers that take the place of a module's forward: stateless, they read the adopting module's own weights.

Each forward asks once what its module computes (`spec_of`) and calls the fused op for exactly that. Where the module is
declined, or an input lies outside of what was seen to agree, it calls `type(self).forward`, which still is the original.
"""

import functools
import inspect
from operator import attrgetter
from typing import Callable, Optional, Tuple

import torch
import torch.nn.functional as F
from torch import nn

from . import ops
from .layouts import SwiGLUMLPLayout  # noqa: F401  transformers looks for it beside SwiGLUMLP
from .matching import match
from .ops._dispatch import remembered
from .ops.activation import GELUS
from .ops.rotary import heads_facts, plan_heads, rotate_as_planned
from .specs import MLP, DecoderLayer, Experts, GatedNorm, Norm, Rotary, Router

SPEC = "_npu_fusion"  # where an instance keeps its spec; in __dict__, so that reading it costs a dictionary look-up


def spec_of(module: nn.Module):
    """What `module` computes: a spec or `Declined`, decided at the swap or here at the first forward."""
    spec = module.__dict__.get(SPEC)
    if spec is None:
        spec = module.__dict__[SPEC] = match(module)
    return spec


def applies(spec, kind: type, module: nn.Module) -> bool:
    return type(spec) is kind and (spec.training or not module.training)


def tensor_of(module: nn.Module, name: str) -> torch.Tensor:
    """getattr(module, name), sooner: nn.Module looks for its parameters last."""
    tensor = module._parameters.get(name)
    return getattr(module, name) if tensor is None else tensor


class RMSNorm(nn.Module):
    """[..., H] -> [..., H]; any RMSNorm over the last dimension: see `specs.Norm`."""

    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        spec = spec_of(self)
        if not applies(spec, Norm, self):
            return type(self).forward(self, hidden_states)
        weight = None if spec.weight is None else tensor_of(self, spec.weight)
        if (hidden_states.dtype, None if weight is None else weight.dtype) not in spec.dtypes:
            return type(self).forward(self, hidden_states)
        return ops.rms_norm(hidden_states, weight, spec.eps, spec.offset, spec.casting_mode)


class RMSNormZeroCentered(RMSNorm):
    """`RMSNorm` times 1 + weight (Gemma, Qwen3-Next)."""


class RMSNormGated(nn.Module):
    """([..., H], gate [..., H] or None) -> [..., H]: see `specs.GatedNorm`."""

    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor, gate: Optional[torch.Tensor] = None) -> torch.Tensor:
        spec = spec_of(self)
        known = applies(spec, GatedNorm, self) and (gate is not None or spec.gate_optional)
        if not known or (hidden_states.dtype, tensor_of(self, spec.weight).dtype) not in spec.dtypes:
            return type(self).forward(self, hidden_states, gate)
        return ops.rms_norm_gated(
            hidden_states,
            gate,
            tensor_of(self, spec.weight),
            spec.eps,
            spec.activation,
            spec.gate_first,
            spec.group_size,
            spec.casting_mode,
        )


def has_hooks(module: nn.Module):
    return module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks


def plain_linear(module: nn.Module) -> Optional[Tuple[torch.Tensor, Optional[torch.Tensor]]]:
    """Weight and bias, where they say all that calling the module would do: no LoRA, quantization, hook or wrapper."""
    if type(module) is not nn.Linear or "forward" in module.__dict__ or has_hooks(module):
        return None
    return module._parameters["weight"], module._parameters["bias"]


def gated_mlp(self: nn.Module, hidden_states: torch.Tensor) -> torch.Tensor:
    spec = spec_of(self)
    if not applies(spec, MLP, self):
        return type(self).forward(self, hidden_states)
    gate, up, down = self._modules[spec.gate], self._modules[spec.up], self._modules[spec.down]
    if spec.gate_half is None:
        plain_gate, plain_up = plain_linear(gate), plain_linear(up)
        if plain_gate and plain_up:
            (gate_weight, gate_bias), (up_weight, up_bias) = plain_gate, plain_up
            hidden = ops.gated_linear(hidden_states, gate_weight, up_weight, gate_bias, up_bias, spec.activation)
        else:
            hidden = ops.gated_activation(gate(hidden_states), up(hidden_states), spec.activation)
    elif spec.gate_half == 1 or spec.activation == "sigmoid":
        halves = up(hidden_states).chunk(2, dim=-1)
        hidden = ops.gated_activation(halves[spec.gate_half], halves[1 - spec.gate_half], spec.activation)
    elif spec.activation == "silu":
        hidden = ops.swiglu(up(hidden_states))
    else:
        hidden = ops.geglu(up(hidden_states), approximate=GELUS[spec.activation])
    plain_down = plain_linear(down)
    return F.linear(hidden, *plain_down) if plain_down else down(hidden)


class SwiGLUMLP(nn.Module):
    """[..., H] -> [..., H]: down(silu(gate(x)) * up(x)), with separate or merged gate and up."""

    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return gated_mlp(self, hidden_states)


class GeGLUMLP(nn.Module):
    """[..., H] -> [..., H]: down(gelu(gate(x)) * up(x)), erf or tanh."""

    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return gated_mlp(self, hidden_states)


def rotate(spec: Rotary, tensors: Tuple[torch.Tensor, ...], cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim):
    """The rotated tensors, or None where an input lies outside of what `spec` covers."""
    try:
        facts = heads_facts(tensors, cos, sin)
    except AttributeError:  # one of them is no tensor: some models leave k out
        return None
    results, plan = _decide_rotary(spec, unsqueeze_dim, *facts)
    if plan is not None:
        return rotate_as_planned(plan, tensors, cos, sin)
    if results is None:
        return None
    if spec.cos == "first_half":
        cos, sin = cos[..., : cos.shape[-1] // 2], sin[..., : sin.shape[-1] // 2]
    if spec.cos != "full":
        if spec.style == "interleaved":
            cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
        else:
            cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
    if spec.sign < 0:
        sin = -sin
    if spec.style == "interleaved_to_half":
        tensors = [tensor.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2) for tensor in tensors]
    interleaved = spec.style == "interleaved"
    if unsqueeze_dim is None:
        rotated = [ops.rotary(tensor, cos, sin, interleaved) for tensor in tensors]
    else:
        rotated = ops.rotate_heads(tensors, cos, sin, unsqueeze_dim, interleaved)
    return tuple([x if x.dtype == dtype else x.to(dtype) for x, dtype in zip(rotated, results)])


@remembered
def _decide_rotary(spec, unsqueeze_dim, tables, *heads):
    """(the results' dtypes, what `plan_heads` says where nothing else is to do, or None); (None, None) if not covered."""
    cos_dtype, cos_shape = tables[3:5]
    ranks, results = len(cos_shape), []
    if ranks < 2:
        return None, None
    result_dtypes = {pair[:2]: pair[2] for pair in spec.dtypes}
    width, positions = cos_shape[-1] * (2 if spec.cos == "half_width" else 1), cos_shape[-2]
    for _, dtype, shape, _ in heads:
        results.append(result_dtypes.get((dtype, cos_dtype)))
        if results[-1] is None or (len(shape), ranks) not in spec.ranks:
            return None, None
        if shape[-1] != width and spec.partial != "first":
            return None, None
        if positions != shape[-2] and positions not in shape[-3:-1]:  # a table of other positions
            return None, None
    nothing_else = spec.cos == "full" and spec.style == "half" and spec.sign > 0 and {*results} == {cos_dtype}
    if not nothing_else or unsqueeze_dim is None:
        return results, None
    return results, plan_heads(unsqueeze_dim, False, tables, *heads)


class rotary_pos_emb(nn.Module):
    """(q, k [B, N, S, D] or [B, S, N, D], cos, sin [B, S, D]) -> (q, k), rotated; named as transformers names it."""

    can_torch_compile = True

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, unsqueeze_dim: int = 1
    ) -> Tuple[torch.Tensor, torch.Tensor]:
        spec = spec_of(self)
        rotated = rotate(spec, (q, k), cos, sin, unsqueeze_dim) if type(spec) is Rotary else None
        return type(self).forward(self, q, k, cos, sin, unsqueeze_dim) if rotated is None else rotated


def rotary_function(original: Callable, spec: Rotary) -> Callable:
    """`original`, a plain function with cos and sin among its parameters, with one fused call for each of its tensors."""
    signature = inspect.signature(original)
    parameters = signature.parameters.values()
    required = sum(parameter.default is parameter.empty for parameter in parameters)
    simple = all(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)
    names = [name for name in spec.arguments if name not in ("cos", "sin")]

    @functools.wraps(original)
    def fused(*args, **kwargs):
        if simple and not kwargs and required <= len(args) <= len(parameters):  # bind's answer, sooner
            arguments = dict(zip(signature.parameters, args))
        else:
            arguments = signature.bind(*args, **kwargs).arguments
        unsqueeze_dim = arguments.get("unsqueeze_dim", spec.unsqueeze) if spec.unsqueeze_argument else spec.unsqueeze
        *tensors, cos, sin = [arguments.get(name) for name in (*names, "cos", "sin")]
        rotated = rotate(spec, tensors, cos, sin, unsqueeze_dim)
        if rotated is None:
            return original(*args, **kwargs)
        return rotated if len(rotated) > 1 else rotated[0]

    setattr(fused, SPEC, spec)
    return fused


EXPERTS_IMPLEMENTATION = "npu_fusion"  # the name under which transformers' experts interface knows `experts_forward`


def expert_activation(self: nn.Module, spec: Experts):
    """The `act` of `ops.moe_experts`: a name where one fused op does it, else a function of gate_up [M, 2I]."""
    if spec.activation in ("apply_gate", "act_fn"):
        return self._apply_gate if spec.activation == "apply_gate" else self.act_fn
    if not spec.interleaved and spec.gate_half == 0 and spec.activation != "sigmoid":
        return spec.activation

    def act(gate_up: torch.Tensor) -> torch.Tensor:
        halves = (gate_up[..., ::2], gate_up[..., 1::2]) if spec.interleaved else gate_up.chunk(2, dim=-1)
        return ops.gated_activation(halves[spec.gate_half], halves[1 - spec.gate_half], spec.activation)

    return act


def experts_forward(
    self: nn.Module, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Packed experts on [T, H] tokens: see `specs.Experts`. Also transformers' `experts_implementation="npu_fusion"`."""
    spec = spec_of(self)
    if not applies(spec, Experts, self) or hidden_states.dtype not in spec.dtypes:
        original = type(self).forward
        if getattr(getattr(self, "config", None), "_experts_implementation", None) == EXPERTS_IMPLEMENTATION:
            original = inspect.unwrap(original)  # the class's own loop: its dispatching forward would lead back here
        return original(self, hidden_states, top_k_index, top_k_weights)
    return ops.moe_experts(
        hidden_states,
        top_k_index,
        top_k_weights,
        tensor_of(self, spec.gate_up),
        tensor_of(self, spec.down),
        expert_activation(self, spec),
        spec.transposed,
        spec.gate_up_bias and tensor_of(self, spec.gate_up_bias),
        spec.down_bias and tensor_of(self, spec.down_bias),
        # transformers says when indices may stand for experts of another rank; elsewhere be ready for what the class is
        getattr(self, "_is_expert_parallel", spec.sentinel),
    )


class MoEExperts(nn.Module):
    """(hidden_states [T, H], top_k_index [T, k], top_k_weights [T, k]) -> [T, H]: see `experts_forward`."""

    can_torch_compile = True

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)


class TopKRouter(nn.Module):
    """hidden_states [T, H] -> logits [T, E], weights [T, k] and index [T, k], in the module's own order."""

    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor) -> Tuple[torch.Tensor, ...]:
        spec = spec_of(self)
        weight = attrgetter(spec.weight)(self) if applies(spec, Router, self) else None
        result = weight is not None and {d[:2]: d[2] for d in spec.dtypes}.get((hidden_states.dtype, weight.dtype))
        if not result or hidden_states.dim() != 2 or not spec.flatten:
            return type(self).forward(self, hidden_states)
        if spec.upcast:
            hidden_states, weight = hidden_states.float(), weight.float()
        logits = F.linear(hidden_states, weight, spec.bias and attrgetter(spec.bias)(self))
        dtypes = dict(zip(spec.returns, result))
        # the fused op rounds to the dtype that it is given, eager to the one that it returns
        scores = logits if logits.dtype == dtypes["weights"] else logits.float()
        if spec.score == "softmax":
            weights, index = ops.top_k_softmax(scores, spec.k, spec.renormalize, dtypes["indices"])
            weights = weights if spec.scale == 1 else weights * spec.scale
        else:
            bias = spec.correction_bias and attrgetter(spec.correction_bias)(self)
            groups, kept = spec.groups[:2] if spec.groups else (1, 1)
            weights, index = ops.group_top_k_sigmoid(
                scores.float(), bias, spec.k, groups, kept, True, spec.scale, dtypes["indices"]
            )
        outputs = {
            "logits": logits.to(dtypes.get("logits")),
            "weights": weights.to(dtypes["weights"]),
            "indices": index,
        }
        return tuple(outputs[role] for role in spec.returns)


class PreNormDecoderLayer(nn.Module):
    """hidden_states [B, S, H] -> [B, S, H]: the residual is added and normalised in one launch: see `specs.DecoderLayer`."""

    can_torch_compile = True

    def forward(self, hidden_states: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        spec = spec_of(self)
        norm = self._modules[spec.post_norm] if type(spec) is DecoderLayer else None
        norm_spec = norm is not None and spec_of(norm)
        if args or not (
            type(norm_spec) is Norm
            and norm_spec.casting_mode == "llama"
            and norm_spec.weight is not None
            and norm_spec.offset == 0
            and getattr(norm.__dict__.get("forward"), "__func__", None) is RMSNorm.forward
            and not has_hooks(norm)
        ):
            return type(self).forward(self, hidden_states, *args, **kwargs)
        arguments = {**dict(spec.arguments), **{k: v for k, v in kwargs.items() if k not in spec.ignored}}
        # one name for what each step replaces, so that nothing is kept in memory while the MLP runs
        states = self._modules[spec.input_norm](hidden_states)
        states = self._modules[spec.attention](hidden_states=states, **arguments)[0]
        states, residual = ops.add_rms_norm(states, hidden_states, tensor_of(norm, norm_spec.weight), norm_spec.eps)
        return residual + self._modules[spec.mlp](states)
