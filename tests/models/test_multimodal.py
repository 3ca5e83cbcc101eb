"""Vision towers, partial and multimodal rotary embedding, gated norms and linear attention: parity with eager."""

import pytest
import torch
from kernels import get_kernel
from models.families import loss_and_gradients
from models.multimodal import FAMILIES, build_model, inputs

npu = get_kernel("org/npu-fusion", version=1)


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def test_every_place_is_swapped_and_reported(family, fuse):
    assert npu.report(fuse(build_model(family))).swapped == FAMILIES[family][2]


def test_fp32_equals_eager_forward_and_backward(family, fuse):
    model, on_npu = build_model(family).to("npu"), inputs(family, "npu")
    logits, gradients = loss_and_gradients(model, on_npu)
    fused_logits, fused_gradients = loss_and_gradients(fuse(model), on_npu)
    # fp32 holds 24 bits; sums over at most 160 terms in another order move the last 4 of them; text and vision are four
    # layers in a row: one bit more
    assert (fused_logits - logits).abs().max() <= 2**-18 * logits.abs().max()
    assert fused_gradients.keys() == gradients.keys()
    for name, expected in gradients.items():
        # a gradient passes the forward and the backward of all of them: two bits more
        assert (fused_gradients[name] - expected).abs().max() <= 2**-16 * expected.abs().max() + 1e-8, name


def test_bf16_stays_near_eager(family, fuse):
    model, on_npu = build_model(family, torch.bfloat16).to("npu"), inputs(family, "npu", torch.bfloat16)
    with torch.no_grad():
        expected = model(**on_npu).logits.float()
        result = fuse(model)(**on_npu).logits.float()
    # bf16 holds 8 bits; some thirty roundings in a row differ by half an ulp each and add up like a random walk:
    # sqrt(30) / 2 * 2**-8 = 1 % of the largest logit on average
    assert (result - expected).abs().mean() <= 0.01 * expected.abs().max()


def test_generates_the_same_tokens(family, fuse):
    model, on_npu = build_model(family).to("npu"), inputs(family, "npu")
    expected = model.generate(**on_npu, max_new_tokens=8, do_sample=False)
    assert torch.equal(fuse(model).generate(**on_npu, max_new_tokens=8, do_sample=False), expected)


def test_after_register_functions_of_every_signature_are_swapped_rightly(family, registered, fuse):
    model, on_npu = build_model(family).to("npu"), inputs(family, "npu")
    with torch.no_grad():
        expected = model(**on_npu).logits
        assert npu.report(fuse(model)).swapped == FAMILIES[family][2]
        assert (model(**on_npu).logits - expected).abs().max() <= 2**-18 * expected.abs().max()  # as above
    assert npu.report(npu.restore(model)).swapped == {}
