"""q and k rotated together: one launch and the right gradient for each, whatever they look like in memory."""

from itertools import product

import npu_emulator
import pytest
import torch
from kernels import get_kernel

npu = get_kernel("org/npu-fusion", version=1)
ops = npu.ops

WIDTH = 8
# layout: (the dimension of the heads, q or k with [B, N, S, D] values laid out so, heads of q and k)
LAYOUTS = {
    "BNSD": (1, lambda x: x, (4, 2)),
    "BSND": (2, lambda x: x.transpose(1, 2).contiguous(), (4, 2)),
    "BSND seen as BNSD": (1, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), (4, 2)),
    "BSND seen as BNSD, one head in k": (1, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), (4, 1)),
    "NBSD seen as BNSD": (1, lambda x: x.transpose(0, 1).contiguous().transpose(0, 1), (4, 2)),
}


def eager(q, k, cos, sin, unsqueeze_dim, interleaved):
    cos, sin = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
    return [ops.rotary_reference(x, cos, sin, interleaved) for x in (q, k)]


def inputs(layout, batch=2, positions=3, grads=(True, True)):
    generator = torch.Generator().manual_seed(0)
    unsqueeze_dim, lay_out, heads = LAYOUTS[layout]
    tables = [torch.randn(batch, positions, WIDTH, generator=generator) for _ in range(2)]
    values = [torch.randn(batch, n, positions, WIDTH, generator=generator) for n in heads]
    q_k = [lay_out(x.to("npu")).requires_grad_(grad) for x, grad in zip(values, grads, strict=True)]
    return q_k, [t.to("npu") for t in tables], unsqueeze_dim


def expected(q_k, tables, unsqueeze_dim, interleaved):
    q, k = (x.detach().cpu().requires_grad_(x.requires_grad) for x in q_k)
    return (q, k), eager(q, k, *(t.cpu() for t in tables), unsqueeze_dim, interleaved)


def close(result, right):
    # fp32: two products and a sum, each rounded once, of values below 8
    torch.testing.assert_close(result.cpu(), right, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("positions", [1, 3])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_gradients_and_launches(layout, positions, interleaved):
    for grads in product([True, False], repeat=2):
        q_k, tables, unsqueeze_dim = inputs(layout, positions=positions, grads=grads)
        leaves, right = expected(q_k, tables, unsqueeze_dim, interleaved)
        with npu_emulator.count() as traffic:
            rotated = ops.apply_rotary_pos_emb(*q_k, *tables, unsqueeze_dim, interleaved)
        # interleaved, the op takes no batch of tables between batch and heads
        assert traffic.launches == (10 if (layout, positions, interleaved) == ("BNSD", 3, True) else 2)
        for x, y in zip(rotated, right, strict=True):
            close(x, y)
        assert [x.requires_grad for x in rotated] == list(grads)
        if any(grads):
            targets = [x for x in rotated if x.requires_grad]
            weights = [torch.randn_like(x) for x in targets]
            with npu_emulator.count() as traffic:
                found = torch.autograd.grad(targets, [x for x in q_k if x.requires_grad], weights)
            if (layout, positions, interleaved) != ("BNSD", 3, True):
                assert traffic.launches == len(targets)
            rights = torch.autograd.grad(
                [y for y in right if y.requires_grad],
                [x for x in leaves if x.requires_grad],
                [w.cpu() for w in weights],
            )
            for x, y in zip(found, rights, strict=True):
                close(x, y)


@pytest.mark.parametrize("used", [0, 1])
def test_what_is_not_used_has_no_gradient(used):
    q_k, tables, unsqueeze_dim = inputs("BSND seen as BNSD")
    rotated = ops.apply_rotary_pos_emb(*q_k, *tables, unsqueeze_dim)
    with npu_emulator.count() as traffic:
        rotated[used].sum().backward()
    assert q_k[used].grad is not None and q_k[1 - used].grad is None
    assert traffic.by_op["aclnnRotaryPositionEmbeddingGrad"].launches == 1


@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_the_tables_are_kept(layout):
    q_k, tables, unsqueeze_dim = inputs(layout)
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        ops.apply_rotary_pos_emb(*q_k, *tables, unsqueeze_dim)
    assert sorted(kept) == sorted(t.untyped_storage().data_ptr() for t in tables)


def test_tables_with_gradients_or_of_another_dtype_go_the_way_of_eager():
    q_k, tables, unsqueeze_dim = inputs("BSND seen as BNSD")
    tables[0].requires_grad_()
    right = eager(*q_k, *tables, unsqueeze_dim, False)
    rotated = ops.apply_rotary_pos_emb(*q_k, *tables, unsqueeze_dim)
    wanted = [*q_k, tables[0]]
    grads = [torch.autograd.grad([x.sum() for x in outputs], wanted) for outputs in (rotated, right)]
    for x, y in zip(*grads, strict=True):
        assert torch.equal(x, y)
    tables = [t.detach().double() for t in tables]
    for x, y in zip(
        ops.apply_rotary_pos_emb(*q_k, *tables, unsqueeze_dim), eager(*q_k, *tables, unsqueeze_dim, False), strict=True
    ):
        assert x.dtype == y.dtype == torch.float64 and torch.equal(x, y)


def test_sizes_that_a_tracer_does_not_know():
    """make_fx hands symbols on that have no hash, and is_compiling does not say that it runs."""
    from torch.fx.experimental.proxy_tensor import make_fx

    q_k, tables, unsqueeze_dim = inputs("BSND seen as BNSD", grads=(False, False))
    graph = make_fx(lambda *args: ops.apply_rotary_pos_emb(*args, unsqueeze_dim), tracing_mode="symbolic")(
        *q_k, *tables
    )
    calls = [node.target for node in graph.graph.nodes if "rotary" in str(node.target)]
    assert calls == [torch.ops.npu.npu_rotary_mul.default] * 2
    longer, tables, _ = inputs("BSND seen as BNSD", batch=3, positions=5, grads=(False, False))
    for x, y in zip(graph(*longer, *tables), eager(*longer, *tables, unsqueeze_dim, False), strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)  # as in `close`


@pytest.mark.parametrize("dimension", [-7, -5, 4, 5])
def test_a_dimension_that_does_not_exist_is_named(dimension):
    q_k, tables, _ = inputs("BNSD")
    with pytest.raises(IndexError, match=f"Dimension out of range .*got {dimension}"):
        ops.apply_rotary_pos_emb(*q_k, *tables, dimension)


@pytest.mark.parametrize("dimension", [-3, -2])
def test_a_dimension_may_be_counted_from_the_end(dimension):
    q_k, tables, unsqueeze_dim = inputs("BNSD" if dimension == -3 else "BSND")
    with npu_emulator.count() as traffic:
        rotated = ops.apply_rotary_pos_emb(*q_k, *tables, dimension)
    assert traffic.launches == 2
    for x, y in zip(rotated, ops.apply_rotary_pos_emb(*q_k, *tables, unsqueeze_dim), strict=True):
        assert torch.equal(x, y)


def test_functorch_gets_torchs_own_refusal():
    """`record` goes around Function.apply, but not where functorch needs what that does."""
    q_k, tables, unsqueeze_dim = inputs("BNSD", grads=(False, False))

    def rotated_sum(q, k):
        return sum(x.sum() for x in ops.apply_rotary_pos_emb(q, k, *tables, unsqueeze_dim))

    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(rotated_sum, argnums=(0, 1))(*q_k)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiled_with_gradients_in_another_order(layout, interleaved):
    """The gradient comes as BNSD or BSND in order, wherever x lies; interleaved, the op takes the former in no way."""
    (q, k), tables, unsqueeze_dim = inputs(layout)
    results = []

    def seen(flat, like):
        order = sorted(range(4), key=lambda i: -like.stride(i))
        return flat.view([like.shape[i] for i in order]).permute([order.index(i) for i in range(4)])

    def rotated(flat_q, flat_k):
        q_k = seen(flat_q, q), seen(flat_k, k)
        return [x.flatten() for x in ops.apply_rotary_pos_emb(*q_k, *tables, unsqueeze_dim, interleaved)]

    torch._dynamo.reset()
    for function in (rotated, torch.compile(rotated, backend="aot_eager", fullgraph=True)):
        leaves = [torch.linspace(-1, 1, x.numel()).to("npu").requires_grad_() for x in (q, k)]
        out = function(*leaves)
        weights = [torch.linspace(1, 2, x.numel()).to("npu") for x in out]
        results.append([*out, *torch.autograd.grad(out, leaves, weights)])
    for a, b in zip(*results, strict=True):
        close(b.detach(), a.detach().cpu())
