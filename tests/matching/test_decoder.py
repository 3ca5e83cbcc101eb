"""Pre-norm decoder layers are known by their wiring; whatever is wired in another way is left alone."""

import pytest
import torch
from kernels import get_kernel
from models.families import FAMILIES, build_model
from torch import nn

npu = get_kernel("org/npu-fusion", version=1)


class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.tiny = nn.Parameter(torch.rand(8) + 0.5), 1e-5

    def forward(self, x):
        return self.scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.tiny))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, hidden_states, mask=None, cache=None, **kwargs):
        mixed = self.mix(hidden_states)
        return (mixed if mask is None else mixed * mask), None


class Block(nn.Module):
    """Names that no table knows."""

    def __init__(self):
        super().__init__()
        self.before, self.look, self.between = Norm(), Attention(), Norm()
        self.think = nn.Sequential(nn.Linear(8, 8), nn.Tanh())

    def forward(self, hidden_states, mask=None, cache=None, **kwargs):
        looked, _ = self.look(hidden_states=self.before(hidden_states), mask=mask, cache=cache, **kwargs)
        hidden_states = hidden_states + looked
        return hidden_states + self.think(self.between(hidden_states))


class Scaled(Block):
    def forward(self, hidden_states, mask=None, cache=None, **kwargs):
        looked, _ = self.look(hidden_states=self.before(hidden_states), mask=mask, cache=cache, **kwargs)
        hidden_states = hidden_states + looked * 1.001
        return hidden_states + self.think(self.between(hidden_states))


class Parallel(Block):
    def forward(self, hidden_states, mask=None, cache=None, **kwargs):
        looked, _ = self.look(hidden_states=self.before(hidden_states), mask=mask, cache=cache, **kwargs)
        return hidden_states + looked + self.think(self.between(hidden_states))


class PostNorm(Block):
    def forward(self, hidden_states, mask=None, cache=None, **kwargs):
        looked, _ = self.look(hidden_states=hidden_states, mask=mask, cache=cache, **kwargs)
        hidden_states = hidden_states + self.before(looked)
        return hidden_states + self.between(self.think(hidden_states))


class ResidualOfTheNorm(Block):
    def forward(self, hidden_states, mask=None, cache=None, **kwargs):
        hidden_states = self.before(hidden_states)
        looked, _ = self.look(hidden_states=hidden_states, mask=mask, cache=cache, **kwargs)
        hidden_states = hidden_states + looked
        return hidden_states + self.think(self.between(hidden_states))


class KeepsTheMask(Block):
    def forward(self, hidden_states, mask=None, cache=None, **kwargs):
        looked, _ = self.look(hidden_states=self.before(hidden_states), cache=cache)
        hidden_states = hidden_states + looked
        return hidden_states + self.think(self.between(hidden_states))


class ChangesTheMask(Block):
    def forward(self, hidden_states, mask=None, cache=None, **kwargs):
        mask = None if mask is None else [mask]
        looked, _ = self.look(hidden_states=self.before(hidden_states), mask=mask, cache=cache, **kwargs)
        hidden_states = hidden_states + looked
        return hidden_states + self.think(self.between(hidden_states))


class SwapsArguments(Block):
    def forward(self, hidden_states, mask=None, cache=None, **kwargs):
        looked, _ = self.look(hidden_states=self.before(hidden_states), mask=cache, cache=mask, **kwargs)
        hidden_states = hidden_states + looked
        return hidden_states + self.think(self.between(hidden_states))


class ReturnsATuple(Block):
    def forward(self, hidden_states, mask=None, cache=None, **kwargs):
        return (super().forward(hidden_states, mask, cache, **kwargs),)


class Dropped(Block):
    def forward(self, hidden_states, mask=None, cache=None, **kwargs):
        out = super().forward(hidden_states, mask, cache, **kwargs)
        return nn.functional.dropout(out, 0.5, self.training)


NEAR_MISSES = (
    Scaled,
    Parallel,
    PostNorm,
    ResidualOfTheNorm,
    KeepsTheMask,
    ChangesTheMask,
    SwapsArguments,
    ReturnsATuple,
    Dropped,
)


def run(block, device, **arguments):
    x = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0)).to(device)
    return block.to(device)(x, **arguments)


@pytest.mark.parametrize("arguments", [{}, {"mask": 0.5}, {"cache": "kept", "more": 1}], ids=str)
def test_a_block_of_unknown_names_runs_fused_and_equals_eager(arguments):
    block = Block()
    expected = run(block, "npu", **arguments)
    assert npu.report(npu.kernelize(block)).swapped == {"PreNormDecoderLayer": 1, "RMSNorm": 2}
    # fp32: sums of 8 terms in another order, some ulps of 2**-24 at values near 1
    torch.testing.assert_close(run(block, "npu", **arguments), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("cls", NEAR_MISSES, ids=lambda cls: cls.__name__)
@pytest.mark.parametrize("training", [False, True])
def test_near_misses_are_left_alone(cls, training):
    assert "PreNormDecoderLayer" not in npu.plan(cls().train(training)).swapped


def test_positional_arguments_go_to_the_original():
    block = npu.kernelize(Block()).to("npu")
    x = torch.randn(2, 3, 8, device="npu")
    # fp32: sums of 8 terms in another order, some ulps of 2**-24 at values near 1
    torch.testing.assert_close(block(x, 0.5), block(x, mask=0.5), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_layers_of_one_class_are_probed_once(family, monkeypatch):
    model, probed = build_model(family), []
    probe = npu.matching.PROBES["decoder"]
    monkeypatch.setitem(npu.matching.PROBES, "decoder", lambda module: probed.append(module) or probe(module))
    npu.matching._answers.clear()
    assert npu.plan(model).swapped["PreNormDecoderLayer"] == 2
    assert len(probed) <= 2, "layers differ in their index alone"
