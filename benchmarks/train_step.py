"""Repeat a published experiment: what a fused RMSNorm and a fused SwiGLU gain in LoRA fine-tuning of Qwen2-7B.

    python benchmarks/train_step.py                                # on one NPU
    torchrun --nproc-per-node 8 benchmarks/train_step.py           # on eight, as it was published
    python benchmarks/train_step.py --model tiny                   # anywhere: shows that it runs, gives no times

Published for 8 NPUs (huggingface/transformers#39105 and its follow-ups): +5.49 % with RMSNorm, +0.72 % with SwiGLU,
+6.21 % with both. Weights are random and tokens are drawn: a step's time does not depend on them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
QWEN2_7B = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_hidden_layers": 28,
    "vocab_size": 152064,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 256,
}
# variant -> layers to swap in; () stands for all of them
VARIANTS = {
    "original": None,
    "rms_norm": ("RMSNorm",),
    "swiglu": ("SwiGLUMLP",),
    "rms_norm + swiglu": ("RMSNorm", "SwiGLUMLP"),
    "all of npu-fusion": (),
}
PUBLISHED = {"rms_norm": 5.49, "swiglu": 0.72, "rms_norm + swiglu": 6.21}  # per cent


def build(sizes: dict[str, int], device: str = "npu", rank: int = 8, initialise: bool = True):
    """Qwen2 in bf16 with LoRA on every linear layer and gradient checkpointing, as LLaMA-Factory fine-tunes it.

    Without `initialise` the weights are what the memory holds, for those who only count.
    """
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import Qwen2Config, Qwen2ForCausalLM

    with torch.device("meta"):
        model = Qwen2ForCausalLM._from_config(Qwen2Config(**sizes), dtype=torch.bfloat16)
        model = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"), low_cpu_mem_usage=True)
    model.to_empty(device=device)
    with torch.no_grad():
        for name, parameter in model.named_parameters() if initialise else ():
            if parameter.dim() == 1:
                parameter.fill_(0 if name.endswith("bias") else 1)
            else:
                parameter.normal_(std=0.02)
        for module in model.modules():  # buffers that from_pretrained would have made
            if hasattr(module, "inv_freq"):
                exponents = torch.arange(0, module.inv_freq.numel(), device=device).float() / module.inv_freq.numel()
                module.inv_freq.copy_(1e6**-exponents)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.enable_input_require_grads()
    return model.train()


def optimizer_for(model):
    import torch

    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)


def micro_step(model, tokens, device_type: str = "npu"):
    """Forward and backward of one micro batch in mixed precision; returns the loss."""
    import torch

    with torch.autocast(device_type, torch.bfloat16):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return loss.detach()


def step(model, optimizer, batches):
    """One optimizer step over several micro batches; returns the last loss."""
    import torch

    ddp = hasattr(model, "no_sync")
    for index, tokens in enumerate(batches):
        last = index == len(batches) - 1
        with contextlib.nullcontext() if last or not ddp else model.no_sync():
            loss = micro_step(model, tokens)
    torch.nn.utils.clip_grad_norm_([p for p in model.parameters() if p.requires_grad], 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def load_kernel():
    """npu-fusion, built from this checkout."""
    import runpy
    import tempfile

    from kernels import get_local_kernel

    with tempfile.TemporaryDirectory() as directory:
        runpy.run_path(str(ROOT / "scripts" / "build.py"))["build"](Path(directory))
        return get_local_kernel(Path(directory))


def run(options: argparse.Namespace, emulated: bool) -> list[dict]:
    import torch

    sizes = dict(QWEN2_7B if options.model == "qwen2-7b" else TINY)
    if options.layers:
        sizes["num_hidden_layers"] = options.layers
    world, local = int(os.environ.get("WORLD_SIZE", 1)), int(os.environ.get("LOCAL_RANK", 0))
    torch.npu.set_device(local)
    torch.manual_seed(0)
    model = build(sizes)
    trained = model
    if world > 1:
        torch.distributed.init_process_group("hccl")
        trained = torch.nn.parallel.DistributedDataParallel(model, device_ids=[local])
    npu = load_kernel()
    generator = torch.Generator().manual_seed(local)
    batches = [
        torch.randint(sizes["vocab_size"], (options.batch, options.length), generator=generator).npu()
        for _ in range(options.accumulate)
    ]
    start = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    rows = []
    for variant, only in VARIANTS.items():
        npu.restore(model)
        if only is not None:
            npu.kernelize(model, only=only)
        with torch.no_grad():
            for name, value in start.items():
                model.get_parameter(name).copy_(value)
        optimizer = optimizer_for(model)
        for _ in range(options.warmup):
            loss = step(trained, optimizer, batches)
        row = {"variant": variant, "published_percent": PUBLISHED.get(variant)}
        if emulated:
            import npu_emulator

            with npu_emulator.count() as traffic:
                loss = step(trained, optimizer, batches)
            row.update(launches=traffic.launches, bytes=traffic.bytes)
        else:
            times = []
            for _ in range(options.steps):
                torch.npu.synchronize()
                begin = time.perf_counter()
                loss = step(trained, optimizer, batches)
                torch.npu.synchronize()
                times.append(time.perf_counter() - begin)
            row["seconds"] = statistics.median(times)
            row["gain_percent"] = 100 * (rows[0]["seconds"] / row["seconds"] - 1) if rows else 0.0
        rows.append({**row, "loss": loss.item()})
    npu.restore(model)
    if world > 1:
        torch.distributed.destroy_process_group()
    return rows


def show(rows: list[dict], emulated: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    names = ("launches", "bytes") if emulated else ("seconds", "gain_percent")
    table = Table("variant", *names, "published, %", "loss")
    for row in rows:
        values = [f"{row[name]:,}" if emulated else f"{row[name]:.4g}" for name in names]
        table.add_row(row["variant"], *values, str(row["published_percent"] or ""), f"{row['loss']:.5f}")
    console = Console()
    console.print(table)
    if emulated:
        console.print("On the emulated NPU: counts of one step. Times come from an NPU only.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--model", choices=("qwen2-7b", "tiny"), help="default: qwen2-7b on an NPU, tiny on the emulated one"
    )
    parser.add_argument("--layers", type=int, help="fewer decoder layers")
    parser.add_argument("--length", type=int, help="tokens of a sequence; default: 512, tiny: 32")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--accumulate", type=int, default=8, help="micro batches of a step")
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    import npu_emulator.auto

    emulated = npu_emulator.is_emulated()
    options.model = options.model or ("tiny" if emulated else "qwen2-7b")
    options.length = options.length or (32 if options.model == "tiny" else 512)
    rows = run(options, emulated)
    if int(os.environ.get("RANK", 0)) == 0:
        show(rows, emulated)
        if options.json:
            options.json.write_text(json.dumps({"emulated": emulated, "variants": rows}, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
