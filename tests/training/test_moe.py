"""Training of packed experts as transformers has them: the swapped layer against the class's own loop over experts."""

import copy
from importlib import import_module

import npu_emulator
import pytest
import torch
import transformers
from kernels import get_kernel
from models.families import build_model, token_ids
from peft import LoraConfig, get_peft_model

npu = get_kernel("org/npu-fusion", version=1)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
H, INTER = 12, 10

# class: (module, config, name of the number of experts, settings)
EXPERTS = {
    "Qwen3MoeExperts": ("qwen3_moe", "Qwen3MoeConfig", "num_experts", {"moe_intermediate_size": INTER}),
    "MixtralExperts": ("mixtral", "MixtralConfig", "num_local_experts", {"intermediate_size": INTER}),
    # transposed, with biases, gate and up interleaved, a clamp: its own _apply_gate runs between the grouped products
    "GptOssExperts": ("gpt_oss", "GptOssConfig", "num_local_experts", {"intermediate_size": INTER}),
}

# number of experts, experts of each token; the number itself stands for an expert of another rank
ROUTES = {
    "plain": (4, [[0, 2], [3, 1], [2, 0], [1, 2], [0, 3]]),
    "zero_token_experts": (6, [[4, 1], [1, 4], [4, 1]]),
    "all_tokens_to_one_expert": (4, [[2], [2], [2], [2]]),
    "one_expert": (1, [[0], [0], [0]]),
    "k_is_E": (3, [[0, 1, 2], [2, 1, 0], [1, 0, 2]]),
    "duplicates": (3, [[1, 1], [2, 0], [0, 0]]),
    "sentinels": (3, [[0, 3], [3, 3], [3, 1], [1, 3], [1, 0], [3, 3], [3, 0], [3, 3]]),
    "all_elsewhere": (3, [[3, 3], [3, 3]]),
    "no_tokens": (4, torch.empty(0, 2).tolist()),
}


def build_experts(name, num_experts, seed=0, hidden_size=H, implementation="eager", expert_parallel=False):
    module, config, number, settings = EXPERTS[name]
    config = getattr(transformers, config)(hidden_size=hidden_size, **{number: num_experts}, **settings)
    config._experts_implementation = implementation
    experts = getattr(import_module(f"transformers.models.{module}.modeling_{module}"), name)(config)
    experts._is_expert_parallel = expert_parallel  # as transformers marks experts whose indices may be of another rank
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return experts


def route(name):
    num_experts, index = ROUTES[name]
    index = torch.tensor(index, dtype=torch.int64).reshape(len(index), -1 if index else 2)
    weights = torch.rand(index.shape, generator=torch.Generator().manual_seed(1)).masked_fill(index == num_experts, 0)
    return num_experts, index, weights


def hidden(tokens, hidden_size=H):
    return torch.randn(tokens, hidden_size, generator=torch.Generator().manual_seed(2))


def forward_and_backward(experts, x, index, weights):
    """{name: tensor} of the output, and of the gradients of a fixed weighting of it."""
    x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
    experts.zero_grad()
    output = experts(x, index, weights)
    grad = torch.randn(output.shape, generator=torch.Generator().manual_seed(3)).to(output.dtype).to(output.device)
    if output.requires_grad:  # the loop over experts has nothing to differentiate where no expert is hit
        output.backward(grad)
    tensors = {"output": output, "x": x.grad, "weights": weights.grad}
    tensors.update((name, parameter.grad) for name, parameter in experts.named_parameters())
    return {name: tensor if tensor is None else tensor.detach().cpu() for name, tensor in tensors.items()}


def eager_with_zeroed_sentinels(experts, x, index, weights):
    """A slot of another rank is one of weight zero, whose own gradient is zero: not every loop knows sentinels."""
    foreign = (index == experts.num_experts).cpu()
    result = forward_and_backward(experts, x, index.clamp(max=experts.num_experts - 1), weights)
    if result["weights"] is not None:
        result["weights"] = result["weights"].masked_fill(foreign, 0)
    return result


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("name", ROUTES)
@pytest.mark.parametrize("cls", EXPERTS)
def test_routes_forward_and_backward(cls, name, dtype, fuse):
    num_experts, index, weights = route(name)
    experts = build_experts(cls, num_experts, expert_parallel=bool((index == num_experts).any())).to(dtype)
    x, weights = hidden(len(index)).to(dtype), weights.to(dtype)
    exact = eager_with_zeroed_sentinels(copy.deepcopy(experts).double(), x.double(), index, weights.double())
    experts.to("npu")
    eager = eager_with_zeroed_sentinels(experts, x.to("npu"), index.to("npu"), weights.to("npu"))
    assert npu.report(fuse(experts)).swapped == {"MoEExperts": 1}
    fused = forward_and_backward(experts, x.to("npu"), index.to("npu"), weights.to("npu"))
    for what, right in exact.items():
        if right is None:  # eager has no graph here
            assert fused[what] is None or (fused[what] == 0).all(), what
            continue
        assert fused[what].dtype == eager[what].dtype and fused[what].isfinite().all(), what
        if not right.numel():
            continue
        # gate_up, its activation, the expert's output and the weighted sum are rounded, forward and backward: as far
        # as eager, and a unit in the last place of the largest value for each of the four
        scale = max(right.abs().max().item(), 1.0)
        bound = (eager[what].double() - right).abs().max() + 4 * torch.finfo(dtype).eps * scale
        assert (fused[what].double() - right).abs().max() <= bound, what
    for parameter in ("gate_up_proj", "down_proj"):
        idle = [e for e in range(num_experts) if not (index == e).any()]
        if fused[parameter] is not None and len(index):
            assert (fused[parameter][idle] == 0).all(), "an expert without tokens has a gradient of exactly zero"
    assert (fused["output"][(index == num_experts).all(1)] == 0).all()


@pytest.mark.parametrize("frozen", [("gate_up_proj",), ("down_proj",), ("gate_up_proj", "down_proj")], ids="+".join)
def test_frozen_experts(frozen, fuse):
    num_experts, index, weights = route("sentinels")
    inputs = hidden(len(index)).to("npu"), index.to("npu"), weights.to("npu")
    experts = fuse(build_experts("Qwen3MoeExperts", num_experts, expert_parallel=True).to("npu"))
    everything = forward_and_backward(experts, *inputs)
    for name in frozen:
        getattr(experts, name).requires_grad_(False)
    with npu_emulator.count() as traffic:
        part = forward_and_backward(experts, *inputs)
    for name, expected in everything.items():
        assert part[name] is None if name in frozen else torch.equal(part[name], expected), name
    if npu_emulator.is_emulated():  # 2 products forward, 2 for the inputs' gradients, 1 for each weight's
        products = sum(t.launches for op, t in traffic.by_op.items() if "GroupedMatmul" in op)
        assert products == 6 - len(frozen)


@pytest.mark.parametrize("dtype", DTYPES, ids=["fp32", "bf16", "fp16"])
def test_11_the_second_step_with_tokens_of_other_ranks_has_no_nan(dtype, fuse):
    """Field report 11 (huggingface/transformers#45621, #48205): T=8, k=2, H=4, NaN gradients at the second step."""
    num_experts, index, weights = route("sentinels")
    index, x = index.to("npu"), hidden(8, 4).to(dtype).to("npu")
    weights = weights.to(dtype).to("npu")
    eager = build_experts("Qwen3MoeExperts", num_experts, hidden_size=4, expert_parallel=True).to(dtype).to("npu")
    fused = fuse(copy.deepcopy(eager))
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.01) for module in (eager, fused)]
    for _ in range(3):
        results = [
            eager_with_zeroed_sentinels(eager, x, index, weights),
            forward_and_backward(fused, x, index, weights),
        ]
        for optimizer in optimizers:
            optimizer.step()
        for name, expected in results[0].items():
            assert results[1][name].isfinite().all(), name
            # four roundings a pass on both sides, and the roundings of the steps before
            tolerance = 12 * torch.finfo(dtype).eps * max(expected.abs().max().item(), 1.0)
            assert (results[1][name] - expected).abs().max() <= tolerance, name


@pytest.mark.skipif(not npu_emulator.is_emulated(), reason="only the emulator counts bytes")
@pytest.mark.parametrize("cls", EXPERTS)
def test_8_no_weight_is_copied(cls, fuse):
    """Field report 8 (modelscope/twinkle#205): transposing packed experts copied 12.88 GB a layer."""
    experts = fuse(build_experts(cls, 64).bfloat16().to("npu"))
    index = torch.tensor([[0, 2], [1, 0]]).to("npu")
    x, weights = hidden(2).bfloat16().to("npu"), torch.rand(2, 2).bfloat16().to("npu")
    with npu_emulator.count() as traffic:
        experts(x, index, weights).sum().backward()
    packed = experts.down_proj.numel() * 2
    rows = {op: t for op, t in traffic.by_op.items() if max(t.bytes_read, t.bytes_written) >= packed}
    # of all ops, only the products of the weights' gradients touch as many bytes as all experts have; for their biases
    # too, the products write [E, ...] only
    assert rows.keys() <= {"aclnnGroupedMatmulV4", "aclnnGroupedMatmulV5"}, traffic
    assert all(t.bytes_read < packed for t in rows.values()), traffic


def lora(model):
    torch.manual_seed(0)
    config = LoraConfig(
        r=2,
        lora_alpha=4,
        init_lora_weights=False,
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )
    return get_peft_model(model, config)


def lora_gradients(model):
    ids = token_ids().to("npu")
    output = model(input_ids=ids, labels=ids)
    output.loss.backward()
    gradients = {n: p.grad.cpu().clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return output.loss.item(), gradients


@pytest.mark.parametrize("order", ["kernelize, then peft", "peft, then kernelize"])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral"])
def test_lora_on_packed_experts(family, order, fuse):
    """peft puts W + BA in the place of the parameter while the wrapped module runs, so the swapped layer reads that."""
    loss, gradients = lora_gradients(lora(build_model(family).to("npu")))
    assert any("experts" in name for name in gradients) and all("lora_" in name for name in gradients)
    model = build_model(family).to("npu")
    model = lora(fuse(model)) if order.startswith("kernelize") else fuse(lora(model))
    assert npu.report(model).swapped["MoEExperts"] == 2
    fused_loss, fused_gradients = lora_gradients(model)
    # fp32 sums of at most 128 terms in another order, through two layers there and back
    assert abs(fused_loss - loss) <= 2**-19 * loss
    assert fused_gradients.keys() == gradients.keys()
    for name, expected in gradients.items():
        assert (fused_gradients[name] - expected).abs().max() <= 2**-17 * expected.abs().max() + 1e-9, name


def test_lora_adapters_off_and_merged(fuse):
    model = lora(build_model("qwen3_moe").to("npu"))
    ids = token_ids().to("npu")
    with torch.no_grad(), model.disable_adapter():
        off = model(ids).logits
    with torch.no_grad():
        on = model(ids).logits
        fuse(model)
        fused_on = model(ids).logits
        with model.disable_adapter():
            fused_off = model(ids).logits
        merged = model.merge_and_unload()
        fused_merged = merged(ids).logits
    assert npu.report(merged).swapped["MoEExperts"] == 2
    assert (on - off).abs().max() > 0.1, "the adapter does something"
    for result, expected in ((fused_on, on), (fused_off, off), (fused_merged, on)):
        # fp32 sums of at most 128 terms in another order; merged, W + BA is rounded before it is multiplied
        assert (result - expected).abs().max() <= 2**-18 * expected.abs().max()


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_any_experts_implementation_is_replaced(implementation, fuse):
    """What the model would have run without the swap does not matter: the results are those of its definition."""
    num_experts, index, weights = route("plain")
    inputs = hidden(len(index)).to("npu"), index.to("npu"), weights.to("npu")
    expected = forward_and_backward(build_experts("Qwen3MoeExperts", num_experts).to("npu"), *inputs)
    fused = fuse(build_experts("Qwen3MoeExperts", num_experts, implementation=implementation).to("npu"))
    for name, result in forward_and_backward(fused, *inputs).items():
        # fp32 sums of at most 20 terms in another order: a few units in the last place
        assert (result - expected[name]).abs().max() <= 2**-20 * expected[name].abs().max(), name
