"""The limits against closed forms, and the scaling rule."""

from dataclasses import replace

import cases
import pytest
from cases import DEEPSEEK_V3, MIXTRAL_8X7B, QWEN3_8B, QWEN3_30B_A3B, Case

T, HIDDEN, INTERMEDIATE = 8192, 4096, 12288
FORWARD, BOTH = cases.MODES


def gigabytes(case, mode):
    return cases.limit(case, mode) / 1e9


def test_limits_of_the_published_shapes():
    """What was counted by hand before there was code: 0.134 and 0.54 GB; 1.644 GB with merged gate and up; 0.172 GB."""
    norm, mlp, rotary = (Case(part, QWEN3_8B, T) for part in ("RMSNorm", "MLP", "rotary"))
    assert gigabytes(norm, FORWARD) == pytest.approx(0.1342, abs=1e-4)
    assert gigabytes(norm, BOTH) == pytest.approx(0.537, abs=1e-3)
    assert gigabytes(mlp, FORWARD) == pytest.approx(1.644, abs=1e-3)
    assert gigabytes(rotary, FORWARD) == pytest.approx(0.172, abs=1e-3)


def test_mlp_limit_is_the_sum_of_its_kernels():
    x, w, h = T * HIDDEN, HIDDEN * INTERMEDIATE, T * INTERMEDIATE
    forward = (x + 2 * w + 2 * h) + (2 * h + h) + (h + w + x)
    backward = 2 * (x + 2 * w + 2 * h) + (h + 2 * h + 2 * h) + 2 * (h + w + x) + 3 * (3 * w + x)
    case = Case("MLP", QWEN3_8B, T)
    assert cases.limit(case, FORWARD) == 2 * forward
    assert cases.limit(case, BOTH) == 2 * (forward + backward)


def test_only_the_weights_of_chosen_experts_are_read():
    case = Case("MoE block", QWEN3_30B_A3B, 1)
    expert = 2 * 3 * QWEN3_30B_A3B.hidden * QWEN3_30B_A3B.intermediate
    assert cases.limit(case, FORWARD, hit=128) - cases.limit(case, FORWARD, hit=8) == 120 * expert


def test_names_tell_what_was_run():
    assert Case("MLP", QWEN3_8B, T).name == "MLP T=8192 H=4096 I=12288"
    assert Case("decoder layer", MIXTRAL_8X7B, 16).name == "decoder layer T=16 Mixtral-8x7B"
    assert Case("decoder layer", replace(MIXTRAL_8X7B, experts=4), 16, scale=2).name.endswith("Mixtral-8x7B E=4")
    names = [case.name for case in cases.cases()]
    assert len(names) == len(set(names)) == 27


@pytest.mark.parametrize("shape", [QWEN3_30B_A3B, MIXTRAL_8X7B, DEEPSEEK_V3], ids=lambda shape: shape.model)
def test_scaling_keeps_the_tokens_of_an_expert(shape):
    case = cases.scaled(Case("decoder layer", shape, T), budget=4 << 30)
    assert case.scale > 1
    assert case.tokens / case.shape.experts == T / shape.experts
    assert case.shape.experts >= 2 * shape.top_k
    assert cases.scaled(Case("decoder layer", shape, 16), budget=4 << 30).tokens == 16


def test_parameters_are_those_of_the_published_models():
    """Layers times the published number of layers, without embeddings: 6.9, 29.9, 46.4 and 670 billion.

    One per cent: norms, biases and the first dense layers of DeepSeek-V3 are left out.
    """
    for shape, layers, billions in ((QWEN3_8B, 36, 6.95), (QWEN3_30B_A3B, 48, 29.9), (MIXTRAL_8X7B, 32, 46.4)):
        assert shape.parameters * layers / 1e9 == pytest.approx(billions, rel=0.01)
    assert DEEPSEEK_V3.parameters * 58 / 1e9 == pytest.approx(667, rel=0.01)
