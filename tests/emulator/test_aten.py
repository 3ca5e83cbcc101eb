"""Ordinary aten ops on the emulated npu: the CPU's kernels on device memory, so results equal the CPU's exactly."""

import copy
import math
from typing import NamedTuple

import npu_emulator
import pytest
import torch
import torch.nn.functional as F

pytestmark = pytest.mark.skipif(not npu_emulator.is_emulated(), reason="real hardware: nothing is emulated")

FP32, BF16, FP16, I64 = torch.float32, torch.bfloat16, torch.float16, torch.int64
FLOATS = (FP32, BF16, FP16)
ALL = (*FLOATS, I64)


class Case(NamedTuple):
    """An op: what to call, the shapes of its tensors, and the dtypes to try."""

    name: str
    function: object
    shapes: tuple = ((4, 6),)
    dtypes: tuple = FLOATS


PAIR = ((4, 6), (4, 6))
INDEX = torch.tensor([2, 0, 3])

CASES = [
    # elementwise
    Case("add_broadcast", lambda a, b: a + b, ((4, 6), (6,)), ALL),
    Case("add_alpha", lambda a, b: torch.add(a, b, alpha=2), PAIR, ALL),
    Case("sub_scalar", lambda a: 3 - a, dtypes=ALL),
    Case("mul", torch.mul, PAIR, ALL),
    Case("div", torch.div, PAIR, ALL),
    Case("floor_divide", lambda a: a // 3, dtypes=ALL),
    Case("remainder", lambda a: a % 3, dtypes=ALL),
    Case("pow", lambda a: a.pow(2), dtypes=ALL),
    Case("neg", torch.neg, dtypes=ALL),
    Case("abs", torch.abs, dtypes=ALL),
    Case("sign", torch.sign, dtypes=ALL),
    Case("clamp", lambda a: a.clamp(-1, 1), dtypes=ALL),
    Case("maximum", torch.maximum, PAIR, ALL),
    Case("exp", torch.exp),
    Case("log1p_abs", lambda a: a.abs().log1p()),
    Case("rsqrt", lambda a: a.abs().add(1).rsqrt()),
    Case("sin_cos", lambda a: a.sin() * a.cos()),
    Case("tanh", torch.tanh),
    Case("sigmoid", torch.sigmoid),
    Case("silu", F.silu),
    Case("relu", F.relu, dtypes=ALL),
    Case("softplus", F.softplus),
    Case("isnan", lambda a: torch.isnan(a / a.round())),
    Case("where", lambda a, b: torch.where(a > b, a, b), PAIR, ALL),
    Case("masked_fill", lambda a: a.masked_fill(a > 0, -1), dtypes=ALL),
    Case("lerp", lambda a, b: a.lerp(b, 0.25), PAIR),
    Case("addcmul", lambda a, b, c: torch.addcmul(a, b, c), ((4, 6),) * 3),
    Case("logical", lambda a, b: (a > 0) & ~(b > 0) | (a == b), PAIR, ALL),
    Case("bitwise", lambda a, b: (a ^ b) << 1, PAIR, (I64,)),
    # reductions and scans
    Case("sum", torch.sum, dtypes=ALL),
    Case("sum_dim", lambda a: a.sum(0, keepdim=True), dtypes=ALL),
    Case("sum_dtype", lambda a: a.sum(-1, dtype=FP32), dtypes=ALL),
    Case("mean", lambda a: a.mean(-1)),
    Case("var", lambda a: a.var(-1)),
    Case("amax", lambda a: a.amax(-1), dtypes=ALL),
    Case("max_dim", lambda a: a.max(1), dtypes=ALL),
    Case("argmax", lambda a: a.argmax(-1), dtypes=ALL),
    Case("any_all", lambda a: ((a > 0).any(1), (a > 0).all()), dtypes=ALL),
    Case("prod", lambda a: a.prod(1), dtypes=ALL),
    Case("cumsum", lambda a: a.cumsum(0), dtypes=ALL),
    Case("norm", lambda a: torch.linalg.vector_norm(a)),
    Case("logsumexp", lambda a: a.logsumexp(-1)),
    Case("count_nonzero", torch.count_nonzero, dtypes=ALL),
    # products
    Case("mm", torch.mm, ((4, 6), (6, 5))),
    Case("mm_transposed", lambda a, b: a @ b.t(), PAIR),
    Case("bmm", torch.bmm, ((2, 4, 6), (2, 6, 3))),
    Case("matmul_broadcast", torch.matmul, ((2, 1, 4, 6), (3, 6, 5))),
    Case("addmm", lambda c, a, b: torch.addmm(c, a, b, beta=2, alpha=3), ((5,), (4, 6), (6, 5))),
    Case("baddbmm", torch.baddbmm, ((2, 4, 3), (2, 4, 6), (2, 6, 3))),
    Case("linear", F.linear, ((2, 3, 6), (5, 6), (5,))),
    Case("einsum", lambda a, b: torch.einsum("bij,bkj->bik", a, b), ((2, 4, 6), (2, 3, 6))),
    Case("outer", torch.outer, ((4,), (6,)), ALL),
    # networks
    Case("softmax", lambda a: a.softmax(-1)),
    Case("softmax_float", lambda a: a.softmax(-1, dtype=FP32)),
    Case("log_softmax", lambda a: a.log_softmax(-1)),
    Case("layer_norm", lambda a, w: F.layer_norm(a, (6,), w), ((4, 6), (6,))),
    Case("group_norm", lambda a: F.group_norm(a, 2), ((2, 4, 3),)),
    Case("conv1d", lambda a, w: F.conv1d(a, w, padding=1, groups=2), ((2, 4, 9), (6, 2, 3)), (FP32,)),
    Case("conv2d", F.conv2d, ((1, 2, 5, 5), (3, 2, 3, 3)), (FP32,)),
    Case("avg_pool", lambda a: F.avg_pool2d(a, 2), ((1, 2, 4, 4),), (FP32,)),
    Case("interpolate", lambda a: F.interpolate(a, scale_factor=2.0), ((1, 2, 3, 3),), (FP32,)),
    Case("pad", lambda a: F.pad(a, (1, 2)), dtypes=ALL),
    # indexing and layout
    Case("cat", lambda a, b: torch.cat((a, b), 1), PAIR, ALL),
    Case("stack", lambda a, b: torch.stack((a, b)), PAIR, ALL),
    Case("roll", lambda a: a.roll(1, 1), dtypes=ALL),
    Case("flip", lambda a: a.flip(0), dtypes=ALL),
    Case("tril", torch.tril, dtypes=ALL),
    Case("repeat", lambda a: a.repeat(2, 1), dtypes=ALL),
    Case("repeat_interleave", lambda a: a.repeat_interleave(2, dim=0), dtypes=ALL),
    Case("index_select", lambda a: a.index_select(0, INDEX.to(a.device)), dtypes=ALL),
    Case("index", lambda a: a[INDEX.to(a.device), INDEX.to(a.device)], dtypes=ALL),
    Case("index_host", lambda a: a[INDEX], dtypes=ALL),
    Case("index_mask", lambda a: a[a > 0], dtypes=ALL),
    Case("gather", lambda a: a.gather(1, a.argsort(1)), dtypes=ALL),
    Case("embedding", lambda w: F.embedding(INDEX.to(w.device), w)),
    Case("nonzero", torch.nonzero, dtypes=ALL),
    Case("unique", lambda a: a.unique(return_inverse=True, return_counts=True), dtypes=ALL),
    Case("sort", lambda a: a.sort(-1, descending=True), dtypes=ALL),
    Case("topk", lambda a: a.topk(3, dim=-1), dtypes=ALL),
    Case("one_hot", lambda a: F.one_hot(a.abs(), 16), dtypes=(I64,)),
    Case("bincount", lambda a: a.abs().flatten().bincount(minlength=20), dtypes=(I64,)),
    Case("searchsorted", lambda a: torch.searchsorted(a.sort(-1).values, a), dtypes=ALL),
    Case("histc", lambda a: torch.histc(a, bins=5, min=-4, max=4), dtypes=(FP32,)),
    # in place, and into views
    Case("add_", lambda a, b: a.clone().add_(b), PAIR, ALL),
    Case("copy_strided", lambda a, b: a.clone().t().copy_(b.t()), PAIR, ALL),
    Case("setitem", lambda a: a.clone().index_fill_(0, INDEX.to(a.device), 7), dtypes=ALL),
    Case("slice_assign", lambda a: _assign(a.clone(), (slice(1, 3), slice(0, 6, 2)), 5), dtypes=ALL),
    Case("index_put_host", lambda a: _assign(a.clone(), (INDEX, INDEX), 9), dtypes=ALL),
    Case("index_add", lambda a, b: a.clone().index_add_(0, INDEX.to(a.device), b[:3]), PAIR, ALL),
    Case("scatter_add", lambda a, b: a.clone().scatter_add_(0, torch.zeros_like(a, dtype=I64), b), PAIR, ALL),
    Case("index_copy", lambda a, b: a.clone().index_copy_(0, INDEX.to(a.device), b[:3]), PAIR, ALL),
    Case("masked_scatter", lambda a, b: a.masked_scatter(a > 0, b), PAIR, ALL),
    Case("overlap_shift", lambda a: _assign(a.clone(), slice(1, 4), a[:3]), dtypes=ALL),
    # made on the device
    Case("full", lambda a: torch.full((2, 3), 2.5, dtype=a.dtype, device=a.device)),
    Case("arange", lambda a: torch.arange(0, 10, 3, dtype=a.dtype, device=a.device), dtypes=ALL),
    Case("linspace", lambda a: torch.linspace(0, 1, 5, dtype=a.dtype, device=a.device)),
    Case("eye", lambda a: torch.eye(3, dtype=a.dtype, device=a.device), dtypes=ALL),
    Case("ones_like", torch.ones_like, dtypes=ALL),
    Case("to_dtype", lambda a: a.to(FP32).to(I64).to(a.dtype), dtypes=ALL),
    # lists
    Case("foreach_add", lambda a, b: torch._foreach_add([a, b], [b, a], alpha=2), PAIR, ALL),
    Case("foreach_norm", lambda a, b: torch._foreach_norm([a, b]), PAIR),
]


def _assign(tensor, index, value):
    tensor[index] = value
    return tensor


def on_host(result):
    """The tensors of a result, on the host."""
    if isinstance(result, torch.Tensor):
        return [result.cpu()]
    return [tensor.cpu() for tensor in result]


def data(shapes, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(-9, 10, shape, generator=generator)
        if dtype == I64
        else torch.randn(shape, generator=generator).to(dtype)
        for shape in shapes
    ]


def same(actual, expected):
    actual, expected = on_host(actual), on_host(expected)
    assert len(actual) == len(expected)
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        assert torch.allclose(a, e, rtol=0, atol=0, equal_nan=True) and a.shape == e.shape


@pytest.mark.parametrize(("case", "dtype"), [pytest.param(c, d, id=f"{c.name}-{d}") for c in CASES for d in c.dtypes])
def test_op_equals_cpu(case, dtype):
    inputs = data(case.shapes, dtype)
    device_inputs = [tensor.npu() for tensor in inputs]
    result = case.function(*device_inputs)
    for tensor in [result] if isinstance(result, torch.Tensor) else result:
        assert tensor.device.type == "npu"
    same(result, case.function(*inputs))
    same(device_inputs, inputs)  # inputs are left alone


STRIDED = ("add_broadcast", "mul", "sum_dim", "softmax", "cat", "mm", "index_select", "cumsum", "sort", "silu")


@pytest.mark.parametrize("case", [c for c in CASES if c.name in STRIDED], ids=lambda c: c.name)
def test_op_on_views_equals_cpu(case):
    """Transposed, sliced with an offset, and expanded inputs."""
    for view in (
        lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
        lambda t: torch.cat((t, t, t))[t.shape[0] :: 2][: t.shape[0]],
        lambda t: t[..., :1].expand(t.shape),
    ):
        inputs = [view(tensor) for tensor in data(case.shapes, FP32)]
        same(case.function(*[view(tensor.npu()) for tensor in data(case.shapes, FP32)]), case.function(*inputs))


@pytest.mark.parametrize("shape", [(0,), (0, 6), (4, 0)], ids=str)
def test_zero_size(shape):
    x = torch.ones(shape, device="npu")
    assert (x + 1).shape == shape and x.sum().item() == 0
    assert torch.cat((x, x)).shape[0] == 2 * shape[0]
    assert x.nonzero().shape == (0, len(shape))


def test_product_over_nothing_is_zero():
    product = torch.ones(4, 0, device="npu") @ torch.ones(0, 3, device="npu")
    assert torch.equal(product.cpu(), torch.zeros(4, 3))


def test_out_argument_is_written_resized_and_keeps_its_strides():
    a, b = (tensor.npu() for tensor in data(PAIR, FP32))
    out = torch.empty(6, 4, device="npu").t()
    assert torch.add(a, b, out=out) is out and out.stride() == (1, 4)
    same(out, a.cpu() + b.cpu())

    empty = torch.empty(0, device="npu")
    torch.mm(a, b.t(), out=empty)
    same(empty, a.cpu() @ b.cpu().t())
    with pytest.warns(UserWarning, match="resized"):
        torch.add(a, b, out=(other := torch.empty(50, device="npu")))
    same(other, a.cpu() + b.cpu())

    values, indices = torch.empty(0, device="npu"), torch.empty(0, dtype=I64, device="npu")
    torch.sort(a, dim=1, out=(values, indices))
    same((values, indices), a.cpu().sort(1))


def test_overlapping_memory_is_refused_as_on_any_device():
    x = torch.zeros(3, device="npu").expand(4, 3)
    with pytest.raises(RuntimeError, match="single memory location"):
        x.add_(1)


def test_views_share_memory():
    x = torch.zeros(4, 6, device="npu")
    x[1:3].t()[2].fill_(5)
    assert x.cpu()[1:3, 2].tolist() == [5, 5] and x.sum().item() == 10
    assert x.view(6, 4).data_ptr() == x.data_ptr() == x.reshape(-1).data_ptr()


def test_integer_histogram_exists_on_npu_though_not_on_cpu():
    x = torch.tensor([1, 2, 2, 5], device="npu")
    assert torch.histc(x, bins=6, min=0, max=5).tolist() == [0, 1, 2, 0, 0, 1]


def test_complex_and_conjugate_views():
    x = torch.view_as_complex(torch.randn(3, 4, 2))
    same(x.npu().conj() * x.npu(), x.conj() * x)
    same(torch.view_as_real(x.npu().clone()), torch.view_as_real(x))


# ---- random numbers


def test_generator_decides_what_is_drawn():
    def draw():
        return [
            torch.randn(5, device="npu"),
            torch.rand(5, device="npu"),
            torch.randint(100, (5,), device="npu").float(),
            torch.randperm(50, device="npu").float(),
            torch.multinomial(torch.ones(50, device="npu"), 5).float(),
            torch.empty(5, device="npu").exponential_(),
            F.dropout(torch.ones(50, device="npu")),
            torch.bernoulli(torch.full((50,), 0.5, device="npu")),
        ]

    torch.manual_seed(7)
    first, second = draw(), draw()
    torch.manual_seed(7)
    again = draw()
    for a, b, c in zip(first, second, again, strict=True):
        assert torch.equal(a, c) and not torch.equal(a, b)


def test_generator_state_and_explicit_generators():
    torch.npu.manual_seed(1)
    state = torch.npu.get_rng_state()
    x = torch.rand(3, device="npu")
    torch.npu.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="npu"), x)
    mine = torch.Generator("npu").manual_seed(1)
    assert torch.equal(torch.rand(3, device="npu", generator=mine), x)
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, device="npu", generator=torch.Generator())


def test_drawing_on_npu_leaves_the_cpu_generator_alone():
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    F.dropout(torch.ones(9, device="npu"))
    torch.randperm(9, device="npu")
    assert torch.equal(torch.rand(2), expected)


def test_dropout_scales_and_differentiates_by_its_mask():
    x = torch.ones(1000, device="npu", requires_grad=True)
    y = F.dropout(x, 0.25)
    y.sum().backward()
    assert torch.equal(x.grad, y.detach())
    assert set(y.detach().cpu().unique().tolist()) <= {0.0, torch.tensor(1 / 0.75).item()}
    # 1000 draws of probability 0.75: 250 +- 14, so 6 standard deviations are 83
    assert abs((y == 0).sum().item() - 250) < 83


# ---- autograd and training


def both(function, *shapes, seed=0):
    """Run a scalar function on leaves on the cpu and on the npu; return the leaves of both."""
    leaves = []
    for device in ("cpu", "npu"):
        inputs = [tensor.to(device).requires_grad_() for tensor in data(shapes, FP32, seed)]
        function(*inputs).backward()
        leaves.append(inputs)
    return leaves


GRADIENTS = [
    ("linear_3d", lambda x, w, b: F.linear(x, w, b).square().sum(), ((2, 3, 6), (5, 6), (5,))),
    ("linear_2d", lambda x, w: F.linear(x, w).square().sum(), ((3, 6), (5, 6))),
    ("matmul_vectors", lambda a, b: a @ b, ((6,), (6,))),
    ("matmul_vector_left", lambda a, b: (a @ b).square().sum(), ((6,), (3, 6, 5))),
    ("matmul_vector_right", lambda a, b: (a @ b).square().sum(), ((3, 4, 6), (6,))),
    ("matmul_broadcast", lambda a, b: (a @ b).square().sum(), ((2, 1, 4, 6), (3, 6, 5))),
    ("matmul_2d_by_3d", lambda a, b: (a @ b).square().sum(), ((4, 6), (3, 6, 5))),
    ("softmax", lambda x: x.softmax(-1)[0].prod(), ((4, 6),)),
    ("silu_mul", lambda a, b: (F.silu(a) * b).sum(), PAIR),
    ("layer_norm", lambda x, w: F.layer_norm(x, (6,), w).square().sum(), ((4, 6), (6,))),
    ("embedding", lambda w: F.embedding(INDEX.to(w.device), w).square().sum(), ((4, 6),)),
    ("gather", lambda x: x.gather(1, x.detach().argsort(1)[:, :2]).square().sum(), ((4, 6),)),
    ("index", lambda x: x[INDEX.to(x.device)].square().sum(), ((4, 6),)),
    ("repeat_interleave", lambda x: x.repeat_interleave(3, 1).square().sum(), ((4, 6),)),
    ("conv2d", lambda x, w: F.conv2d(x, w).square().sum(), ((1, 2, 5, 5), (3, 2, 3, 3))),
    ("l1_loss", F.l1_loss, PAIR),
    ("mse_loss", F.mse_loss, PAIR),
    ("kl_div", lambda a, b: F.kl_div(a.log_softmax(-1), b.softmax(-1), reduction="batchmean"), PAIR),
    ("bce_logits", lambda a, b: F.binary_cross_entropy_with_logits(a, b.detach().sigmoid()) + b.sum(), PAIR),
    ("cross_entropy", lambda a: F.cross_entropy(a, torch.tensor([0, 5, -100, 2], device=a.device)), ((4, 6),)),
    ("cumsum", lambda x: (x.cumsum(0) * x).sum(), ((4, 6),)),
    ("cat_split", lambda a, b: torch.cat((a, b), -1).chunk(3, -1)[1].square().sum(), PAIR),
]


@pytest.mark.parametrize(("function", "shapes"), [pytest.param(f, s, id=n) for n, f, s in GRADIENTS])
def test_gradients_equal_cpu(function, shapes):
    cpu, npu = both(function, *shapes)
    for expected, actual in zip(cpu, npu, strict=True):
        # The same fp32 kernels, but matmul_backward may order its operands otherwise: a few roundings of terms < 100.
        torch.testing.assert_close(actual.grad.cpu(), expected.grad, rtol=1e-5, atol=1e-5)


def test_autocast_runs_products_in_half_and_norms_in_float():
    linear = torch.nn.Linear(8, 8).npu()
    x = torch.randn(4, 8, device="npu")
    with torch.autocast("npu", dtype=BF16):
        y = linear(x)
        assert y.dtype == BF16 and F.layer_norm(y, (8,)).dtype == FP32
        # one bf16 rounding of each operand and of the result
        torch.testing.assert_close(y.float(), x @ linear.weight.t() + linear.bias, rtol=2**-6, atol=2**-6)
    y.float().sum().backward()
    assert linear.weight.grad.dtype == FP32


OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (torch.optim.SGD, {"lr": 0.1, "foreach": True}),
    (torch.optim.AdamW, {"lr": 0.1, "foreach": False}),
    (torch.optim.AdamW, {"lr": 0.1, "foreach": True}),
    (torch.optim.AdamW, {"lr": 0.1, "fused": True}),
]


@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS, ids=str)
def test_training_steps_equal_cpu(optimizer, options):
    models = []
    for device in ("cpu", "npu"):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.SiLU(), torch.nn.Linear(8, 2)).to(device)
        step = optimizer(model.parameters(), **options)
        x, y = (tensor.to(device) for tensor in data(((5, 6), (5, 2)), FP32))
        for _ in range(3):
            step.zero_grad()
            F.mse_loss(model(x), y).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            step.step()
        models.append([parameter.detach().cpu() for parameter in model.parameters()])
    for expected, actual in zip(*models, strict=True):
        # AdamW divides by the root of a tiny second moment: roundings of fp32 grow to about 1e-5 of a step of 0.1.
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_grad_scaler_skips_a_step_with_infinite_gradients():
    parameter = torch.nn.Parameter(torch.ones(3, device="npu"))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    scaler = torch.amp.GradScaler("npu", init_scale=4.0)
    for factor, expected in ((2.0, 0.8), (math.inf, 0.8), (1.0, 0.7)):
        optimizer.zero_grad()
        scaler.scale((parameter * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        torch.testing.assert_close(parameter.detach().cpu(), torch.full((3,), expected))
    assert scaler.get_scale() == 2.0


def test_checkpointing_recomputes_the_same():
    from torch.utils.checkpoint import checkpoint

    layer = torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.Dropout(0.5), torch.nn.SiLU()).npu()
    x = torch.randn(4, 6, device="npu")
    gradients = []
    for run in (layer, lambda t: checkpoint(layer, t, use_reentrant=False)):
        layer.zero_grad()
        torch.npu.manual_seed(5)
        run(x).sum().backward()
        gradients.append(layer[0].weight.grad.clone())
    assert torch.equal(*gradients)


# ---- a model


@pytest.fixture(scope="module")
def llama():
    transformers = pytest.importorskip("transformers", reason="the kernel works without transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="eager",
    )
    return transformers.LlamaForCausalLM(config)


def test_llama_trains_and_generates_as_on_cpu(llama):
    device_model = copy.deepcopy(llama).npu()
    tokens = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(1))
    expected, actual = (m(input_ids=t, labels=t) for m, t in ((llama, tokens), (device_model, tokens.npu())))
    same(actual.logits.detach(), expected.logits.detach())
    expected.loss.backward()
    actual.loss.backward()
    for (name, a), b in zip(llama.named_parameters(), device_model.parameters(), strict=True):
        # fp32 sums over 18 tokens, in another order in matmul_backward
        torch.testing.assert_close(b.grad.cpu(), a.grad, rtol=1e-4, atol=1e-6, msg=name)
    prompt = tokens[:1, :4]
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
    text = llama.generate(prompt, **options)
    options["attention_mask"] = options["attention_mask"].npu()
    assert torch.equal(device_model.generate(prompt.npu(), **options).cpu(), text)


def test_llama_with_fused_attention(llama):
    """torch_npu turns scaled_dot_product_attention into its own fused op."""
    tokens = torch.randint(97, (2, 9), generator=torch.Generator().manual_seed(1)).npu()
    model = copy.deepcopy(llama).npu().half()
    eager = model(input_ids=tokens).logits
    model.set_attn_implementation("sdpa")
    with npu_emulator.count() as traffic:
        fused = model(input_ids=tokens).logits
    assert any(op.startswith("aclnnFlashAttentionScore") for op in traffic.by_op), traffic
    # two layers of fp16 attention, each rounded otherwise: logits of about 1 differ by a few ulp (2**-11 each)
    torch.testing.assert_close(fused, eager, rtol=0, atol=8 * 2**-11)
