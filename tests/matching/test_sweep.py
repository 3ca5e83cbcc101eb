"""The sweep of `make coverage` on a few families, and that it sees a layer that computes something else."""

import json
import sys
from pathlib import Path

import pytest
import torch
from kernels import get_kernel

npu = get_kernel("org/npu-fusion", version=1)

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
import coverage  # noqa: E402
import coverage_models  # noqa: E402
from coverage_sites import build, census  # noqa: E402

SITES = {(site.module, site.name): site for site in census()}


@pytest.fixture(autouse=True)
def kernel(monkeypatch):
    monkeypatch.setattr(coverage, "npu", npu, raising=False)


@pytest.mark.parametrize(
    "module, name, ops",
    [
        ("qwen3", "Qwen3RMSNorm", {"npu_rms_norm"}),
        ("qwen3_5", "Qwen3_5RMSNorm", {"npu_gemma_rms_norm"}),
        ("qwen3_next", "Qwen3NextRMSNormGated", {"npu_rms_norm"}),
        ("qwen3", "Qwen3MLP", {"npu_swiglu"}),
        ("gemma3", "Gemma3MLP", {"npu_geglu"}),
        ("nanochat", "apply_rotary_pos_emb", {"npu_rotary_mul"}),
        ("gpt_oss", "apply_rotary_pos_emb", {"npu_rotary_mul"}),
        ("qwen3_moe", "Qwen3MoeExperts", {"npu_grouped_matmul", "npu_swiglu"}),
    ],
)
def test_verified_and_fused(module, name, ops):
    result = coverage.check(SITES[module, name])
    assert result.status == "verified", result.reason
    for ran in result.fused.values():
        assert ops <= set(ran)


def test_declined_with_its_reason():
    result = coverage.check(SITES["deepseek_v4", "DeepseekV4MLP"])
    assert result.status == "declined"
    assert "clamp" in result.reason


def test_a_layer_that_computes_something_else_is_wrong(monkeypatch):
    def one_percent_off(self, hidden_states):
        return type(self).forward(self, hidden_states) * 1.01

    monkeypatch.setattr(npu.layers.RMSNorm, "forward", one_percent_off)
    monkeypatch.setattr(npu.integration, "FORWARDS", {*npu.integration.FORWARDS, one_percent_off})
    result = coverage.check(SITES["llama", "LlamaRMSNorm"])
    assert result.status == "wrong"
    assert "1.0e-02" in result.reason


def test_a_missing_gradient_is_wrong():
    ones = torch.ones(2)
    assert coverage.difference([ones, None], [ones, None]) == 0
    assert coverage.difference([ones, None], [ones, ones]) == float("inf")
    assert coverage.difference([ones], [ones.bfloat16()]) == float("inf")


def test_summary_and_page():
    results = [coverage.check(SITES[key]) for key in (("llama", "LlamaRMSNorm"), ("clvp", "apply_rotary_pos_emb"))]
    kinds, families = coverage.summary(results), coverage.families(results)
    assert json.loads(json.dumps({"kinds": kinds, "families": families}))["kinds"]["norm"]["verified"] == 1
    assert kinds["rotary"]["reasons"] == {results[1].reason: 1}
    assert {"bert", "llama", "clvp"} <= {family["family"] for family in families}
    models = [coverage_models.check(name, npu) for name in ("gemma", "blt")]
    page = coverage.page(kinds, families, models, "5.22.2")
    assert "## Whole models: 1 of 1 verified" in page
    assert "| gemma | 2 GeGLUMLP, 2 PreNormDecoderLayer, 5 RMSNormZeroCentered, 2 rotary_pos_emb |" in page
    assert "- blt: ValueError:" in page
    assert "| llama | 1/1 |" in page
    assert "clvp.apply_rotary_pos_emb" in page


def test_every_site_can_be_built_small_and_large():
    for key in (("deepseek_v3", "DeepseekV3Experts"), ("phi3", "Phi3MLP"), ("llama", "LlamaMLP")):
        small, large = build(SITES[key], small=True), build(SITES[key])
        assert type(small) is type(large)
        assert sum(p.numel() for p in small.parameters()) < 1_000_000
        assert {p.device.type for p in large.parameters()} == {"meta"}


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "qwen4_exp_text"])
def test_whole_models(name):
    """Qwen4-exp calls its rotary function without k, too."""
    result = coverage_models.check(name, npu)
    assert (result.status, result.reason) == ("verified", "")
    assert {"MoEExperts", "TopKRouter", "rotary_pos_emb"} <= {*result.swapped}


def test_a_model_that_computes_something_else_is_wrong(monkeypatch):
    def one_percent_off(self, hidden_states):
        return type(self).forward(self, hidden_states) * 1.01

    monkeypatch.setattr(npu.layers.RMSNorm, "forward", one_percent_off)
    result = coverage_models.check("llama", npu)
    assert result.status == "wrong"
    assert "logits are" in result.reason and "gradients are" in result.reason


def test_a_model_that_raises_once_it_is_swapped_is_wrong(monkeypatch):
    def broken(self, hidden_states):
        raise KeyError("k")

    monkeypatch.setattr(npu.layers.RMSNorm, "forward", broken)
    assert coverage_models.check("llama", npu).reason == "raised KeyError: 'k'"


def test_a_compiled_model_is_one_graph_or_wrong(monkeypatch):
    assert coverage_models.check("llama", npu, compiled=True).graph == "one"
    assert coverage_models.check("qwen3_moe", npu, compiled=True).graph == "one, eager none"
    forward = npu.layers.RMSNorm.forward

    def broken_in_two(self, hidden_states):
        torch._dynamo.graph_break()
        return forward(self, hidden_states)

    monkeypatch.setattr(npu.layers.RMSNorm, "forward", broken_in_two)
    result = coverage_models.check("llama", npu, compiled=True)
    assert (result.status, result.graph.partition(":")[0]) == ("wrong", "none")
    assert "no graph: Unsupported" in result.reason


def test_what_is_not_a_number_is_infinitely_far_wherever_it_stands():
    ones, nan = torch.ones(2), torch.tensor([1.0, float("nan")])
    for a, b in ((ones, nan), (nan, ones)):
        assert coverage.difference([a, a], [b, ones]) == float("inf")
        assert coverage_models.gradient_distance({"a": ones, "b": a}, {"a": ones, "b": b}) == float("inf")
        assert max(map(coverage_models.distance, (ones, a), (ones, b))) == float("inf")
