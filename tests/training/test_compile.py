"""torch.compile: a layer says `can_torch_compile` where it compiles here as one graph, once for all shapes."""

from dataclasses import replace
from importlib import import_module

import kernels
import pytest
import torch
import transformers
from kernels import Mode, get_kernel
from models.families import FAMILIES, build_model, loss_and_gradients, token_ids
from torch import nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

npu = get_kernel("org/npu-fusion", version=1)
H = 16


def transformers_class(module, name):
    return getattr(import_module(f"transformers.models.{module}.modeling_{module}"), name)


class Rotary(nn.Module):
    """Looks its rotary function up as an attention does."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, q, k, cos, sin):
        return apply_rotary_pos_emb(q * self.scale, k, cos.detach(), sin.detach())


def rms_norm():
    return transformers_class("llama", "LlamaRMSNorm")(H)


def zero_centered():
    return transformers_class("gemma", "GemmaRMSNorm")(H)


def gated_norm():
    return transformers_class("qwen3_next", "Qwen3NextRMSNormGated")(H)


def mlp(module, config):
    return transformers_class(module, f"{config}MLP")(
        getattr(transformers, f"{config}Config")(hidden_size=H, intermediate_size=24, num_attention_heads=2)
    )


def experts():
    config = transformers.Qwen3MoeConfig(hidden_size=H, moe_intermediate_size=12, num_experts=4)
    config._experts_implementation = "eager"
    return transformers_class("qwen3_moe", "Qwen3MoeExperts")(config)


def router():
    config = transformers.Qwen3MoeConfig(hidden_size=H, num_experts=8, num_experts_per_tok=2)
    return transformers_class("qwen3_moe", "Qwen3MoeTopKRouter")(config)


def tokens(n, *shape):
    generator = torch.Generator().manual_seed(n)
    return torch.randn(n, *(shape or (H,)), generator=generator)


def routed(n):
    index = torch.arange(2 * n).view(n, 2) % 4
    return tokens(n), index, torch.rand(n, 2, generator=torch.Generator().manual_seed(n))


def heads(n):
    """q and k as an attention has them: [B, N, S, D] seen, [B, S, N, D] in memory."""
    q, k = (tokens(2, n, heads, 8).transpose(1, 2) for heads in (4, 2))
    return q, k, tokens(1, n, 8), tokens(1, n, 8)


# layer: (module that adopts it, its inputs at size n)
LAYERS = {
    "RMSNorm": (rms_norm, lambda n: (tokens(2, n, H),)),
    "RMSNormZeroCentered": (zero_centered, lambda n: (tokens(2, n, H),)),
    "RMSNormGated": (gated_norm, lambda n: (tokens(n), tokens(n) + 1)),
    "SwiGLUMLP": (lambda: mlp("llama", "Llama"), lambda n: (tokens(2, n, H),)),
    "GeGLUMLP": (lambda: mlp("gemma", "Gemma"), lambda n: (tokens(2, n, H),)),
    "rotary_pos_emb": (Rotary, heads),
    "MoEExperts": (experts, routed),
    "TopKRouter": (router, lambda n: (tokens(n),)),
}


WITH_LINEAR = ("SwiGLUMLP", "GeGLUMLP", "TopKRouter")  # see test_linear_itself_is_compiled_for_each_size


def forward_and_backward(module, inputs):
    inputs = [t.detach().clone().requires_grad_(t.is_floating_point()) for t in inputs]
    outputs = module(*inputs)
    outputs = [outputs] if isinstance(outputs, torch.Tensor) else outputs
    outputs = [t for t in outputs if t.requires_grad]
    wanted = [*(t for t in inputs if t.requires_grad), *module.parameters()]
    grads = torch.autograd.grad(outputs, wanted, [t.detach() + 1 for t in outputs], allow_unused=True)
    return [t.detach().cpu() for t in (*outputs, *(g for g in grads if g is not None))]


def build(layer):
    torch.manual_seed(0)
    module = LAYERS[layer][0]()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.3)
    return module.to("npu")


def graphs_of_sizes(run, module, inputs):
    """How many graphs there are after each of three sizes; the results are those without compilation."""
    torch._dynamo.reset()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True, dynamic=True)
    graphs = []
    for size in (6, 11, 32):
        arguments = [t.to("npu") for t in inputs(size)]
        expected = run(module, arguments)
        for a, b in zip(run(compiled, arguments), expected, strict=True):
            # fp32: the same fused ops; aot_eager may add up the gradients around them in another order
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    return graphs


def forward(module, inputs):
    with torch.no_grad():
        outputs = module(*inputs)
    return [outputs] if isinstance(outputs, torch.Tensor) else list(outputs)


@pytest.mark.parametrize("layer", LAYERS)
def test_one_graph_for_all_sizes(layer, fuse):
    module, inputs = fuse(build(layer)), LAYERS[layer][1]
    assert npu.report(module).swapped == {layer: 1}
    assert getattr(npu.layers, layer).can_torch_compile
    first, *later = graphs_of_sizes(forward, module, inputs)
    assert later == [first, first]
    first, *later = graphs_of_sizes(forward_and_backward, module, inputs)
    if layer not in WITH_LINEAR:
        assert later == [first, first]


@pytest.mark.parametrize("layer", LAYERS)
def test_compiled_before_it_ever_ran(layer, fuse):
    """What a layer works out at its first call does not break the graph."""
    module = fuse(build(layer))
    for holder in (*module.modules(), apply_rotary_pos_emb):
        if npu.layers.SPEC in holder.__dict__:  # one that nobody has used yet
            holder.__dict__[npu.layers.SPEC] = replace(holder.__dict__[npu.layers.SPEC])
    arguments = [t.to("npu") for t in LAYERS[layer][1](6)]
    torch._dynamo.reset()
    found = forward(torch.compile(module, backend="aot_eager", fullgraph=True), arguments)
    for a, b in zip(found, forward(module, arguments), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # fp32, as in graphs_of_sizes


def test_linear_itself_is_compiled_for_each_size():
    """The backward that torch_npu gives aten::matmul binds the graph to one size: every nn.Linear does, swapped or not."""
    linear = nn.Linear(H, H, bias=False).to("npu")
    first, *later = graphs_of_sizes(forward_and_backward, linear, lambda n: (tokens(n),))
    assert later == [first + 1, first + 2], "torch_npu no longer does: WITH_LINEAR can go"


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
def test_whole_model_after_plain_kernelize(family, registered):
    """kernels swaps with TORCH_COMPILE only what says that it can be compiled; the model is one graph, as it is without."""
    model, ids = build_model(family).to("npu").train(), token_ids().to("npu")
    kernels.kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device="npu")
    try:
        assert npu.report(model).swapped == FAMILIES[family][2]
        inputs = {"input_ids": ids, "use_cache": False}
        logits, gradients = loss_and_gradients(model, inputs)
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True, dynamic=True)
        compiled_logits, compiled_gradients = loss_and_gradients(compiled, inputs)
        # fp32 sums of at most 128 terms in another order, through two layers there and back
        assert (compiled_logits - logits).abs().max() <= 2**-19 * logits.abs().max()
        for name, expected in gradients.items():
            result = compiled_gradients[f"_orig_mod.{name}"]
            assert (result - expected).abs().max() <= 2**-17 * expected.abs().max() + 1e-9, name
    finally:
        npu.restore(model)
