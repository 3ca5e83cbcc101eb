"""The table of ops that drives the tests: a new op is one entry of OPS.

A test that takes `op` runs for every op, one that takes `sample` as well for every sample of every op, one that takes
`dtype` as well for every dtype that the fused ops support.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from kernels import get_kernel

ops = get_kernel("org/npu-fusion", version=1).ops
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Sample:
    """Arguments in float64 on the CPU; float tensors among `args` are differentiable unless named in `constant`."""

    name: str
    args: tuple
    kwargs: dict = field(default_factory=dict)
    constant: tuple = ()  # positions in args that take no gradient

    def on(self, device: str, dtype: torch.dtype, grad: bool = False) -> tuple:
        def place(position, value):
            if not isinstance(value, torch.Tensor):
                return value
            if not value.is_floating_point():
                return value.to(device)
            value = value.to(dtype).to(device)
            return value.requires_grad_(grad and position not in self.constant)

        return tuple(place(position, value) for position, value in enumerate(self.args))


@dataclass(frozen=True)
class Op:
    name: str
    fused: Callable[..., Any]
    reference: Callable[..., Any]
    samples: Callable[[], list]
    errors: Callable[[], list] = list  # (sample, exception): refused alike on every device
    roundings: int = 1  # to the dtype of the inputs, one after the other, forward and backward each
    differentiable: bool = True


def randn(*shape, scale=1.0):
    return torch.randn(shape, generator=GENERATOR, dtype=torch.float64) * scale


def rand(*shape):
    return torch.rand(shape, generator=GENERATOR, dtype=torch.float64)


def randint(high, *shape):
    return torch.randint(high, shape, generator=GENERATOR)


GENERATOR = torch.Generator().manual_seed(0)


def rms_norm_samples():
    for shape in [(3, 8), (2, 5, 7), (1, 1, 1), (2, 3, 2, 33), (0, 8), (4, 0, 8), (6,)]:
        yield Sample(f"{shape}", (randn(*shape), randn(shape[-1]), 1e-6))
    yield Sample("tiny_values", (randn(3, 16, scale=1e-4), randn(16), 1e-5))
    yield Sample("no_weight", (randn(2, 16, 64), None, 1e-6))
    yield Sample("gemma", (randn(2, 3, 10), randn(10), 1e-6, 0, "gemma"))
    yield Sample("zero_centered", (randn(2, 3, 10), randn(10), 1e-6, 1, "gemma"))
    yield Sample("zero_centered_llama", (randn(2, 3, 10), randn(10), 1e-6, 1, "llama"))


def rms_norm_gated_samples():
    x, gate, weight = randn(2, 3, 24), randn(2, 3, 24), randn(24)
    for activation in ("silu", "sigmoid", "gelu"):
        yield Sample(activation, (x, gate, weight, 1e-6, activation))
    yield Sample("gate_first", (x, gate, weight, 1e-6, "silu", True))
    yield Sample("groups", (x, gate, weight, 1e-6, "silu", True, 8))
    yield Sample("groups_gate_after", (x, gate, weight, 1e-6, "silu", False, 6))
    yield Sample("one_group", (x, gate, weight, 1e-6, "silu", True, 24))
    yield Sample("gemma", (x, gate, weight, 1e-6, "silu", False, None, "gemma"))
    yield Sample("no_gate", (x, None, weight, 1e-6))
    yield Sample("empty", (x[:0], gate[:0], weight, 1e-6))


def add_rms_norm_samples():
    for shape in [(3, 8), (2, 5, 7), (0, 8)]:
        yield Sample(f"{shape}", (randn(*shape), randn(*shape), randn(shape[-1]), 1e-6))
    yield Sample("broadcast", (randn(2, 1, 8), randn(2, 3, 8), randn(8), 1e-6))


def swiglu_samples():
    for shape, dim in [((3, 8), -1), ((2, 5, 14), -1), ((2, 3, 4), 0), ((3, 6, 5), 1), ((0, 8), -1), ((2,), 0)]:
        yield Sample(f"{shape}_dim{dim}", (randn(*shape, scale=2.0), dim))


def geglu_samples():
    for shape, dim in [((3, 8), -1), ((2, 3, 4), 0), ((3, 6, 5), 1), ((0, 8), -1)]:
        for approximate in ("tanh", "none"):
            yield Sample(f"{shape}_dim{dim}_{approximate}", (randn(*shape, scale=2.0), dim, approximate))


def gated_linear_samples():
    gate, up = randn(11, 8, scale=0.4), randn(11, 8, scale=0.4)
    gate_bias, up_bias = randn(11), randn(11)
    for activation in ("silu", "gelu", "gelu_tanh"):
        yield Sample(activation, (randn(5, 8), gate, up, None, None, activation))
        yield Sample(f"{activation}_bias", (randn(2, 3, 8), gate, up, gate_bias, up_bias, activation))
    yield Sample("one_bias", (randn(2, 8), gate, up, None, up_bias))
    yield Sample("vector", (randn(8), gate, up))
    yield Sample("rank_4", (randn(2, 1, 3, 8), gate, up))
    yield Sample("no_tokens", (randn(2, 0, 8), gate, up))


def rotary_samples():
    def sample(name, shape, cos_shape, interleaved=False):
        return Sample(name, (randn(*shape), rand(*cos_shape), rand(*cos_shape), interleaved), constant=(1, 2))

    for interleaved in (False, True):
        mode = "interleaved" if interleaved else "half"
        yield sample(f"{mode}_BNSD", (2, 3, 5, 8), (1, 1, 5, 8), interleaved)
        yield sample(f"{mode}_BNSD_batch", (2, 3, 5, 8), (2, 1, 5, 8), interleaved)
        yield sample(f"{mode}_BSND", (2, 5, 3, 8), (1, 5, 1, 8), interleaved)
        yield sample(f"{mode}_BSND_batch", (2, 5, 3, 8), (2, 5, 1, 8), interleaved)
        yield sample(f"{mode}_SBND", (5, 2, 3, 8), (5, 1, 1, 8), interleaved)
        yield sample(f"{mode}_TND", (5, 3, 8), (5, 1, 8), interleaved)
        yield sample(f"{mode}_NTD", (3, 5, 8), (5, 8), interleaved)
        yield sample(f"{mode}_full", (2, 3, 5, 8), (2, 3, 5, 8), interleaved)
        yield sample(f"{mode}_decode", (2, 9, 1, 8), (1, 1, 1, 8), interleaved)
        yield sample(f"{mode}_vector", (2, 3, 5, 8), (8,), interleaved)
        yield sample(f"{mode}_partial", (2, 3, 5, 12), (1, 1, 5, 8), interleaved)
        yield sample(f"{mode}_odd_half", (2, 3, 5, 6), (1, 1, 5, 6), interleaved)
        yield sample(f"{mode}_rank_5", (2, 2, 3, 5, 8), (2, 1, 1, 5, 8), interleaved)
        yield sample(f"{mode}_many_heads", (2, 501, 2, 2), (1, 1, 2, 2), interleaved)
        yield sample(f"{mode}_mixed", (2, 3, 2, 3, 2), (1, 3, 1, 3, 2), interleaved)
        yield sample(f"{mode}_empty", (2, 3, 0, 8), (1, 1, 0, 8), interleaved)
    yield sample("wide", (1, 2, 3, 1000), (1, 1, 3, 1000))
    x = randn(2, 3, 5, 8)
    yield Sample("tables_with_gradient", (x, rand(1, 1, 5, 8), rand(1, 1, 5, 8)))


COUNTS = {
    "even": [2, 2, 2],
    "empty_groups": [0, 6, 0],
    "one_expert": [6],
    "last_empty": [5, 1, 0],
    "tail": [1, 0, 2],
    "nobody": [0, 0, 0],
}


def gated_activation_samples():
    for activation in ("silu", "gelu", "gelu_tanh", "sigmoid"):
        yield Sample(activation, (randn(2, 3, 8, scale=3.0), randn(2, 3, 8), activation))
    yield Sample("one_dimension", (randn(8), randn(8)))
    yield Sample("broadcast", (randn(2, 3, 8), randn(3, 8)))
    yield Sample("strided", (randn(3, 16)[:, ::2], randn(8, 3).t()))
    yield Sample("empty", (randn(0, 8), randn(0, 8)))


def grouped_matmul_samples():
    for name, counts in COUNTS.items():
        weight = randn(len(counts), 5, 4)
        yield Sample(name, (randn(6, 4), weight, torch.tensor(counts)))
        yield Sample(f"{name}_bias", (randn(6, 4), weight, torch.tensor(counts), randn(len(counts), 5)))
        transposed = weight.transpose(1, 2).contiguous()
        yield Sample(f"{name}_transposed", (randn(6, 4), transposed, torch.tensor(counts), None, True))
    yield Sample("no_rows", (randn(0, 4), randn(3, 5, 4), torch.tensor([0, 0, 0]), randn(3, 5)))
    yield Sample("inner_of_one", (randn(6, 1), randn(3, 5, 1), torch.tensor([2, 2, 2])))
    yield Sample("outer_of_one", (randn(6, 4), randn(3, 1, 4), torch.tensor([2, 2, 2])))


ROUTES = {
    "plain": (4, [[0, 2], [3, 1], [2, 0], [1, 2], [0, 3]]),
    "one_expert_takes_all": (4, [[2], [2], [2], [2], [2]]),
    "top_1": (3, [[0], [2], [1]]),
    "every_expert": (3, [[0, 1, 2], [2, 1, 0], [1, 0, 2]]),
    "single_expert": (1, [[0], [0]]),
    "duplicates": (3, [[1, 1], [2, 0], [0, 0]]),
    "expert_parallel": (3, [[0, 3], [3, 3], [2, 1], [3, 0]]),
    "all_elsewhere": (3, [[3, 3], [3, 3]]),
    "one_token": (4, [[3, 1]]),
    "no_tokens": (4, []),
}


def route(name):
    num_experts, index = ROUTES[name]
    return num_experts, torch.tensor(index, dtype=torch.int64).reshape(len(index), -1 if index else 2)


def routing_samples():
    """Down the road and back: permute, then unpermute, so that rows nobody wrote are never looked at."""
    for name in ROUTES:
        num_experts, index = route(name)
        yield Sample(name, (randn(len(index), 6), index, rand(*index.shape), num_experts))


def experts_samples():
    for name in ROUTES:
        num_experts, index = route(name)
        gate_up, down = randn(num_experts, 14, 6, scale=0.4), randn(num_experts, 6, 7, scale=0.4)
        yield Sample(name, (randn(len(index), 6), index, rand(*index.shape), gate_up, down))
    num_experts, index = route("expert_parallel")
    x, weights = randn(len(index), 6), rand(*index.shape)
    gate_up, down = randn(num_experts, 14, 6, scale=0.4), randn(num_experts, 6, 7, scale=0.4)
    biases = (randn(num_experts, 14), randn(num_experts, 6))
    turned = (gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous())
    yield Sample("gelu", (x, index, weights, gate_up, down, "gelu"))
    yield Sample("gelu_tanh", (x, index, weights, gate_up, down, "gelu_tanh"))
    yield Sample("transposed", (x, index, weights, *turned, "silu", True))
    yield Sample("biases", (x, index, weights, gate_up, down, "silu", False, *biases))
    yield Sample(
        "own_gate", (x, index, weights, gate_up, down, lambda h: F.relu(h[..., ::2]) * h[..., 1::2].clamp(-1, 1))
    )


def softmax_samples():
    for k, renormalize in [(1, True), (2, True), (2, False), (8, True)]:
        yield Sample(f"k{k}_{renormalize}", (randn(5, 8, scale=3.0), k, renormalize))
    yield Sample("empty", (randn(0, 8), 2))


def sigmoid_samples():
    bias = randn(16)
    for groups, kept, k in [(1, 1, 4), (4, 2, 3), (4, 1, 4), (2, 2, 2), (8, 4, 2)]:
        yield Sample(f"groups{groups}_kept{kept}_k{k}", (randn(5, 16), bias, k, groups, kept, True, 2.5))
    yield Sample("no_bias", (randn(5, 16), None, 4, 4, 2))
    yield Sample("one_expert", (randn(5, 1), None, 1))
    yield Sample("one_group_of_more", (randn(5, 8), randn(8), 2, 1, 2))
    yield Sample("not_renormalized", (randn(5, 16), bias, 4, 4, 2, False, 2.5))


def routing(permute, unpermute):
    def there_and_back(hidden_states, top_k_index, top_k_weights, num_experts):
        permuted, row_index, tokens_per_expert = permute(hidden_states, top_k_index, num_experts)
        return unpermute(permuted, row_index, top_k_weights), tokens_per_expert

    return there_and_back


def sorted_choice(router):
    """The order of the chosen experts is not part of the definition."""

    def route(*args):
        weights, index = router(*args)
        order = index.cpu().argsort(-1).to(index.device)
        return weights.gather(-1, order), index.gather(-1, order)

    return route


OPS = [
    Op("rms_norm", ops.rms_norm, ops.rms_norm_reference, rms_norm_samples, lambda: [
        (Sample("weight_of_other_size", (randn(3, 8), randn(7), 1e-6)), RuntimeError),
    ]),
    Op("rms_norm_gated", ops.rms_norm_gated, ops.rms_norm_gated_reference, rms_norm_gated_samples, lambda: [
        (Sample("groups_do_not_divide", (randn(3, 8), randn(3, 8), randn(8), 1e-6, "silu", True, 3)), RuntimeError),
        (Sample("no_such_activation", (randn(3, 8), randn(3, 8), randn(8), 1e-6, "swish")), KeyError),
    ], roundings=3),
    Op("add_rms_norm", ops.add_rms_norm, ops.add_rms_norm_reference, add_rms_norm_samples, roundings=2),
    Op("swiglu", ops.swiglu, ops.swiglu_reference, swiglu_samples, lambda: [
        (Sample("odd", (randn(3, 7),)), RuntimeError),
    ]),
    Op("geglu", ops.geglu, ops.geglu_reference, geglu_samples, lambda: [
        (Sample("odd", (randn(3, 7),)), RuntimeError),
        (Sample("no_such_form", (randn(3, 8), -1, "sigmoid")), RuntimeError),
    ]),
    Op("gated_activation", ops.gated_activation, ops.gated_activation_reference, gated_activation_samples, lambda: [
        (Sample("sizes_differ", (randn(3, 8), randn(3, 7))), RuntimeError),
        (Sample("no_such_activation", (randn(3, 8), randn(3, 8), "swish")), KeyError),
    ], roundings=2),
    Op("gated_linear", ops.gated_linear, ops.gated_linear_reference, gated_linear_samples, lambda: [
        (Sample("sizes_differ", (randn(3, 8), randn(5, 8), randn(6, 8))), RuntimeError),
        (Sample("input_of_other_size", (randn(3, 7), randn(5, 8), randn(5, 8))), RuntimeError),
    ], roundings=2),
    Op("rotary", ops.rotary, ops.rotary_reference, rotary_samples, lambda: [
        (Sample("cos_of_other_length", (randn(2, 3, 5, 8), rand(1, 1, 4, 8), rand(1, 1, 4, 8))), RuntimeError),
    ]),
    Op("grouped_matmul", ops.grouped_matmul, ops.grouped_matmul_reference, grouped_matmul_samples, lambda: [
        (Sample("inner_sizes_differ", (randn(6, 3), randn(3, 5, 4), torch.tensor([2, 2, 2]))), RuntimeError),
    ]),
    Op("routing", routing(ops.moe_permute, ops.moe_unpermute),
       routing(ops.moe_permute_reference, ops.moe_unpermute_reference), routing_samples),
    Op("moe_experts", ops.moe_experts, ops.experts_reference, experts_samples, lambda: [
        (Sample("no_such_activation", (*next(experts_samples()).args, "swish")), KeyError),
    ], roundings=4),
    Op("top_k_softmax", ops.top_k_softmax, ops.top_k_softmax_reference, softmax_samples, roundings=2),
    Op("group_top_k_sigmoid", sorted_choice(ops.group_top_k_sigmoid),
       sorted_choice(ops.group_top_k_sigmoid_reference), sigmoid_samples, differentiable=False),
]  # fmt: skip


def pytest_generate_tests(metafunc):
    names = metafunc.fixturenames
    chosen = [op for op in OPS if op.differentiable or not metafunc.definition.get_closest_marker("differentiable")]
    if "sample" in names:
        cases = [(op, sample) for op in chosen for sample in op.samples()]
        metafunc.parametrize("op, sample", cases, ids=[f"{op.name}-{sample.name}" for op, sample in cases])
    elif "op" in names:
        metafunc.parametrize("op", chosen, ids=[op.name for op in chosen])
    if "dtype" in names and "op" in names:
        metafunc.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])


def pytest_configure(config):
    config.addinivalue_line("markers", "differentiable: only ops that have a backward")
