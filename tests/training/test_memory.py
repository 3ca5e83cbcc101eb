"""Device memory of a training step: a swapped model never needs more than the eager one, and no more from step to step."""

import gc

import npu_emulator
import pytest
import torch
from kernels import get_kernel
from models.families import FAMILIES, build_model, token_ids
from peft import LoraConfig, get_peft_model

npu = get_kernel("org/npu-fusion", version=1)


def step(model, ids):
    output = model(input_ids=ids, labels=ids, use_cache=False)
    output.loss.backward()
    model.zero_grad()


def peak_bytes(model, ids):
    """The most that a step allocates above what stands there between steps."""
    step(model, ids)  # what is allocated once
    gc.collect()
    before = torch.npu.memory_allocated()
    torch.npu.reset_peak_memory_stats()
    step(model, ids)
    assert torch.npu.memory_allocated() == before, "a step leaves something behind"
    return torch.npu.max_memory_allocated() - before


def saved_bytes(model, ids):
    """What the forward keeps for the backward: each storage once, parameters and the rotary table left out."""
    standing = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in standing:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss  # alive, so that no address is used twice
        total = sum(storages.values())
    del loss
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_no_more_than_eager(family, dtype, fuse, record_property):
    model, ids = build_model(family, dtype).to("npu").train(), token_ids(length=32).to("npu")
    eager = {"peak": peak_bytes(model, ids), "saved": saved_bytes(model, ids)}
    fuse(model)
    fused = {"peak": peak_bytes(model, ids), "saved": saved_bytes(model, ids)}
    record_property("bytes", {"eager": eager, "fused": fused})
    assert fused["peak"] <= eager["peak"], (fused, eager)
    assert fused["saved"] < eager["saved"], (fused, eager)


def test_no_more_than_eager_with_lora_on_every_linear(fuse):
    config = LoraConfig(r=2, target_modules="all-linear", init_lora_weights=False)
    model, ids = get_peft_model(build_model("llama"), config).to("npu").train(), token_ids(length=32).to("npu")

    def cost():
        with npu_emulator.count() as traffic:
            step(model, ids)
        return peak_bytes(model, ids), saved_bytes(model, ids), traffic

    peak, saved, eager = cost()
    fuse(model)
    fused_peak, fused_saved, fused = cost()
    assert fused_peak <= peak and fused_saved < saved
    layers = model.config.num_hidden_layers
    assert fused.by_op["aclnnSwiGlu"].launches == fused.by_op["aclnnSwiGluGrad"].launches == layers
    assert "aten::silu" in eager.by_op and "aten::silu" not in fused.by_op


def test_1000_steps_leave_nothing_behind(fuse):
    """Device memory to the byte, and Python objects: caches by shape or by instance would show in one of them."""
    model = fuse(build_model("qwen3_moe").to("npu").train())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    state = []
    for number in range(1001):
        ids = token_ids(batch=1, length=3 + number % 5, seed=number).to("npu")
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if number in (20, 1000):  # the same shape; by then every shape was seen and every cache filled
            gc.collect()
            state.append((torch.npu.memory_allocated(), torch.npu.memory_reserved(), len(gc.get_objects())))
    (early, early_reserved, early_objects), (late, late_reserved, late_objects) = state
    assert (late, late_reserved) == (early, early_reserved)
    assert late_objects - early_objects < 100, "less than one object in ten steps"
