"""The examples do on this machine what the README says."""

import json
import subprocess
import sys
from pathlib import Path

import npu_emulator

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


def run(name, tmp_path):
    result = tmp_path / "result.json"
    process = subprocess.run(
        [sys.executable, EXAMPLES / name, "--json", result], capture_output=True, text=True, timeout=600
    )
    assert process.returncode == 0, process.stdout + process.stderr
    return json.loads(result.read_text()), process.stdout


def test_smollm2_answers_the_same_with_half_the_launches(tmp_path):
    result, output = run("smollm2.py", tmp_path)
    assert result["answer_eager"] == result["answer_fused"] == "The capital of France is Paris."
    assert result["same_tokens"]
    assert result["swapped"] == {"PreNormDecoderLayer": 30, "RMSNorm": 61, "SwiGLUMLP": 30, "rotary_pos_emb": 30}
    assert result["emulated"] == npu_emulator.is_emulated()
    if result["emulated"]:  # launches are counted by the emulator only
        assert "emulated" in output
        assert result["launches_per_token"]["fused"] <= 0.5 * result["launches_per_token"]["eager"]


def test_mixture_answers_as_the_dense_model(tmp_path):
    result, _ = run("mixture.py", tmp_path)
    assert result["answer_mixture"] == result["answer_dense"] == "The capital of France is Paris."
    assert result["same_tokens"]
    assert result["swapped"] == {
        "PreNormDecoderLayer": 30,
        "RMSNorm": 61,
        "MoEExperts": 30,
        "TopKRouter": 30,
        "rotary_pos_emb": 30,
    }
