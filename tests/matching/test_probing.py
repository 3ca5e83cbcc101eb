"""Probing leaves no trace, asks once, and costs little."""

import time

import pytest
import torch
import torch.nn.functional as F
import transformers
from kernels import get_kernel
from matching.near_misses import mlp, module, norm
from torch import nn

npu = get_kernel("org/npu-fusion", version=1)
matching, match, specs = npu.matching, npu.matching.match, npu.specs


@pytest.fixture
def probes(monkeypatch):
    """Kinds that are probed from here on."""
    asked = []

    def counting(kind, probe):
        def count(target):
            asked.append(kind)
            return probe(target)

        return count

    monkeypatch.setattr(matching, "PROBES", {kind: counting(kind, probe) for kind, probe in matching.PROBES.items()})
    return asked


def plain():
    return norm(lambda s, x, n: s.scale * n)


def test_one_probe_for_equal_settings(probes):
    first = plain()
    second = object.__new__(type(first))
    nn.Module.__init__(second)
    second.scale, second.epsilon = nn.Parameter(torch.zeros(16)), 1e-6
    assert match(first) is match(second) is match(first.train())
    assert probes == ["norm"]
    second.epsilon = 1e-5
    assert match(second).eps == 1e-5
    assert probes == ["norm", "norm"]


def test_settings_of_equal_value_and_other_type_are_two(probes):
    def body(self, x, n):
        return self.scale * n * (2 if self.flag is True else 1)

    one, true = norm(body, flag=1), norm(body, flag=True)
    true.__class__ = type(one)
    assert isinstance(match(one), specs.Norm)
    assert isinstance(match(true), specs.Declined)


def test_functions_among_the_settings_are_told_apart():
    def body(self, x, g, u):
        return self.act(g) * u

    one, other = mlp(body, act=lambda x: F.silu(x)), mlp(body, act=lambda x: F.gelu(x))
    other.__class__ = type(one)
    assert (match(one).activation, match(other).activation) == ("silu", "gelu")


def test_a_swap_does_not_change_the_answer(probes):
    layer = plain()
    spec = match(layer)
    layer._npu_fusion, layer.forward = spec, lambda x: None
    assert match(layer) is spec
    assert probes == ["norm"]


def state(layer):
    return {name: (id(t), t._version, t.clone()) for name, t in layer.state_dict(keep_vars=True).items()}


@pytest.mark.parametrize("device", ["cpu", "npu", "meta"])
def test_the_module_is_not_touched(device):
    layer = mlp(lambda s, x, g, u: F.silu(g) * u).to(device)
    before, attributes = state(layer), dict(vars(layer))
    assert isinstance(match(layer), specs.MLP)
    assert vars(layer) == attributes
    for name, (identity, version, value) in state(layer).items():
        assert (identity, version) == before[name][:2]
        assert device == "meta" or torch.equal(value, before[name][2])


def test_lists_of_the_module_are_not_touched():
    def body(self, x, n):
        self.seen.append(1)
        return self.scale * n

    layer = norm(body, seen=[])
    assert match(layer).reason == "its forward changes the module's state"
    assert layer.seen == []


def test_no_device_memory_and_no_random_state():
    layer = mlp(lambda s, x, g, u: F.dropout(F.silu(g) * u, 0.1, s.training)).to("npu")
    torch.npu.synchronize()
    torch.manual_seed(7)
    before = torch.get_rng_state(), torch.npu.get_rng_state(), torch.npu.memory_allocated()
    torch.npu.reset_peak_memory_stats()
    assert not match(layer).training
    assert torch.equal(before[0], torch.get_rng_state())
    assert torch.equal(before[1], torch.npu.get_rng_state())
    assert before[2] == torch.npu.memory_allocated() == torch.npu.max_memory_allocated()


def fake_tensors():
    from torch._subclasses import FakeTensorMode

    return FakeTensorMode()


class DefaultDtype:
    def __enter__(self):
        torch.set_default_dtype(torch.bfloat16)

    def __exit__(self, *error):
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    "mode",
    [
        torch.inference_mode,
        torch.no_grad,
        fake_tensors,
        DefaultDtype,
        lambda: torch.autocast("cpu", torch.bfloat16),
        lambda: torch.autocast("npu", torch.bfloat16),
        lambda: torch.device("meta"),
        lambda: torch.device("npu"),
    ],
    ids=["inference", "no_grad", "fake", "bf16", "autocast cpu", "autocast npu", "on meta", "on npu"],
)
def test_the_callers_modes_do_not_matter(mode):
    expected = match(plain())
    layer = plain()
    with mode():
        dtype, device, grad = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()
        assert match(layer) == expected
        assert (torch.get_default_dtype(), torch.get_default_device()) == (dtype, device)
        assert torch.is_grad_enabled() == grad


def test_a_module_that_cannot_be_probed_harms_no_other():
    def raises(self, x):
        raise KeyError("position")

    class Hostile(nn.Module):
        def __getattr__(self, name):
            raise RuntimeError("not here")

        def forward(self, x):
            return x

    assert "KeyError" in match(module(raises, scale=torch.ones(16))).reason
    assert isinstance(match(Hostile()), specs.Declined)
    assert matching.candidate(Hostile()) is None
    assert isinstance(match(plain()), specs.Norm)


def test_a_config_that_refers_to_its_parent():
    config = transformers.LlamaConfig()
    config.parent = config
    layer = plain()
    layer.config = config
    assert isinstance(match(layer), specs.Norm)


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_weights_do_not_matter(value):
    """A norm was once taken for 1 + weight since its weights were near 0 (hiyouga/LlamaFactory#10512)."""
    layer = plain()
    nn.init.constant_(layer.scale, value)
    assert match(layer).offset == 0


def test_a_compiled_forward_is_run_as_it_was_written():
    def backend(graph, inputs):
        raise AssertionError("compiled for a probe")

    layer = plain()
    type(layer).forward = torch.compile(type(layer).forward, backend=backend)
    assert isinstance(match(layer), specs.Norm)


def test_a_large_mixture_of_experts_on_meta_costs_half_a_second():
    config = transformers.Qwen3MoeConfig(
        num_hidden_layers=94, hidden_size=4096, num_attention_heads=64, num_experts=128, moe_intermediate_size=1536
    )
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config)
    matching._answers.clear()
    cold = time.process_time()
    found = [match(m) for m in model.modules()]
    cold = time.process_time() - cold
    warm = time.process_time()
    assert [match(m) for m in model.modules()] == found
    warm = time.process_time() - warm
    # each layer, with its input, post-attention, q and k norms, experts and router; and the last norm
    assert sum(not isinstance(spec, specs.Declined) for spec in found) == 94 * 7 + 1
    assert cold <= 0.5
    assert warm <= 0.25
