"""What can happen to a model around the swap, and what is right then."""

import copy
import inspect
import io
import re
import threading
from functools import partial
from types import MethodType

import kernels
import npu_emulator
import pytest
import torch
import torch.nn.functional as F
import transformers
from accelerate.hooks import ModelHook, add_hook_to_module
from kernels import Mode, get_kernel
from models.families import FAMILIES, build_model, token_ids
from torch import nn

npu = get_kernel("org/npu-fusion", version=1)
LLAMA = FAMILIES["llama"][2]


def logits(model):
    with torch.no_grad():
        return model(token_ids().to(model.device)).logits.cpu()


@pytest.fixture
def eager():
    return logits(build_model("llama").to("npu"))


def close(a, b):
    # fp32 sums of at most 128 terms in another order: 2**-20 of the largest value, times two layers
    return (a - b).abs().max() <= 2**-19 * b.abs().max()


def wrap(module):
    """As tensor parallelism does."""
    original = module.forward

    def tp_forward(*args):
        return original(*args)

    module.forward = tp_forward
    return tp_forward


# ---- what is chosen


def test_only_and_exclude_take_layers_classes_and_places(fuse):
    assert npu.report(fuse(build_model("llama"), only=["RMSNorm"])).swapped == {"RMSNorm": 5}
    assert npu.report(fuse(build_model("llama"), exclude=["LlamaMLP", "*rotary*", "Pre*"])).swapped == {"RMSNorm": 5}
    assert npu.report(fuse(build_model("llama"), only=["model.layers.1.*"])).swapped == {
        "RMSNorm": 2,
        "SwiGLUMLP": 1,
        "rotary_pos_emb": 2,  # one function serves both layers
    }
    reasons = {row.reason for row in npu.report(fuse(build_model("llama"), only=["RMSNorm"])).rows if not row.swapped}
    assert reasons == {"left out by only= or exclude="}


def test_kernelize_again_decides_anew(fuse):
    model = fuse(build_model("llama"))
    swapped = {layer: count for layer, count in LLAMA.items() if layer != "SwiGLUMLP"}
    assert npu.report(fuse(model, exclude=["SwiGLUMLP"])).swapped == swapped
    assert npu.report(fuse(model)).swapped == LLAMA


@pytest.mark.parametrize("device", ["npu", "npu:0", torch.device("npu"), torch.device("npu", 0)])
def test_npu_devices_are_accepted(device, fuse):
    assert npu.report(fuse(build_model("llama"), device=device)).swapped == LLAMA


BAD = {
    "another device": (
        lambda: npu.kernelize(build_model("llama"), device="cuda:0"),
        ValueError,
        "'npu' only, got 'cuda:0'",
    ),
    "no parameters": (lambda: npu.kernelize(nn.ReLU()), ValueError, "ReLU has no parameters"),
    "no module": (lambda: npu.kernelize("model"), TypeError, "torch.nn.Module, got str"),
    "no config": (lambda: npu.plan({"model_type": "llama"}), TypeError, "transformers config, got dict"),
}


@pytest.mark.parametrize("call, error, message", BAD.values(), ids=BAD)
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=re.escape(message)):
        call()


# ---- what happens to the model


def test_deep_copy_is_swapped_and_independent(fuse, eager):
    model = fuse(build_model("llama").to("npu"))
    twin = copy.deepcopy(model)
    assert npu.report(twin).swapped == LLAMA and close(logits(twin), eager)
    with torch.no_grad():
        twin.model.norm.weight.zero_()
    assert logits(twin).abs().max() == 0 and close(logits(model), eager)


def test_saved_whole_and_loaded(fuse):
    # the layers alone: a whole model holds the function that kernels made of its rotary embedding, which nobody can pickle
    layer = build_model("llama").model.layers[0]
    block = nn.Sequential(layer.input_layernorm, layer.mlp).to("npu")
    x = torch.randn(3, 64, device="npu")
    expected = block(x)
    file = io.BytesIO()
    torch.save(fuse(block), file)
    file.seek(0)
    twin = torch.load(file, weights_only=False)
    # a method is pickled by its name, and by its name a module's forward is the original: the copy computes the same, eager
    assert close(twin(x), expected) and npu.report(twin).swapped == {}
    assert npu.report(fuse(twin)).swapped == {"RMSNorm": 1, "SwiGLUMLP": 1} and close(twin(x), expected)


def test_moved_between_devices_and_dtypes(fuse, eager):
    model = fuse(build_model("llama"))
    for device in ("cpu", "npu", "cpu", "npu"):
        assert close(logits(model.to(device)), eager)
    assert logits(model.to(torch.bfloat16)).dtype == torch.bfloat16


def test_weights_of_the_module_are_read_at_each_call(fuse):
    model = fuse(build_model("llama").to("npu"))
    fresh = build_model("llama", seed=5).to("npu")
    model.load_state_dict(fresh.state_dict())
    assert close(logits(model), logits(fresh))


def test_state_dict_is_untouched(fuse):
    model = build_model("llama")
    names = list(model.state_dict())
    assert list(fuse(model).state_dict()) == names


def test_swapped_for_training_and_used_for_inference_and_back(fuse, eager):
    model = fuse(build_model("llama").to("npu").train())
    assert close(logits(model.eval()), eager)
    model = fuse(build_model("llama").to("npu").eval()).train()
    ids = token_ids().to("npu")
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_forward_hooks_of_users_still_run(fuse):
    model, calls = fuse(build_model("llama").to("npu")), []
    for module in (model.model.norm, model.model.layers[0].mlp, model.model.layers[0].mlp.gate_proj):
        module.register_forward_hook(lambda module, args, output: calls.append(type(module).__name__))
    logits(model)
    assert sorted(calls) == ["Linear", "LlamaMLP", "LlamaRMSNorm"]


def test_hook_that_changes_a_linear_is_honoured(fuse):
    model = build_model("llama").to("npu")
    model.model.layers[0].mlp.up_proj.register_forward_hook(lambda module, args, output: output * 2)
    expected = logits(model)
    assert close(logits(fuse(model)), expected)


def test_accelerate_hooks_survive_the_swap_and_its_end(fuse, eager):
    class Count(ModelHook):
        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            Count.calls += 1
            return args, kwargs

    model = build_model("llama").to("npu")
    for layer in model.model.layers:
        add_hook_to_module(layer.mlp, Count())
        add_hook_to_module(layer.input_layernorm, Count())
    assert npu.report(fuse(model)).swapped == LLAMA
    assert close(logits(model), eager) and Count.calls == 4
    assert npu.report(npu.restore(model)).swapped == {}
    assert close(logits(model), eager) and Count.calls == 8


def test_a_wrapped_forward_is_left_alone_with_the_reason(fuse):
    model = build_model("llama")
    tp_forward = wrap(model.model.norm)
    fuse(model)
    assert model.model.norm.forward is tp_forward
    (row,) = [row for row in npu.report(model).rows if not row.swapped]
    assert row.class_name == "LlamaRMSNorm" and "tp_forward" in row.reason


def test_two_models_of_a_family_share_only_the_rotary_function():
    one, other = build_model("llama"), build_model("llama")
    npu.kernelize(one)
    assert npu.report(other).swapped == {"rotary_pos_emb": 2}
    npu.kernelize(other)
    npu.restore(one)
    assert npu.report(other).swapped == LLAMA, "the function stays while a swapped model is left"
    npu.restore(other)
    assert npu.report(other).swapped == {}


def test_a_model_that_is_gone_gives_its_share_back():
    npu.kernelize(build_model("llama"))
    other = build_model("llama")
    npu.restore(npu.kernelize(other))
    assert npu.report(other).swapped == {}


def test_threads_swap_and_run_models_side_by_side(fuse, eager):
    results = []

    def work(model):
        results.append(bool(close(logits(fuse(model)), eager)))

    models = [build_model("llama").to("npu") for _ in range(4)]
    threads = [threading.Thread(target=work, args=[model]) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4


class MergedMLP(nn.Module):
    def __init__(self, activation, gate_half):
        super().__init__()
        self.activation, self.gate_half = activation, gate_half
        self.both, self.down = nn.Linear(8, 48), nn.Linear(24, 8)

    def forward(self, x):
        halves = self.both(x).chunk(2, dim=-1)
        return self.down(self.activation(halves[self.gate_half]) * halves[1 - self.gate_half])


@pytest.mark.parametrize("layer", ["SwiGLUMLP", "GeGLUMLP"])
@pytest.mark.parametrize("gate_half", [0, 1])
@pytest.mark.parametrize("activation", [F.silu, partial(F.gelu, approximate="tanh"), torch.sigmoid])
def test_a_layer_chosen_by_name_computes_what_its_module_computes(activation, gate_half, layer):
    """A mapping of one's own may put either layer on any MLP; for sigmoid there is no fused form."""
    module, x = MergedMLP(activation, gate_half).to("npu"), torch.randn(2, 3, 8).to("npu")
    right = module(x)
    module.forward = MethodType(getattr(npu.layers, layer).forward, module)
    # fp32: sums of at most 24 terms, and an activation that is computed in another way
    torch.testing.assert_close(module(x), right, rtol=1e-5, atol=1e-6)
    assert type(npu.layers.spec_of(module)).__name__ == "MLP"


def rotary(q, k=None, cos=None, sin=None, unsqueeze_dim=1):
    """Qwen4-exp's and Mistral Large 4's: they call it without k, too."""
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)

    def rotated(x):
        first, second = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-second, first), dim=-1) * sin

    return (rotated(q), rotated(k)) if k is not None else rotated(q)


def test_a_swapped_function_is_called_as_before():
    fused = npu.layers.rotary_function(rotary, npu.layers.match(rotary))
    q, k = (torch.randn(2, heads, 3, 8).to("npu") for heads in (4, 2))
    cos, sin = (torch.randn(2, 3, 8).to("npu") for _ in range(2))
    turned = [x.transpose(1, 2).contiguous() for x in (q, k)]
    for args, kwargs in [
        ((q, k, cos, sin), {}),
        ((q, k, cos, sin, 1), {}),
        ((*turned, cos, sin, 2), {}),
        ((*turned, cos), {"sin": sin, "unsqueeze_dim": 2}),
        ((), {"sin": sin, "cos": cos, "k": k, "q": q}),
    ]:
        with npu_emulator.count() as traffic:
            found = fused(*args, **kwargs)
        assert traffic.by_op["aclnnRotaryPositionEmbeddingV2"].launches == traffic.launches == 2
        for x, y in zip(found, rotary(*args, **kwargs), strict=True):
            # fp32: two products and a sum, each rounded once, of values below 16
            torch.testing.assert_close(x, y, rtol=1e-6, atol=2e-6)
    for args, kwargs in [((q, None, cos, sin), {}), ((q,), {"cos": cos, "sin": sin})]:
        assert torch.equal(fused(*args, **kwargs), rotary(*args, **kwargs))
    for args in [(), (q, k, cos, sin, 1, None)]:
        with pytest.raises(TypeError, match="argument"):
            fused(*args)


# ---- plain kernels and transformers after register()


def test_layers_pass_the_validation_of_kernels():
    from kernels.layer.layer import _validate_layer

    modeling = __import__("transformers.models.qwen3_moe.modeling_qwen3_moe", fromlist=["modeling"])
    pairs = {
        "RMSNorm": modeling.Qwen3MoeRMSNorm,
        "SwiGLUMLP": modeling.Qwen3MoeMLP,
        "GeGLUMLP": modeling.Qwen3MoeMLP,
        "MoEExperts": modeling.Qwen3MoeExperts,
        "rotary_pos_emb": type(modeling.apply_rotary_pos_emb),
    }
    for name, replaced in pairs.items():
        _validate_layer(
            check_cls=replaced, cls=getattr(npu.layers, name), repo=npu.layer_map().get(name, {}).get("npu")
        )


def test_plain_kernelize_after_register(registered, eager):
    model = build_model("llama").to("npu")
    kernels.kernelize(model, mode=Mode.INFERENCE, device="npu")
    assert npu.report(model).swapped == LLAMA and close(logits(model), eager)
    assert npu.report(npu.restore(model)).swapped == {}


def test_plain_kernelize_of_moe_after_register(registered):
    model = build_model("qwen3_moe").to("npu")
    expected = logits(model)
    kernels.kernelize(model, mode=Mode.TRAINING, device="npu")
    assert npu.report(model).swapped == FAMILIES["qwen3_moe"][2] and close(logits(model), expected)
    npu.restore(model)


@pytest.fixture
def saved(tmp_path):
    build_model("llama").save_pretrained(tmp_path)
    return tmp_path


def load(path, device_map="npu", **options):
    return transformers.AutoModelForCausalLM.from_pretrained(
        path, device_map=device_map, attn_implementation="eager", **options
    )


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_from_pretrained_with_use_kernels(registered, eager, saved, mode):
    loaded = load(saved, use_kernels=True)
    assert npu.report(getattr(loaded, mode)()).swapped == LLAMA
    assert close(logits(loaded.eval()), eager)
    npu.restore(loaded)


def test_kernel_config_at_model_load_survives_changes_of_mode(saved, eager):
    model = load(saved, kernel_config=npu.KernelConfig())
    for mode in ("eval", "train", "eval"):
        assert npu.report(getattr(model, mode)()).swapped == LLAMA
    assert close(logits(model), eager)
    npu.restore(model)


OFFLOADED = {
    "model.embed_tokens": "npu",
    "model.layers.0": "cpu",
    "model.layers.1": "npu",
    "model.norm": "npu",
    "model.rotary_emb": "npu",
    "lm_head": "npu",
}


def how(name):
    return {"kernel_config": npu.KernelConfig()} if name == "kernel_config" else {"use_kernels": True}


@pytest.mark.parametrize("name", ["kernel_config", "use_kernels"])
def test_offloading_hooks_survive_the_swap_and_changes_of_mode(registered, saved, eager, name):
    model = load(saved, device_map=OFFLOADED, **how(name))
    for mode in ("train", "eval"):
        assert npu.report(getattr(model, mode)()).swapped == LLAMA
    hooked = [module for module in model.modules() if hasattr(module, "_hf_hook")]
    assert len(hooked) > 10 and all(hasattr(module, "_old_forward") for module in hooked)
    assert close(logits(model), eager), "the hooks still move weights and inputs to the device"
    npu.restore(model)


@pytest.mark.parametrize("name", ["kernel_config", "use_kernels"])
def test_loading_in_half_precision_and_shards(registered, tmp_path, name):
    build_model("qwen3_moe").save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    model = load(tmp_path, dtype=torch.bfloat16, **how(name))
    assert npu.report(model).swapped == FAMILIES["qwen3_moe"][2]
    assert logits(model).dtype == torch.bfloat16 and logits(model).isfinite().all()
    npu.restore(model)


def test_plain_kernelize_leaves_a_wrapped_forward_alone(registered):
    model = build_model("llama")
    tp_forward = wrap(model.model.norm)
    kernels.kernelize(model, mode=Mode.INFERENCE, device="npu")
    assert model.model.norm.forward is tp_forward
    (row,) = [row for row in npu.report(model).rows if not row.swapped]
    assert "tp_forward" in row.reason
    npu.restore(model)


def test_kernel_config_chooses_layers(saved):
    model = load(saved, kernel_config=npu.KernelConfig(only=["RMSNorm", "model.layers.1.mlp"]))
    assert npu.report(model.train()).swapped == {"RMSNorm": 5, "SwiGLUMLP": 1}
    npu.restore(model)


def test_a_model_with_a_kernel_config_is_saved_as_it_came(saved, tmp_path, eager):
    model = load(saved, kernel_config=npu.KernelConfig())
    model.save_pretrained(tmp_path / "again")
    npu.restore(model)
    assert close(logits(load(tmp_path / "again")), eager)


def test_register_and_unregister_are_symmetric_and_idempotent():
    from kernels.layer.globals import _KERNEL_MAPPING
    from transformers.integrations.hub_kernels import get_kernel_mapping_transformers
    from transformers.models.llama import modeling_llama

    def state():
        entries = {name: dict(entry["npu"].repos) for name, entry in _KERNEL_MAPPING.get().items() if "npu" in entry}
        upstream = get_kernel_mapping_transformers()["RMSNorm"].get("npu")
        classes = (modeling_llama.LlamaMLP, modeling_llama.LlamaRMSNorm)
        marks = [{k: v for k, v in vars(cls).items() if k.startswith("kernel_")} for cls in classes]
        return {name: repos for name, repos in entries.items() if repos}, upstream, marks

    before = state()
    npu.register()
    npu.register()
    build_model("llama")
    assert state() != before
    npu.unregister()
    npu.unregister()
    assert state() == before


class Doubled(nn.Module):
    """A user's own kernel."""

    def forward(self, hidden_states):
        return hidden_states * 2


class DoubledRepository:
    def load(self):
        return Doubled


def users_norm(mode=None):
    return {"RMSNorm": {"npu": {mode: DoubledRepository()} if mode else DoubledRepository()}}


def runs_users_norm(model):
    return model.model.norm.forward.__func__ is Doubled.forward


@pytest.mark.parametrize("order", ["before", "after", "mapping"])
def test_the_users_entry_wins(order):
    try:
        if order == "before":
            kernels.register_kernel_mapping(users_norm())
        npu.register(users_norm() if order == "mapping" else None)
        if order == "after":
            kernels.register_kernel_mapping(users_norm())
        model = build_model("llama")
        kernels.kernelize(model, mode=Mode.INFERENCE, device="npu")
        swapped = {layer: count for layer, count in LLAMA.items() if layer != "RMSNorm"}
        assert runs_users_norm(model) and npu.report(model).swapped == swapped
        npu.restore(model)
        model = npu.kernelize(build_model("llama"))
        assert runs_users_norm(model)
        (row,) = [row for row in npu.report(model).rows if not row.swapped]
        assert row.reason == "the user registered another kernel for RMSNorm" and row.count == 5
    finally:
        npu.restore(model)
        kernels.register_kernel_mapping({"RMSNorm": {"npu": {}}})


def test_the_users_entry_wins_for_its_mode_only():
    try:
        npu.register(users_norm(Mode.TRAINING))
        model = build_model("llama")
        kernels.kernelize(model, mode=Mode.TRAINING, device="npu")
        assert runs_users_norm(model)
        kernels.kernelize(model, mode=Mode.INFERENCE, device="npu")
        assert npu.report(model).swapped == LLAMA
        npu.restore(model)
    finally:
        kernels.register_kernel_mapping({"RMSNorm": {"npu": {}}})


# ---- what people read


def test_plan_needs_no_weights_and_no_npu():
    config = build_model("qwen3_moe").config
    planned = npu.plan(config)
    assert planned.swapped == FAMILIES["qwen3_moe"][2]
    assert re.search(r"RMSNorm +Qwen3MoeRMSNorm +9 +yes", str(planned))


def test_verify_finds_the_layer_that_parts(fuse, monkeypatch):
    model = build_model("llama").to("npu")
    inputs = {"input_ids": token_ids().to("npu")}
    result = npu.verify(model, inputs)
    assert result.first is None and {d.layer for d in result.differences} >= {"RMSNorm", "SwiGLUMLP", "rotary_pos_emb"}
    assert npu.report(model).swapped == {}, "the model is left as it was found"

    fused = npu.ops.gated_linear
    monkeypatch.setattr(npu.ops, "gated_linear", lambda *args: fused(*args) * 1.5)
    broken = npu.verify(fuse(model), inputs)
    assert (broken.first.name, broken.first.layer) == ("model.layers.0.mlp", "SwiGLUMLP")
    assert broken.first.error == pytest.approx(0.5, rel=1e-4), "half of the largest value too much"
    assert "they part at model.layers.0.mlp" in str(broken)
    assert npu.report(model).swapped == LLAMA, "the model is left as it was found"


def test_signatures_of_the_public_api_are_documented():
    for name in npu.__all__:
        member = getattr(npu, name)
        if inspect.isfunction(member):
            assert inspect.getdoc(member), name
