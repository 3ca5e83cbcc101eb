"""What is measured: layers of published models at their published shapes, and the least traffic that each needs.

Nothing here imports torch, so that tables can be made and limits checked without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

ELEMENT = 2  # bytes of a bfloat16
MODES = ("forward", "forward+backward")
TOKENS = (1, 16, 8192)
PARTS = ("RMSNorm", "MLP", "rotary", "MoE block", "decoder layer")


@dataclass(frozen=True)
class Shape:
    """One decoder layer of a published model. `experts == 0`: a dense MLP. `q_lora > 0`: DeepSeek's latent attention."""

    model: str
    modeling: str  # the package in transformers.models
    causal_lm: str
    hidden: int
    intermediate: int  # of one expert, where there are experts
    heads: int
    kv_heads: int
    head_dim: int  # of the part without position in latent attention
    qk_norm: bool = False
    qkv_bias: bool = False
    experts: int = 0
    top_k: int = 0
    shared: int = 0  # intermediate size of the shared experts
    q_lora: int = 0
    kv_lora: int = 0
    rope_dim: int = 0
    config: dict[str, Any] = field(default_factory=dict)

    @property
    def parameters(self) -> int:
        mlp = 3 * self.hidden * (max(self.experts, 1) * self.intermediate + self.shared)
        if not self.q_lora:
            return mlp + self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        query = (self.hidden + self.heads * (self.head_dim + self.rope_dim)) * self.q_lora
        key_value = self.hidden * (self.kv_lora + self.rope_dim) + self.kv_lora * self.heads * 2 * self.head_dim
        return mlp + query + key_value + self.heads * self.head_dim * self.hidden


QWEN3_8B = Shape("Qwen3-8B", "qwen3", "Qwen3ForCausalLM", 4096, 12288, 32, 8, 128, qk_norm=True)
QWEN25_7B = Shape("Qwen2.5-7B", "qwen2", "Qwen2ForCausalLM", 3584, 18944, 28, 4, 128, qkv_bias=True)
QWEN3_30B_A3B = Shape(
    "Qwen3-30B-A3B",
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    2048,
    768,
    32,
    4,
    128,
    qk_norm=True,
    experts=128,
    top_k=8,
    config={"norm_topk_prob": True},
)
MIXTRAL_8X7B = Shape("Mixtral-8x7B", "mixtral", "MixtralForCausalLM", 4096, 14336, 32, 8, 128, experts=8, top_k=2)
DEEPSEEK_V3 = Shape(
    "DeepSeek-V3",
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    7168,
    2048,
    128,
    128,
    128,
    experts=256,
    top_k=8,
    shared=2048,
    q_lora=1536,
    kv_lora=512,
    rope_dim=64,
    config={"first_k_dense_replace": 0},
)
LAYERS = (QWEN3_8B, QWEN3_30B_A3B, QWEN25_7B, MIXTRAL_8X7B, DEEPSEEK_V3)


@dataclass(frozen=True)
class Case:
    """One part of one model at one number of tokens, after scaling to the memory there is."""

    part: str
    shape: Shape
    tokens: int
    scale: int = 1

    @property
    def name(self) -> str:
        sizes = {
            "RMSNorm": f"H={self.shape.hidden}",
            "MLP": f"H={self.shape.hidden} I={self.shape.intermediate}",
            "rotary": f"{self.shape.heads}/{self.shape.kv_heads} heads of {self.shape.head_dim}",
            "MoE block": f"H={self.shape.hidden} I={self.shape.intermediate} E={self.shape.experts} k={self.shape.top_k}",
            "decoder layer": self.shape.model + (f" E={self.shape.experts}" if self.scale > 1 else ""),
        }
        return f"{self.part} T={self.tokens} {sizes[self.part]}"


def scaled(case: Case, budget: int) -> Case:
    """The case, with its experts and its tokens halved together until a training step fits into `budget` bytes.

    Halved together, so that an expert sees as many tokens as in the real shape and weights and activations keep their
    proportion. At least 2 * top_k experts are kept, and small token counts (decoding) stay what they are.
    """
    if case.part not in ("MoE block", "decoder layer"):
        return case
    shape, tokens, scale = case.shape, max(TOKENS), 1
    while shape.experts >= 4 * shape.top_k and _training_bytes(shape, tokens) > budget:
        scale *= 2
        shape, tokens = replace(shape, experts=shape.experts // 2), tokens // 2
    return Case(case.part, shape, min(case.tokens, tokens), scale)


def _training_bytes(shape: Shape, tokens: int) -> int:
    """A rough bound: parameters, their gradients, one new gradient and a copy; activations and as many gradients."""
    rows = tokens * max(shape.top_k, 1)
    attention = 8 * tokens * shape.heads * (shape.head_dim + shape.rope_dim)
    return ELEMENT * (4 * shape.parameters + attention + 6 * rows * shape.hidden + 8 * rows * shape.intermediate)


def cases(tokens: tuple[int, ...] = TOKENS, budget: int = 8 << 30) -> list[Case]:
    """Every case of the table, scaled to `budget` bytes of device memory."""
    parts = [("RMSNorm", QWEN3_8B), ("MLP", QWEN3_8B), ("rotary", QWEN3_8B), ("MoE block", QWEN3_30B_A3B)]
    parts += [("decoder layer", shape) for shape in LAYERS]
    return [scaled(Case(part, shape, count), budget) for part, shape in parts for count in tokens]


class Limit:
    """Bytes of the shortest chain of kernels for a case: each kernel reads every input once and writes every output once.

    A chain is what torch_npu's fused kernels allow at best: weights that read the same input are merged (gate and up;
    query, key and value), a residual is added by the norm that follows it, and no activation is read twice in between.
    Sizes are in elements; `forward` and `backward` add up in bytes. In the backward, a gradient of every parameter and of
    the input is written and then added to the `.grad` that is there, as autograd does.
    """

    def __init__(self) -> None:
        self.forward = 0
        self.backward = 0

    def _kernels(self, forward: int, backward: int) -> None:
        self.forward += forward * ELEMENT
        self.backward += backward * ELEMENT

    def _accumulate(self, elements: int) -> None:
        self._kernels(0, 3 * elements)

    def norm(self, rows: int, width: int, residual: bool = False) -> None:
        x = rows * width
        self._kernels((4 if residual else 2) * x + width, 3 * x + 2 * width)
        if residual:
            self._kernels(0, 3 * x)  # the two gradients of the sum meet
        self._accumulate(width)

    def linear(self, rows: int, inputs: int, outputs: int, bias: bool = False) -> None:
        x, weight, y = rows * inputs, inputs * outputs, rows * outputs
        self._kernels(x + weight + y, 2 * (x + weight + y))
        self._accumulate(weight)
        if bias:
            self._kernels(outputs, y + outputs)
            self._accumulate(outputs)

    def grouped_linear(self, rows: int, inputs: int, outputs: int, hit: int, experts: int) -> None:
        """As linear, with the weights of `hit` experts read; the gradient is written for all of them."""
        x, read, weight, y = rows * inputs, hit * inputs * outputs, experts * inputs * outputs, rows * outputs
        self._kernels(x + read + y, 2 * (x + y) + read + weight)
        self._accumulate(weight)

    def swiglu(self, rows: int, width: int) -> None:
        self._kernels(3 * rows * width, 5 * rows * width)

    def rotary(self, tokens: int, elements: int, width: int) -> None:
        self._kernels(2 * elements + 2 * tokens * width, 2 * elements + 2 * tokens * width)

    def attention(self, query: int, key: int, value: int, output: int) -> None:
        self._kernels(query + key + value + output, 2 * (query + key + value + output))

    def router(self, tokens: int, hidden: int, experts: int, top_k: int) -> None:
        self.linear(tokens, hidden, experts)
        chosen = 3 * tokens * top_k  # a weight in bfloat16 and an index in int32
        self._kernels(tokens * experts + chosen, tokens * experts + chosen)

    def permute(self, tokens: int, hidden: int, top_k: int) -> None:
        moved = tokens * hidden * (1 + top_k) + 2 * tokens * top_k
        self._kernels(moved, moved)

    def unpermute(self, tokens: int, hidden: int, top_k: int) -> None:
        moved = tokens * hidden * (1 + top_k) + 3 * tokens * top_k
        again = tokens * hidden * top_k + tokens * top_k  # its input and the weights, for the weights' gradient
        self._kernels(moved, moved + again)

    def add(self, elements: int) -> None:
        """A sum of two gradients."""
        self._kernels(0, 3 * elements)

    def input_gradient(self, elements: int) -> None:
        self._accumulate(elements)


def limit(case: Case, mode: str, hit: int | None = None) -> int:
    """The least bytes for a case.

    Args:
        hit: How many experts the tokens chose; all of them if None.
    """
    chain, shape, tokens = Limit(), case.shape, case.tokens
    if case.part == "RMSNorm":
        chain.norm(tokens, shape.hidden)
        chain.input_gradient(tokens * shape.hidden)
    elif case.part == "MLP":
        _mlp(chain, tokens, shape.hidden, shape.intermediate)
        chain.input_gradient(tokens * shape.hidden)
    elif case.part == "rotary":
        elements = tokens * (shape.heads + shape.kv_heads) * shape.head_dim
        chain.rotary(tokens, elements, shape.head_dim)
        chain.input_gradient(elements)
    elif case.part == "MoE block":
        _moe(chain, shape, tokens, hit)
        chain.input_gradient(tokens * shape.hidden)
    else:
        _layer(chain, shape, tokens, hit)
    return chain.forward + (chain.backward if mode == "forward+backward" else 0)


def _mlp(chain: Limit, tokens: int, hidden: int, intermediate: int) -> None:
    chain.linear(tokens, hidden, 2 * intermediate)
    chain.swiglu(tokens, intermediate)
    chain.linear(tokens, intermediate, hidden)


def _moe(chain: Limit, shape: Shape, tokens: int, hit: int | None) -> None:
    hit = shape.experts if hit is None else hit
    rows = tokens * shape.top_k
    chain.router(tokens, shape.hidden, shape.experts, shape.top_k)
    chain.permute(tokens, shape.hidden, shape.top_k)
    chain.grouped_linear(rows, shape.hidden, 2 * shape.intermediate, hit, shape.experts)
    chain.swiglu(rows, shape.intermediate)
    chain.grouped_linear(rows, shape.intermediate, shape.hidden, hit, shape.experts)
    chain.unpermute(tokens, shape.hidden, shape.top_k)
    chain.add(tokens * shape.hidden)  # of the router's and the experts' gradient
    if shape.shared:
        _mlp(chain, tokens, shape.hidden, shape.shared)
        chain._kernels(3 * tokens * shape.hidden, 0)
        chain.add(tokens * shape.hidden)


def _layer(chain: Limit, shape: Shape, tokens: int, hit: int | None) -> None:
    hidden, dim = shape.hidden, shape.head_dim
    chain.norm(tokens, hidden)
    query, key = tokens * shape.heads * dim, tokens * shape.kv_heads * dim
    if shape.q_lora:
        rope = tokens * shape.heads * shape.rope_dim
        chain.linear(tokens, hidden, shape.q_lora + shape.kv_lora + shape.rope_dim)
        chain.norm(tokens, shape.q_lora)
        chain.linear(tokens, shape.q_lora, shape.heads * (dim + shape.rope_dim))
        chain.norm(tokens, shape.kv_lora)
        chain.linear(tokens, shape.kv_lora, shape.heads * 2 * dim)
        chain.rotary(tokens, rope + tokens * shape.rope_dim, shape.rope_dim)
        chain.attention(query + rope, key + tokens * shape.rope_dim, key, query)
    else:
        chain.linear(tokens, hidden, (shape.heads + 2 * shape.kv_heads) * dim, bias=shape.qkv_bias)
        if shape.qk_norm:
            chain.norm(tokens * shape.heads, dim)
            chain.norm(tokens * shape.kv_heads, dim)
        chain.rotary(tokens, query + key, dim)
        chain.attention(query, key, key, query)
    chain.linear(tokens, shape.heads * dim, hidden)
    chain.norm(tokens, hidden, residual=True)
    if shape.experts:
        _moe(chain, shape, tokens, hit)
    else:
        _mlp(chain, tokens, hidden, shape.intermediate)
    chain._kernels(3 * tokens * hidden, 0)  # the last residual
    chain.add(tokens * hidden)  # gradients of the first residual
    chain.input_gradient(tokens * hidden)
