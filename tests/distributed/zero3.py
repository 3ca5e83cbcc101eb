"""Rank program of test_parallel.test_deepspeed_zero3: eager and fused under ZeRO-3, every gradient compared."""

import os

import npu_emulator

if npu_emulator.needed():
    npu_emulator.start()

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from models.families import FAMILIES, build_model
from test_parallel import STEPS, batch, compare, fuse, one_process, swapped

CONFIG = {
    "train_micro_batch_size_per_gpu": 2,
    "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "foreach": False}},
    "zero_allow_untested_optimizer": True,
    "gradient_clipping": 0.0,  # 1.0 by default
    "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0},
}


def train(model, after=lambda model: model):
    engine, *_ = deepspeed.initialize(model=model, config=CONFIG)
    after(model)
    engine.train()
    history = []
    for step in range(STEPS):
        ids = batch(step, dist.get_rank())
        engine.backward(engine(input_ids=ids, labels=ids).loss)
        history.append({name: safe_get_full_grad(parameter).cpu() for name, parameter in model.named_parameters()})
        engine.step()
    history.append({name: safe_get_full_fp32_param(parameter).cpu() for name, parameter in model.named_parameters()})
    engine.destroy()
    return history


def main():
    torch.npu.set_device(int(os.environ["LOCAL_RANK"]))
    deepspeed.init_distributed("hccl")
    # DeepSpeed 0.19.8 sums gradient norms in float64 on NPU, which HCCL does not reduce: every step() would fail.
    get_accelerator().is_fp64_supported = lambda: False
    for family in ("qwen3", "qwen3_moe"):
        expected = one_process(family, range(dist.get_world_size()))
        compare(train(build_model(family).npu()), expected, f"{family}: eager")
        model = fuse(build_model(family).npu())
        compare(train(model), expected, f"{family}: kernelize, then initialize")
        assert swapped(model).items() >= FAMILIES[family][2].items(), swapped(model)
        model = build_model(family).npu()
        compare(train(model, after=fuse), expected, f"{family}: initialize, then kernelize")
        assert swapped(model).items() >= FAMILIES[family][2].items(), swapped(model)
    print("ZeRO-3 agrees", flush=True)


if __name__ == "__main__":
    main()
