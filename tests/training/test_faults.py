"""What can go wrong in a training step, as a table: each fault ends in the right result, or in one error that names it.

After every fault the model is as it was: the next step is right, and the report is the same. Elsewhere:

    a probe that raises, a module that cannot run    tests/models/test_field_reports.py, tests/matching/test_probing.py
    copied, pickled, moved, swapped twice or for
    another mode, two models of a family             tests/models/test_swap.py
    kernels, transformers or the Hub missing         tests/hub/
    dead, late or mismatching ranks                  tests/emulator/test_hccl.py
"""

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import npu_emulator
import pytest
import torch
from kernels import get_kernel
from models.families import FAMILIES, build_model, loss_and_gradients, token_ids

npu = get_kernel("org/npu-fusion", version=1)
integration = npu.kernelize.__globals__

FAMILY = "qwen2_moe"  # norms, an MLP, experts and a router


class Without:
    """`torch.ops.npu` of a torch_npu that lacks some ops, or all."""

    def __init__(self, *names):
        self._names, self._ops = names, torch.ops.npu

    def __getattr__(self, name):
        if name in self._names or not self._names:
            raise AttributeError(name)
        return getattr(self._ops, name)


def missing(*names):
    @contextmanager
    def inject() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.ops, "npu", Without(*names))
            yield

    return inject


def failing(op):
    @contextmanager
    def inject() -> Iterator[None]:
        npu_emulator.fail_next(op)
        yield

    return inject


@contextmanager
def little_memory() -> Iterator[None]:
    torch.npu.empty_cache()
    total = torch.npu.get_device_properties(0).total_memory
    torch.npu.set_per_process_memory_fraction((torch.npu.memory_reserved() + (1 << 20)) / total)
    yield
    torch.npu.set_per_process_memory_fraction(1.0)


@dataclass(frozen=True)
class Fault:
    name: str
    inject: Callable
    error: str | None  # None: the result is right all the same
    batch: int = 2


MISSING = [
    "npu_rms_norm",
    "npu_add_rms_norm",
    "npu_swiglu",
    "npu_rotary_mul",
    "npu_moe_init_routing_v2",
    "npu_grouped_matmul",
    "npu_moe_token_unpermute",
    "npu_moe_token_permute_grad_v2",
    "npu_moe_gating_top_k_softmax_v2",
]
FAILING = [
    "aclnnRmsNorm",
    "aclnnRmsNormGrad",
    "aclnnAddRmsNorm",
    "aclnnSwiGlu",
    "aclnnSwiGluGrad",
    "aclnnRotaryPositionEmbeddingV2",
    "aclnnRotaryPositionEmbeddingGrad",
    "aclnnMoeInitRoutingV3",
    "aclnnGroupedMatmulV5",
    "aclnnMoeTokenUnpermute",
    "aclnnMoeTokenUnpermuteGrad",
    "aclnnMoeTokenPermuteGrad",
    "aclnnMoeGatingTopKSoftmaxV2",
]

FAULTS = [
    *(Fault(f"torch_npu lacks {name}", missing(name), None) for name in MISSING),
    Fault("torch_npu lacks every op", missing(), None),
    *(Fault(f"{op} fails", failing(op), f"{op}: device error injected") for op in FAILING),
    Fault("device memory is exhausted", little_memory, "NPU out of memory. Tried to allocate", batch=256),
]


def step(model, batch=2):
    return loss_and_gradients(model, {"input_ids": token_ids(batch).to("npu")})


@pytest.fixture(scope="module")
def eager():
    return step(build_model(FAMILY).to("npu").train())


def assert_right(result, expected):
    # fp32: sums of at most 128 terms in another order, and two bits more for a gradient, which passes two layers twice
    assert (result[0] - expected[0]).abs().max() <= 2**-19 * expected[0].abs().max()
    assert result[1].keys() == expected[1].keys()
    for name, right in expected[1].items():
        assert (result[1][name] - right).abs().max() <= 2**-17 * right.abs().max() + 1e-9, name


@pytest.mark.skipif(not npu_emulator.is_emulated(), reason="only the emulator fails when it is told to")
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name.replace(" ", "_"))
def test_fault(fault, fuse, eager):
    model = fuse(build_model(FAMILY).to("npu").train())
    with fault.inject():
        if fault.error is None:
            assert_right(step(model), eager)
        else:
            with pytest.raises(RuntimeError, match=re.escape(fault.error)):
                step(model, fault.batch)
    assert npu.report(model).swapped == FAMILIES[FAMILY][2]
    assert_right(step(model), eager)


@pytest.mark.skipif(not npu_emulator.is_emulated(), reason="only the emulator counts launches")
def test_the_table_has_every_op_of_a_step(fuse):
    model = fuse(build_model(FAMILY).to("npu").train())
    with npu_emulator.count() as traffic:
        step(model)
    assert {op for op in traffic.by_op if op.startswith("aclnn")} == set(FAILING)


def test_swap_that_is_interrupted(eager, monkeypatch):
    """Part of the model is swapped then, and right; `restore` and another `kernelize` both bring it to a known state."""
    swap, calls = integration["swap"], []

    def interrupted(*args):
        calls.append(args)
        if len(calls) == 7:
            raise KeyboardInterrupt
        swap(*args)

    model = build_model(FAMILY).to("npu").train()
    monkeypatch.setitem(integration, "swap", interrupted)
    with pytest.raises(KeyboardInterrupt):
        npu.kernelize(model)
    monkeypatch.undo()
    swapped = npu.report(model).swapped
    assert swapped and swapped != FAMILIES[FAMILY][2]
    assert_right(step(model), eager)
    assert npu.report(npu.kernelize(model)).swapped == FAMILIES[FAMILY][2]
    assert_right(step(model), eager)
    assert npu.report(npu.restore(model)).swapped == {}
    assert_right(step(model), eager)


def test_swapped_and_restored_while_another_thread_runs_it():
    """A forward reads its module's forward once, so each call is all fused or all eager, and right either way."""
    model, ids = build_model(FAMILY).to("npu"), token_ids().to("npu")
    with torch.no_grad():
        expected = model(ids).logits
    done, worst = threading.Event(), []

    def run():
        with torch.no_grad():
            while not done.is_set():
                worst.append(((model(ids).logits - expected).abs().max() / expected.abs().max()).item())

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(10):
            npu.kernelize(model)
            npu.restore(model)
    finally:
        done.set()
        thread.join()
    # fp32: sums of at most 128 terms in another order
    assert worst and max(worst) <= 2**-19
    assert npu.report(model).swapped == {}
