"""What the fuzzing draws: tensors of any shape, dtype, layout and value, as data that a failure prints readably."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from kernels import get_kernel

ops = get_kernel("org/npu-fusion", version=1).ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# moderate: plus what real tensors hold; extreme: products of these leave the dtype's range; nonfinite: inf and NaN
MODERATE = ("normal", "small", "zeros", "zeros_and_ones", "denormal")
EXTREME = ("large", "huge", "few_huge")
NONFINITE = ("nan", "inf")
LAYOUTS = ("contiguous", "gaps", "turned", "offset", "expanded")


@dataclass(frozen=True)
class Values:
    """A floating-point tensor: built from a seed in float64, then rounded to its dtype."""

    shape: tuple
    dtype: torch.dtype
    kind: str
    layout: str
    seed: int
    grad: bool = True

    def tensor(self) -> torch.Tensor:
        """On the CPU, contiguous."""
        generator = torch.Generator().manual_seed(self.seed)
        x = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        few = torch.rand(self.shape, generator=generator) < 0.15
        info = torch.finfo(self.dtype)
        if self.kind == "small":
            x = x * 1e-3
        elif self.kind == "zeros":
            x = x * 0  # of both signs
        elif self.kind == "zeros_and_ones":
            x = few.double()
        elif self.kind == "denormal":
            x = x.clamp(-1, 1) * info.tiny
        elif self.kind == "large":
            x = x * info.max**0.5
        elif self.kind == "huge":
            x = x.clamp(-1, 1) * info.max
        elif self.kind == "few_huge":
            x = torch.where(few, x.sign() * info.max, x)
        elif self.kind == "nan":
            x = x.masked_fill(few, float("nan"))
        elif self.kind == "inf":
            x = torch.where(few, x.sign() * float("inf"), x)
        x = x.to(self.dtype)
        return x[:1].expand(self.shape).contiguous() if self.layout == "expanded" and self.shape else x

    def on_npu(self) -> torch.Tensor:
        x = self.tensor().to("npu")
        if self.layout == "gaps":
            x = torch.stack((x, torch.full_like(x, 77)), dim=-1)[..., 0]
        elif self.layout == "turned" and x.dim() > 1:
            x = x.transpose(0, -1).contiguous().transpose(0, -1)
        elif self.layout == "offset":
            x = torch.cat((x.new_full((1,), 77), x.flatten()))[1:].view(self.shape)
        elif self.layout == "expanded" and self.shape and self.shape[0]:
            x = x[:1].expand(self.shape)
        return x


@dataclass(frozen=True)
class Index:
    """Experts of each token; `high` is the first number that does not occur."""

    shape: tuple
    high: int
    seed: int
    dtype: torch.dtype = torch.int64

    def tensor(self) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(self.high, self.shape, generator=generator, dtype=self.dtype)


@dataclass(frozen=True)
class Counts:
    """Rows of each expert."""

    values: tuple

    def tensor(self) -> torch.Tensor:
        return torch.tensor(self.values, dtype=torch.int64)


@dataclass(frozen=True)
class Op:
    name: str
    fused: Callable[..., Any]
    reference: Callable[..., Any]
    arguments: st.SearchStrategy  # of tuples that hold Values, Index, Counts and plain arguments


seeds = st.integers(0, 2**16)
sizes = st.integers(1, 6) | st.sampled_from((0, 1, 8, 16, 33))
kinds = st.sampled_from(MODERATE) | st.sampled_from(MODERATE + EXTREME + NONFINITE)


@st.composite
def dtypes(draw, like=None):
    """Three times out of four that of another tensor."""
    return like if like is not None and draw(st.integers(0, 3)) else draw(st.sampled_from(DTYPES))


@st.composite
def values(draw, shape, dtype, kind=kinds, grad=None):
    return Values(
        tuple(shape),
        dtype,
        draw(kind),
        draw(st.sampled_from(LAYOUTS)),
        draw(seeds),
        draw(st.booleans()) if grad is None else grad,
    )


@st.composite
def shapes(draw, last=sizes, min_dims=1, max_dims=4):
    return (*draw(st.lists(sizes.map(lambda n: min(n, 8)), min_size=min_dims - 1, max_size=max_dims - 1)), draw(last))


eps = st.sampled_from((1e-6, 1e-5, 0.0, 1.0))
casting_modes = st.sampled_from(("llama", "gemma"))


@st.composite
def rms_norm(draw):
    dtype, shape = draw(dtypes()), draw(shapes())
    weight = draw(st.none() | values(shape[-1:], draw(dtypes(dtype))))
    return draw(values(shape, dtype)), weight, draw(eps), draw(st.sampled_from((0, 1))), draw(casting_modes)


@st.composite
def rms_norm_gated(draw):
    dtype, group = draw(dtypes()), draw(st.none() | st.integers(1, 5))
    shape = draw(shapes(sizes if group is None else st.integers(1, 3).map(lambda n: n * group)))
    return (
        draw(values(shape, dtype)),
        draw(st.none() | values(shape, draw(dtypes(dtype)))),
        draw(values(shape[-1:], draw(dtypes(dtype)))),
        draw(eps),
        draw(st.sampled_from(("silu", "sigmoid", "gelu", "gelu_tanh"))),
        draw(st.booleans()),
        group,
        draw(casting_modes),
    )


@st.composite
def add_rms_norm(draw):
    dtype, shape = draw(dtypes()), draw(shapes())
    broadcast = tuple(1 if draw(st.integers(0, 9)) == 0 else size for size in shape[:-1]) + shape[-1:]
    residual = draw(values(shape, draw(dtypes(dtype))))
    return draw(values(broadcast, dtype)), residual, draw(values(shape[-1:], draw(dtypes(dtype)))), draw(eps)


@st.composite
def halves(draw):
    """A tensor with one dimension that is to be halved; sometimes an odd one, which eager refuses."""
    shape = list(draw(shapes()))
    dim = draw(st.integers(-len(shape), len(shape) - 1))
    if draw(st.integers(0, 4)):
        shape[dim] *= 2
    return draw(values(shape, draw(dtypes()))), dim


@st.composite
def geglu(draw):
    return (*draw(halves()), draw(st.sampled_from(("tanh", "none"))))


@st.composite
def gated_activation(draw):
    dtype, shape = draw(dtypes()), draw(shapes())
    activation = st.sampled_from(("silu", "sigmoid", "gelu", "gelu_tanh"))
    return draw(values(shape, dtype)), draw(values(shape, draw(dtypes(dtype)))), draw(activation)


@st.composite
def gated_linear(draw):
    dtype, shape, inner = draw(dtypes()), draw(shapes()), draw(sizes)
    other = draw(dtypes(dtype)) if draw(st.integers(0, 9)) == 0 else dtype
    biases = [draw(st.none() | values((inner,), dtype)) for _ in range(2)]
    weights = [draw(values((inner, shape[-1]), d)) for d in (dtype, other)]
    activation = st.sampled_from(("silu", "gelu", "gelu_tanh", "sigmoid"))
    return draw(values(shape, dtype)), *weights, *biases, draw(activation)


tables = st.sampled_from(("normal", "small", "zeros", "zeros_and_ones", "nan"))


@st.composite
def rotary(draw):
    dtype = draw(dtypes())
    shape = draw(shapes(sizes.map(lambda n: 2 * n), 2, 5))
    width = draw(st.just(shape[-1]) | st.integers(0, shape[-1]))
    leading = [1 if draw(st.booleans()) else size for size in shape[:-1]]
    leading = leading[draw(st.integers(0, len(leading))) :] if draw(st.booleans()) else leading
    table = draw(dtypes(dtype))
    grad = draw(st.integers(0, 7)) == 0
    cos, sin = (draw(values((*leading, width), table, tables, grad)) for _ in range(2))
    return draw(values(shape, dtype)), cos, sin, draw(st.booleans())


@st.composite
def apply_rotary_pos_emb(draw):
    dtype, unsqueeze = draw(dtypes()), draw(st.sampled_from((1, 2)))
    batch, sequence, width = draw(st.integers(1, 3)), draw(st.integers(1, 9)), 2 * draw(st.integers(1, 9))
    heads = draw(st.integers(1, 40)), draw(st.integers(1, 4))
    q, k = ((batch, n, sequence, width) if unsqueeze == 1 else (batch, sequence, n, width) for n in heads)
    table = draw(dtypes(dtype))
    shape = (draw(st.sampled_from((1, batch))), sequence, width)
    cos, sin = (draw(values(shape, table, tables, grad=False)) for _ in range(2))
    return draw(values(q, dtype)), draw(values(k, dtype)), cos, sin, unsqueeze, draw(st.booleans())


@st.composite
def grouped_matmul(draw):
    dtype, transposed = draw(dtypes()), draw(st.booleans())
    counts = draw(st.lists(st.integers(0, 4), min_size=1, max_size=6))
    rows = sum(counts) + draw(st.sampled_from((0, 0, 0, 3)))
    inner, outer, experts = draw(sizes), draw(sizes), len(counts)
    weight = (experts, inner, outer) if transposed else (experts, outer, inner)
    other = draw(dtypes(dtype)) if draw(st.integers(0, 9)) == 0 else dtype
    bias = draw(st.none() | values((experts, outer), draw(dtypes(dtype))))
    return draw(values((rows, inner), dtype)), draw(values(weight, other)), Counts(tuple(counts)), bias, transposed


@st.composite
def routes(draw, experts):
    """Tokens and their experts; `experts` itself stands for an expert of another rank."""
    tokens, k = draw(st.integers(0, 8)), draw(st.integers(1, 4))
    elsewhere = draw(st.booleans())
    return Index((tokens, k), experts + elsewhere, draw(seeds), draw(st.sampled_from((torch.int64, torch.int32))))


def weight_kinds(index, experts):
    """With tokens of other ranks, routing weights are finite: transformers' router sets those of foreign slots to 0."""
    return kinds if index.high == experts else st.sampled_from(MODERATE + EXTREME)


@st.composite
def routing(draw):
    experts, dtype = draw(st.integers(1, 9)), draw(dtypes())
    index = draw(routes(experts))
    weights = draw(values(index.shape, draw(dtypes(dtype)), weight_kinds(index, experts)))
    return draw(values((index.shape[0], draw(sizes)), dtype)), index, weights, experts


@st.composite
def moe_experts(draw):
    experts, dtype = draw(st.integers(1, 6)), draw(dtypes())
    index, transposed = draw(routes(experts)), draw(st.booleans())
    hidden, inner = draw(sizes.map(lambda n: max(n, 1))), draw(sizes.map(lambda n: max(n, 1)))
    gate_up, down = (experts, 2 * inner, hidden), (experts, hidden, inner)
    if transposed:
        gate_up, down = (experts, hidden, 2 * inner), (experts, inner, hidden)
    biases = [draw(st.none() | values((experts, n), dtype)) for n in (2 * inner, hidden)]
    weights = draw(values(index.shape, draw(dtypes(dtype)), weight_kinds(index, experts)))
    return (
        draw(values((index.shape[0], hidden), dtype)),
        index,
        weights,
        draw(values(gate_up, dtype)),
        draw(values(down, dtype)),
        draw(st.sampled_from(("silu", "gelu", "gelu_tanh", own_gate))),
        transposed,
        *biases,
    )


def own_gate(gate_up: torch.Tensor) -> torch.Tensor:
    return F.softplus(gate_up[..., ::2]) * gate_up[..., 1::2]


@st.composite
def top_k_softmax(draw):
    tokens, experts = draw(st.integers(0, 6)), draw(st.integers(1, 20))
    logits = draw(values((tokens, experts), draw(dtypes())))
    index_dtype = st.sampled_from((torch.int64, torch.int32))
    return logits, draw(st.integers(1, experts)), draw(st.booleans()), draw(index_dtype)


@st.composite
def group_top_k_sigmoid(draw):
    tokens, groups, size = draw(st.integers(0, 6)), draw(st.integers(1, 5)), draw(st.integers(1, 8))
    kept = draw(st.integers(1, groups))
    logits = draw(values((tokens, groups * size), draw(dtypes(torch.float32))))
    bias = draw(st.none() | values((groups * size,), draw(dtypes(torch.float32)), st.sampled_from(MODERATE), False))
    k = draw(st.integers(1, kept * size))
    return logits, bias, k, groups, kept, draw(st.booleans()), draw(st.sampled_from((1.0, 2.5)))


def there_and_back(permute, unpermute):
    """Rows that nobody wrote are never looked at."""

    def run(hidden_states, top_k_index, top_k_weights, num_experts):
        permuted, row_index, tokens_per_expert = permute(hidden_states, top_k_index, num_experts)
        return unpermute(permuted, row_index, top_k_weights), tokens_per_expert

    return run


def rotary_of_both(q, k, cos, sin, unsqueeze_dim, interleaved):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return ops.rotary_reference(q, cos, sin, interleaved), ops.rotary_reference(k, cos, sin, interleaved)


OPS = [
    Op("rms_norm", ops.rms_norm, ops.rms_norm_reference, rms_norm()),
    Op("rms_norm_gated", ops.rms_norm_gated, ops.rms_norm_gated_reference, rms_norm_gated()),
    Op("add_rms_norm", ops.add_rms_norm, ops.add_rms_norm_reference, add_rms_norm()),
    Op("swiglu", ops.swiglu, ops.swiglu_reference, halves()),
    Op("geglu", ops.geglu, ops.geglu_reference, geglu()),
    Op("gated_activation", ops.gated_activation, ops.gated_activation_reference, gated_activation()),
    Op("gated_linear", ops.gated_linear, ops.gated_linear_reference, gated_linear()),
    Op("rotary", ops.rotary, ops.rotary_reference, rotary()),
    Op("apply_rotary_pos_emb", ops.apply_rotary_pos_emb, rotary_of_both, apply_rotary_pos_emb()),
    Op("grouped_matmul", ops.grouped_matmul, ops.grouped_matmul_reference, grouped_matmul()),
    Op("routing", there_and_back(ops.moe_permute, ops.moe_unpermute),
       there_and_back(ops.moe_permute_reference, ops.moe_unpermute_reference), routing()),
    Op("moe_experts", ops.moe_experts, ops.experts_reference, moe_experts()),
]  # fmt: skip

ROUTERS = [
    Op("top_k_softmax", ops.top_k_softmax, ops.top_k_softmax_reference, top_k_softmax()),
    Op("group_top_k_sigmoid", ops.group_top_k_sigmoid, ops.group_top_k_sigmoid_reference, group_top_k_sigmoid()),
]
