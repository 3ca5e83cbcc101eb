"""No near miss is taken for the real thing, and each bench of the zoo recognises its unspoilt animal."""

import pytest
import torch
import torch.nn.functional as F
from kernels import get_kernel
from matching import near_misses as zoo

npu = get_kernel("org/npu-fusion", version=1)
match, specs = npu.matching.match, npu.specs


@pytest.mark.parametrize("name", zoo.NEAR_MISSES)
def test_near_miss_is_declined(name):
    target = zoo.NEAR_MISSES[name]()
    spec = match(target)
    assert isinstance(spec, specs.Declined), spec
    assert len(spec.reason) > 10


def test_the_zoo_is_large():
    assert len(zoo.NEAR_MISSES) >= 60


UNSPOILT = {
    "norm": (lambda: zoo.norm(lambda s, x, n: s.scale * n), specs.Norm),
    "gated norm": (
        lambda: zoo.gated_norm(
            lambda s, x, g: (s.scale * zoo.rms(x.float(), s.epsilon).to(x.dtype) * F.silu(g.float())).to(x.dtype)
        ),
        specs.GatedNorm,
    ),
    "mlp": (lambda: zoo.mlp(lambda s, x, g, u: F.silu(g) * u), specs.MLP),
    "rotary": (lambda: zoo.rotary(lambda x, c, s, q: x * c + zoo.rotate_half(x) * s), specs.Rotary),
    "experts": (lambda: zoo.experts(lambda s, x, g, u: F.silu(g) * u), specs.Experts),
    "router": (lambda: zoo.router(lambda logits: zoo.top(logits.softmax(-1))), specs.Router),
}


@pytest.mark.parametrize("kind", UNSPOILT)
def test_unspoilt_layer_is_recognised(kind):
    make, expected = UNSPOILT[kind]
    assert isinstance(match(make()), expected)


def test_a_clamp_that_its_settings_switch_off_is_none():
    def body(self, x, n):
        return self.scale * (n if self.limit is None else n.clamp(-self.limit, self.limit))

    limited, free = zoo.norm(body, limit=1.0), zoo.norm(body, limit=None)
    free.__class__ = type(limited)  # one class, two settings
    assert isinstance(match(limited), specs.Declined)
    assert isinstance(match(free), specs.Norm)
    assert torch.equal(free(torch.ones(1, 1, zoo.DIM)), limited(torch.ones(1, 1, zoo.DIM)))
