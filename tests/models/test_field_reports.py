"""What people ran into with whole models elsewhere, with the right value. What concerns one op is in tests/ops."""

import pytest
import torch
import transformers
from kernels import get_kernel
from models.families import FAMILIES, MOE, SMALL, build_model
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

npu = get_kernel("org/npu-fusion", version=1)

MIXTURES = [family for family, (_, _, swapped) in FAMILIES.items() if "MoEExperts" in swapped]


@pytest.mark.parametrize("family", MIXTURES)
def test_5_a_mixture_returns_what_this_version_of_transformers_returns(family, fuse):
    """verl-project/verl#6707: a patch returned another version's tuple and took another version's weights."""
    model = build_model(family).to("npu")
    block = model.model.layers[0].mlp
    hidden_states = torch.randn(2, 5, SMALL["hidden_size"], device="npu")
    tokens = hidden_states.flatten(0, 1)
    with torch.no_grad():
        expected, routed = block(hidden_states), block.gate(tokens)
        fuse(model)
        result, fused_routed = block(hidden_states), block.gate(tokens)
    assert type(result) is type(expected) and result.shape == expected.shape
    # fp32: sums of at most 64 terms in another order, some ulps of 2**-24 of the largest value
    assert (result - expected).abs().max() <= 2**-20 * expected.abs().max()
    assert [(t.dtype, t.shape) for t in fused_routed] == [(t.dtype, t.shape) for t in routed]


class HalfInstalled(nn.Module):
    """A norm of a library that is half installed: what its forward imports is missing."""

    def __init__(self):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(64)), 1e-6

    def forward(self, hidden_states):
        raise ImportError("cannot import name 'norm' from 'kit'")


def test_6_a_module_that_cannot_run_is_named_and_harms_no_other(fuse):
    """verl-project/verl#6777: one missing modeling module disabled every patch."""
    model = build_model("llama")
    model.model.extra = HalfInstalled()
    report = npu.report(fuse(model))
    assert report.swapped == FAMILIES["llama"][2]
    (row,) = [row for row in report.rows if not row.swapped]
    assert row.class_name == "HalfInstalled" and "cannot import name 'norm' from 'kit'" in row.reason


@pytest.mark.parametrize("mean", [0.0, 1.0])
@pytest.mark.parametrize("cls, layer", [(LlamaRMSNorm, "RMSNorm"), (GemmaRMSNorm, "RMSNormZeroCentered")])
def test_7_a_norm_is_known_by_what_it_computes_not_by_its_weights(cls, layer, mean):
    """hiyouga/LlamaFactory#10512: whether 1 is added to the weight was guessed from the weights' mean."""
    norm = cls(64).to("npu")
    nn.init.constant_(norm.weight, mean)
    x = torch.randn(3, 64, device="npu")
    expected = norm(x)
    assert npu.report(npu.kernelize(norm)).swapped == {layer: 1}
    torch.testing.assert_close(norm(x), expected, rtol=1e-5, atol=1e-6)  # fp32, a mean of 64 squares in another order


@pytest.mark.parametrize("act, layer", [("silu", "SwiGLUMLP"), ("gelu", "GeGLUMLP"), ("gelu_pytorch_tanh", "GeGLUMLP")])
def test_10_the_activation_is_the_models_own(act, layer, fuse):
    """vllm-project/vllm-ascend#11609, #9897: SwiGLU was hard-coded where a model has GELU; a clamp was dropped."""
    config = transformers.Qwen3Config(**SMALL, hidden_act=act)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to("npu")
    mlp, x = model.model.layers[0].mlp, torch.randn(3, SMALL["hidden_size"], device="npu")
    expected = mlp.cpu()(x.cpu())  # on the device torch_npu's own F.gelu is the tanh form whatever is asked for
    assert npu.report(fuse(model)).swapped[layer] == 2
    # fp32: sums of at most 96 terms in another order
    assert (mlp.to("npu")(x).cpu() - expected).abs().max() <= 2**-20 * expected.abs().max()


def test_10_a_clamp_is_not_dropped(fuse):
    config = transformers.GptOssConfig(**MOE, num_local_experts=4, layer_types=["full_attention"] * 2)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").to("npu")
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_()
    x = torch.randn(6, SMALL["hidden_size"], device="npu") * 10  # far beyond the clamp at 7
    index, weights = torch.tensor([[0, 1]] * 6, device="npu"), torch.full((6, 2), 0.5, device="npu")
    with torch.no_grad():
        expected = experts(x, index, weights)
        fuse(model)
        result = experts(x, index, weights)
    assert (result - expected).abs().max() <= 2**-19 * expected.abs().max()  # fp32, sums of 64 terms, two in a row
