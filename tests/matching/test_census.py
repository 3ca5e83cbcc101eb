"""Layers of transformers: those with a trap, and a few of each plain kind. `make coverage` goes through all of them."""

import sys
from pathlib import Path

import pytest
from kernels import get_kernel

npu = get_kernel("org/npu-fusion", version=1)
match, specs = npu.matching.match, npu.specs

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "benchmarks"))
from coverage_sites import build, census  # noqa: E402

SITES = {(site.module, site.name): site for site in census()}


def answer(module, name):
    return match(build(SITES[module, name]))


RECOGNISED = [
    ("llama", "LlamaRMSNorm", {"offset": 0, "casting_mode": "llama"}),
    ("gpt_oss", "GptOssRMSNorm", {"offset": 0, "casting_mode": "gemma"}),
    ("gemma", "GemmaRMSNorm", {"offset": 1, "casting_mode": "gemma"}),
    ("qwen3_5", "Qwen3_5RMSNorm", {"offset": 1}),
    ("nanochat", "NanoChatRMSNorm", {"weight": None}),
    ("falcon_mamba", "FalconMambaWeightlessRMSNorm", {"weight": None}),
    ("qwen3_next", "Qwen3NextRMSNormGated", {"activation": "silu", "gate_first": False, "gate_optional": False}),
    ("kimi_linear", "KimiLinearRMSNormGated", {"activation": "sigmoid", "casting_mode": "gemma"}),
    ("mamba2", "MambaRMSNormGated", {"gate_first": True, "group_size": None, "gate_optional": True}),
    ("zamba2", "Zamba2RMSNormGated", {"gate_first": True, "group_size": 16}),
    ("llama", "LlamaMLP", {"activation": "silu", "gate_half": None}),
    ("gemma3", "Gemma3MLP", {"activation": "gelu_tanh"}),
    ("gte", "GteMLP", {"activation": "gelu", "training": False}),
    ("phi3", "Phi3MLP", {"gate_half": 0}),
    ("moonshine", "MoonshineDecoderMLP", {"gate_half": 1}),
    ("beam", "BeamMLP", {"upcast": True}),
    ("seed_oss", "SeedOssMLP", {"training": False}),
    ("step3p7", "Step3p7MLP", {}),
    ("llama", "apply_rotary_pos_emb", {"style": "half", "cos": "full", "unsqueeze": 1, "partial": None}),
    ("qwen2_vl", "apply_rotary_pos_emb_vision", {"unsqueeze": -2, "upcast": True}),
    ("glm4", "apply_rotary_pos_emb", {"style": "interleaved", "cos": "first_half", "partial": "first"}),
    ("gpt_neox", "apply_rotary_pos_emb", {"style": "half", "partial": "first"}),
    ("deepseek_v3", "apply_rotary_pos_emb_interleave", {"style": "interleaved_to_half", "ignored": ("position_ids",)}),
    ("deepseek_v4", "apply_rotary_pos_emb", {"style": "interleaved", "cos": "half_width", "partial": "last"}),
    ("nanochat", "apply_rotary_pos_emb", {"style": "half", "cos": "full", "sign": -1}),
    ("gpt_oss", "apply_rotary_pos_emb", {"style": "half", "cos": "half_width", "sign": 1}),
    ("openai_privacy_filter", "apply_rotary_pos_emb", {"style": "interleaved", "cos": "half_width"}),
    ("gptj", "apply_rotary_pos_emb", {"arguments": ("tensor", "sin", "cos"), "unsqueeze": -2}),
    ("qwen3_moe", "Qwen3MoeExperts", {"activation": "silu", "transposed": False, "sentinel": True}),
    ("aria", "AriaExperts", {"transposed": True}),
    ("gpt_oss", "GptOssExperts", {"activation": "apply_gate", "transposed": True, "down_bias": "down_proj_bias"}),
    ("nemotron_h", "NemotronHExperts", {"activation": "act_fn"}),
    ("deepseek_v4", "DeepseekV4Experts", {"activation": "apply_gate"}),
    ("qwen3_moe", "Qwen3MoeTopKRouter", {"score": "softmax", "renormalize": False}),
    ("mixtral", "MixtralTopKRouter", {"score": "softmax", "renormalize": True}),
    ("gpt_oss", "GptOssTopKRouter", {"score": "softmax", "renormalize": True, "bias": "bias"}),
    (
        "deepseek_v3",
        "DeepseekV3TopkRouter",
        {
            "score": "sigmoid",
            "renormalize": True,
            "scale": 2.5,
            "correction_bias": "e_score_correction_bias",
            "groups": (8, 4, "top2sum", float("-inf")),
        },
    ),
    # transformers decorates it as a softmax router
    ("laguna", "LagunaTopKRouter", {"score": "sigmoid", "correction_bias": "e_score_correction_bias"}),
]

DECLINED = [
    ("axk2", "AXK2GatedRMSNorm", "made of other modules"),
    ("falcon_h1", "FalconH1RMSNormGated", "differs for a single position"),
    ("muse_spark", "MuseSparkTextInputScaledRMSNorm", "not to scale * x"),
    ("deepseek_v4", "DeepseekV4UnweightedRMSNorm", "rounds elsewhere in bfloat16"),
    ("deepseek_v4", "DeepseekV4MLP", "a clamp?"),
    ("bitnet", "BitNetMLP", "ffn_sub_norm"),
    ("t5", "T5DenseGatedActDense", "relu, has no fused form"),
    ("gemma3n", "Gemma3nTextMLP", "does not compute"),
    ("inkling", "InklingMLP", "weights beside its linear layers"),
    ("clvp", "apply_rotary_pos_emb", "does not take one or two tensors"),
    ("llama4", "apply_rotary_emb", "no function of cos and sin"),
    ("muse_spark", "MuseSparkExperts", "a norm after each expert?"),
    ("switch_transformers", "SwitchTransformersTop1Router", "top k"),
    ("deepseek_v4", "DeepseekV4HashRouter", "tid2eid is int64"),
]


@pytest.mark.parametrize(
    "module, name, expected", RECOGNISED, ids=lambda value: value if isinstance(value, str) else ""
)
def test_recognised(module, name, expected):
    spec = answer(module, name)
    assert not isinstance(spec, specs.Declined), spec.reason
    assert {field: getattr(spec, field) for field in expected} == expected


@pytest.mark.parametrize("module, name, reason", DECLINED)
def test_declined(module, name, reason):
    spec = answer(module, name)
    assert isinstance(spec, specs.Declined)
    assert reason in spec.reason


def test_one_class_that_clamps_in_some_layers_only():
    from transformers.models.step3p7.configuration_step3p7 import Step3p7TextConfig
    from transformers.models.step3p7.modeling_step3p7 import Step3p7MLP

    config = Step3p7TextConfig(hidden_size=64, intermediate_size=96)
    config.swiglu_limits_shared = [0.0, 16.0]
    assert isinstance(match(Step3p7MLP(config, 0)), specs.MLP)
    assert "clamp" in match(Step3p7MLP(config, 1)).reason
