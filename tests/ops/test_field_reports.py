"""What people ran into elsewhere (docs name the issues), with the right value."""

import pytest
import torch
from kernels import get_kernel

ops = get_kernel("org/npu-fusion", version=1).ops


def randn(*shape, seed=0, dtype=torch.float32, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def leaf(tensor, device="npu"):
    return tensor.detach().to(device).requires_grad_()


def test_1_gradients_of_packed_experts_are_finite_and_eagers():
    """modelscope/ms-swift#8207: integer histc, NaN in the backward."""
    index = torch.randint(8, (16, 2), generator=torch.Generator().manual_seed(0))
    inputs = [randn(16, 12), torch.rand(16, 2), randn(8, 20, 12, scale=0.3), randn(8, 12, 10, scale=0.3)]
    grads = []
    for device, function in (("npu", ops.moe_experts), ("cpu", ops.experts_reference)):
        x, weights, gate_up, down = (leaf(t, device) for t in inputs)
        function(x, index.to(device), weights, gate_up, down).square().sum().backward()
        grads.append([t.grad.cpu() for t in (x, weights, gate_up, down)])
    for fused, eager in zip(*grads, strict=True):
        assert fused.isfinite().all()
        # fp32 sums of at most 40 terms in another order
        torch.testing.assert_close(fused, eager, rtol=1e-4, atol=1e-5)
    counts = ops.moe_permute(inputs[0].to("npu"), index.to("npu"), 8)[2]
    assert counts.dtype == torch.int64 and counts.tolist() == torch.bincount(index.flatten(), minlength=8).tolist()


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(2, 8, 1, 64), (2, 32, 1, 128), (4, 32, 3, 64), (2, 3, 5, 40), (3, 40, 9, 16)])
def test_2_short_sequences_never_meet_561002(shape, dtype, interleaved):
    """modelscope/ms-swift#9329: BNSD, cos [1, 1, S, D], B * N > 8 * S."""
    sequence, width = shape[2:]
    x, angle = randn(*shape, dtype=dtype), randn(1, 1, sequence, width, seed=1)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    x_npu = leaf(x)
    out = ops.rotary(x_npu, cos.to("npu"), sin.to("npu"), interleaved)
    out.backward(torch.ones_like(out))
    reference = ops.rotary_reference(x.double(), cos.double(), sin.double(), interleaved)
    # one rounding to the dtype of values below 8: half a unit in the last place
    torch.testing.assert_close(
        out.cpu().double(), reference, rtol=torch.finfo(dtype).eps, atol=4 * torch.finfo(dtype).eps
    )
    assert x_npu.grad.isfinite().all()


def test_2_the_bare_op_does_refuse():
    """Otherwise the test above would prove nothing."""
    x, table = randn(2, 32, 3, 64).to("npu"), randn(1, 1, 3, 64).to("npu")
    with pytest.raises(RuntimeError, match="561002"):
        torch.ops.npu.npu_rotary_mul(x, table, table)


@pytest.mark.parametrize("interleaved", [False, True])
def test_3_partial_rotary(interleaved):
    """vllm-project/vllm-ascend#6060: GLM-4 rotates 64 of 128 and passes the rest through."""
    x, angle = randn(2, 4, 6, 128), randn(1, 1, 6, 64, seed=1)
    out = ops.rotary(x.to("npu"), angle.cos().to("npu"), angle.sin().to("npu"), interleaved).cpu()
    assert torch.equal(out[..., 64:], x[..., 64:])
    # fp32: one rounding here, three in eager
    torch.testing.assert_close(out[..., :64], ops.rotary_reference(x[..., :64], angle.cos(), angle.sin(), interleaved))


def test_4_a_norm_without_weight():
    """huggingface/diffusers#14380: x [2, 16, 64] crashed."""
    x = randn(2, 16, 64)
    torch.testing.assert_close(ops.rms_norm(x.to("npu")).cpu(), x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_11_tokens_of_other_ranks_leave_no_nan(dtype):
    """huggingface/transformers#45621, #48205: T=8, k=2, H=4, NaN gradients at the second step. In the emulator, memory
    that nobody wrote holds NaN."""
    index = torch.tensor([[0, 3], [3, 3], [3, 1], [3, 2], [1, 0], [3, 3], [3, 0], [3, 3]])  # 3: not on this rank
    weights = torch.rand(8, 2, dtype=torch.float64).masked_fill(index == 3, 0)
    values = [
        randn(8, 4, dtype=torch.float64),
        weights,
        randn(3, 12, 4, seed=1, dtype=torch.float64),
        randn(3, 4, 6, seed=2, dtype=torch.float64),
    ]
    fused = [leaf(v.to(dtype)) for v in values]
    exact = [leaf(v.to(dtype).double(), "cpu") for v in values]
    for _ in range(2):
        outs = []
        for function, (x, w, gate_up, down), where in (
            (ops.moe_experts, fused, "npu"),
            (ops.experts_reference, exact, "cpu"),
        ):
            out = function(x, index.to(where), w, gate_up, down)
            out.sum().backward()
            outs.append(out.detach())
            with torch.no_grad():
                for parameter in (gate_up, down):
                    parameter.sub_(parameter.grad * 1e-3)
        for a, b in zip([outs[0], *(t.grad for t in fused)], [outs[1], *(t.grad for t in exact)], strict=True):
            assert a.isfinite().all()
            # five roundings in a row of values up to the largest: gate_up, hidden, out, the weighted sum, the step
            torch.testing.assert_close(
                a.cpu().double(), b, rtol=0, atol=5 * torch.finfo(dtype).eps * b.abs().max().item()
            )
        nowhere = (index == 3).all(1)
        assert (outs[0].cpu()[nowhere] == 0).all() and (fused[0].grad.cpu()[nowhere] == 0).all()
        assert (fused[1].grad.cpu()[index == 3] == 0).all()


@pytest.mark.parametrize("casting_mode", ["llama", "gemma"])
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("weight", [0.00390625, 15.8125])
def test_13_one_is_added_to_the_weight_in_fp32(weight, grad, casting_mode):
    """huggingface/kernels-community#105: in bf16, 1 + 0.00390625 is 1 and 1 + 15.8125 is 16.75."""
    x = torch.ones(1, 8, dtype=torch.bfloat16).to("npu")
    w = torch.full((8,), weight, dtype=torch.bfloat16).to("npu").requires_grad_(grad)
    for scale in (1.0, 3.0):  # x is normalized to 1
        normed = ops.rms_norm(x * scale, w, 0.0, offset=1, casting_mode=casting_mode)
        assert torch.equal(normed.cpu(), torch.full((1, 8), 1 + weight).bfloat16())
    wide = ops.rms_norm(x.float(), w, 0.0, offset=1, casting_mode=casting_mode)
    torch.testing.assert_close(wide.cpu(), torch.full((1, 8), 1 + weight))
