"""Gate and up merged at load: any checkpoint of the plain model, back under the original names, and nothing left behind."""

import pytest
import torch
import transformers
from kernels import get_kernel
from models.families import FAMILIES, build_model, token_ids
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

npu = get_kernel("org/npu-fusion", version=1)


@pytest.fixture(params=["llama", "qwen3"])
def saved(request, tmp_path):
    build_model(request.param).save_pretrained(tmp_path, max_shard_size="100KB")
    return request.param, tmp_path


def logits(model):
    with torch.no_grad():
        return model(token_ids().to(model.device)).logits.cpu()


def weights(path):
    return {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}


def load(path, **options):
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", **options)


def test_sharded_checkpoint_round_trips_bit_for_bit(saved, tmp_path):
    _, path = saved
    assert len(list(path.glob("*.safetensors"))) > 1
    with npu.merged_gate_up(AutoConfig.from_pretrained(path)):
        merged = load(path)
    assert sorted(name for name, _ in merged.model.layers[0].mlp.named_parameters()) == [
        "down_proj.weight",
        "gate_up_proj.weight",
    ]
    merged.save_pretrained(tmp_path / "again")
    before, after = weights(path), weights(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_merged_model_computes_the_same_fused_and_not(saved, fuse):
    _, path = saved
    expected = logits(load(path))
    with npu.merged_gate_up(AutoConfig.from_pretrained(path)):
        model = load(path)
    # fp32: sums of at most 128 terms in another order, 2**-20 of the largest value, times two layers
    assert (logits(model) - expected).abs().max() <= 2**-19 * expected.abs().max()
    fuse(model.to("npu"))
    assert npu.report(model).swapped["SwiGLUMLP"] == 2
    assert (logits(model) - expected).abs().max() <= 2**-19 * expected.abs().max()


def test_nothing_is_left_behind(saved):
    from transformers.monkey_patching import get_patch_mapping

    _, path = saved
    with npu.merged_gate_up(AutoConfig.from_pretrained(path)):
        load(path)
    assert get_patch_mapping() == {}
    plain = load(path)
    assert hasattr(plain.model.layers[0].mlp, "gate_proj")
    assert {name: tuple(value.shape) for name, value in plain.state_dict().items()} == {
        name: tuple(value.shape) for name, value in build_model(saved[0]).state_dict().items()
    }


def test_an_error_inside_leaves_nothing_behind_either(saved):
    from transformers.monkey_patching import get_patch_mapping

    with pytest.raises(RuntimeError, match="stop"), npu.merged_gate_up(AutoConfig.from_pretrained(saved[1])):
        raise RuntimeError("stop")
    assert get_patch_mapping() == {} and hasattr(load(saved[1]).model.layers[0].mlp, "gate_proj")


def test_through_transformers_own_kernel_config(tmp_path, registered):
    """transformers leaves its patch in place, so a later plain load gets the layout, too: it must work by itself."""
    from transformers.monkey_patching import clear_patch_mapping

    build_model("llama").save_pretrained(tmp_path)
    expected = logits(load(tmp_path))
    mapping = {"LlamaMLP": {"npu": ("org/npu-fusion:SwiGLUMLP", {"revision": "v1", "trust_remote_code": True})}}
    try:
        model = load(tmp_path, kernel_config=transformers.KernelConfig(mapping), device_map="npu")
        assert hasattr(model.model.layers[0].mlp, "gate_up_proj")
        assert (logits(model) - expected).abs().max() <= 2**-19 * expected.abs().max()  # as above
        assert (logits(load(tmp_path)) - expected).abs().max() <= 2**-19 * expected.abs().max()
        npu.restore(model)
    finally:
        clear_patch_mapping()


def test_a_model_without_such_an_mlp_is_named():
    config = build_model("mixtral").config
    with pytest.raises(ValueError, match="MixtralForCausalLM has no MLP with gate_proj"), npu.merged_gate_up(config):
        pass


def test_families_that_can_be_merged():
    able = []
    for family in FAMILIES:
        try:
            with npu.merged_gate_up(build_model(family).config):
                able.append(family)
        except ValueError:
            continue
    assert able == ["llama", "qwen2", "qwen3"]
