"""A cost model: what counted launches and bytes may mean in time on an Ascend chip. Nothing here is measured.

    python benchmarks/model.py [--launch 12e-6] [--bandwidth 1.22e12] [--matmul 280e12]

    host time   = launches * launch cost                        (the host issues one kernel after the other)
    device time = sum over kernels of max(floor, bytes / bandwidth, operations / matmul rate)
    step        = max(host time, device time)                   (the device works while the host issues)

The parameters' values come from what others published, see PARAMETERS. The model is checked against published
measurements that it was not fitted to: kernel times, and the gain of two patches in LoRA fine-tuning of Qwen2-7B.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from train_step import PUBLISHED, QWEN2_7B


@dataclass(frozen=True)
class Chip:
    """launch: seconds of host time for one eager op. floor: seconds of the smallest kernel. Rates per second."""

    launch: float = 12e-6
    floor: float = 3e-6
    bandwidth: float = 1.22e12
    matmul: float = 280e12


PARAMETERS = {
    "launch": "12 µs: npu_rms_norm and a cast take 25 µs, one fused op 13.8 µs, at any size up to 512 x 7168 (Ascend 950DT, "
    "eager; vllm-project/vllm-ascend#15902). On 910B3, 19 to 30 µs with a synchronisation (ascend-rs.org, appendix F).",
    "floor": "3 µs: npu_swiglu of 256 x 128 in float16 (flagos-ai/FlagGems#6324, chip not named).",
    "bandwidth": "1.22 TB/s, achieved, not theoretical: npu_swiglu moves 1.97 GB in 1.61 ms (FlagGems#6324, chip not named). "
    "For the 910B no trustworthy vendor figure was found; the web says 0.4 to 1.6 TB/s.",
    "matmul": "280 TFLOPS, peak of the 910B in float16 (ai.gitee.com/docs/compute/clusters_gpu/ascend_gpu). What a product of "
    "a given shape reaches is not known, so matmul time is a lower bound.",
}

# npu_swiglu in float16: (elements read, seconds), FlagGems#6324. The result is half as large as the input.
SWIGLU = (
    (256 * 128, 3.067e-6),
    (2560 * 2048, 17.08e-6),
    (15000 * 2048, 48.46e-6),
    (268435456, 667.2e-6),
    (10000 * 65536, 1610e-6),
)
# npu_rms_norm and .float() against one fused op, bfloat16, hidden size 7168: (tokens, seconds, seconds fused), vllm-ascend#15902
NORM_AND_CAST = ((1, 24.6e-6, 13.8e-6), (16, 25.4e-6, 13.9e-6), (512, 25.7e-6, 14.4e-6))


@dataclass(frozen=True)
class Kernels:
    """`launches` kernels of one kind, with the bytes and the matmul operations of all of them together."""

    launches: float
    bytes: float
    operations: float = 0

    def __add__(self, other: Kernels) -> Kernels:
        return Kernels(self.launches + other.launches, self.bytes + other.bytes, self.operations + other.operations)

    def __sub__(self, other: Kernels) -> Kernels:
        return Kernels(self.launches - other.launches, self.bytes - other.bytes, self.operations - other.operations)

    def __mul__(self, factor: float) -> Kernels:
        return Kernels(self.launches * factor, self.bytes * factor, self.operations * factor)


def host_time(kernels: Iterable[Kernels], chip: Chip) -> float:
    return chip.launch * sum(kind.launches for kind in kernels)


def device_time(kernels: Iterable[Kernels], chip: Chip) -> float:
    return sum(max(chip.floor * k.launches, k.bytes / chip.bandwidth, k.operations / chip.matmul) for k in kernels)


def step_time(kernels: Iterable[Kernels], chip: Chip) -> float:
    kernels = list(kernels)
    return max(host_time(kernels, chip), device_time(kernels, chip))


# --- the published experiment


def count_steps(layers: int, lengths: tuple[int, ...]) -> dict[tuple[str, int], dict[str, Kernels]]:
    """Kernels of a micro step of LoRA fine-tuning of Qwen2-7B, and of an optimizer step under "optimizer/", by op.

    Keys are (variant, tokens). RMSNorm and SwiGLU are patched with verl's functions, which are those that the published
    experiment tried out.
    """
    import npu_emulator

    npu_emulator.start()
    import peers
    import torch
    import train_step
    from transformers.models.qwen2 import modeling_qwen2

    verl, npu = peers.verl_patch(peers.install()["verl"]), train_step.load_kernel()
    original = modeling_qwen2.Qwen2RMSNorm.forward, modeling_qwen2.Qwen2MLP.forward
    model = train_step.build({**QWEN2_7B, "num_hidden_layers": layers}, initialise=False)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = train_step.optimizer_for(model)
    prompts = {length: torch.zeros(1, length, dtype=torch.int64, device="npu") for length in lengths}
    with npu_emulator.count(skip_matmuls=True):  # from here on there are gradients and optimizer states
        train_step.micro_step(model, prompts[min(lengths)])
        optimizer.step()
    with npu_emulator.count(skip_matmuls=True) as update:
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
    found = {}
    for variant in VARIANTS:
        modeling_qwen2.Qwen2RMSNorm.forward = verl.rms_norm_forward_npu if "rms_norm" in variant else original[0]
        modeling_qwen2.Qwen2MLP.forward = verl.silu_forward_npu if "swiglu" in variant else original[1]
        if variant == "npu-fusion":
            npu.kernelize(model)
        for length, tokens in prompts.items():
            with npu_emulator.count(skip_matmuls=True) as micro:
                train_step.micro_step(model, tokens)
            found[variant, length] = _kernels(micro, "") | _kernels(update, "optimizer/")
    npu.restore(model)
    return found


def _kernels(traffic, prefix: str) -> dict[str, Kernels]:
    return {prefix + op: Kernels(t.launches, t.bytes_read + t.bytes_written) for op, t in traffic.by_op.items()}


def whole_model(one: dict[str, Kernels], two: dict[str, Kernels], layers: int) -> dict[str, Kernels]:
    """Kernels of a model of `layers` layers from those of one and of two: every layer adds the same."""
    none = Kernels(0, 0)
    return {
        op: one.get(op, none) + (two.get(op, none) - one.get(op, none)) * (layers - 1) for op in sorted({*one, *two})
    }


def matmul_operations(length: int) -> float:
    """Of one micro step: forward, its recomputation (checkpointing) and the input's gradient; frozen weights have none."""
    sizes = QWEN2_7B
    h, i, kv = sizes["hidden_size"], sizes["intermediate_size"], 512
    weights = sizes["num_hidden_layers"] * (2 * h * h + 2 * h * kv + 3 * h * i)
    attention = sizes["num_hidden_layers"] * 4 * length * length * h / 2  # causal
    head = h * sizes["vocab_size"]
    return 3 * (2 * length * weights + attention) + 2 * 2 * length * head


def experiment(lengths: tuple[int, ...], chip: Chip, accumulate: int = 8) -> dict[str, dict]:
    """Gain in per cent of each variant over the original, by tokens of a micro batch."""
    table: dict[str, dict] = {variant: {"published": PUBLISHED.get(variant), "modelled": {}} for variant in VARIANTS}
    counted = [count_steps(layers, lengths) for layers in (1, 2)]
    for length in lengths:
        seconds = {}
        for variant in VARIANTS:
            kinds = whole_model(*(steps[variant, length] for steps in counted), QWEN2_7B["num_hidden_layers"])
            products = [op for op in kinds if op in MATMULS]
            total = sum(kinds[op].bytes for op in products)
            for op in products:  # operations are shared out by bytes: all products of one step are alike in shape
                kinds[op] += Kernels(0, 0, matmul_operations(length) * kinds[op].bytes / total)
            step = [k * (1 if op.startswith("optimizer/") else accumulate) for op, k in kinds.items()]
            seconds[variant] = step_time(step, chip)
            table[variant].setdefault("launches", {})[length] = sum(k.launches for k in step)
            table[variant].setdefault("host_bound", {})[length] = host_time(step, chip) > device_time(step, chip)
            table[variant]["modelled"][length] = 100 * (seconds["original"] / seconds[variant] - 1)
    return table


VARIANTS = ("original", *PUBLISHED, "npu-fusion")
MATMULS = {
    "aten::mm",
    "aten::mm.out",
    "aten::addmm",
    "aten::addmm.out",
    "aten::matmul",
    "aten::bmm",
    "aclnnMm",
    "aclnnMatmul",
}


def show_parameters(chip: Chip, console) -> None:
    console.print("[bold]Parameters[/bold] (none is measured by this project)")
    for name, source in PARAMETERS.items():
        console.print(f"  {name} = {getattr(chip, name):.3g}  [dim]{source}[/dim]", soft_wrap=True)


def show_kernels(chip: Chip, console) -> None:
    from rich.table import Table

    table = Table(
        "published kernel", "published, µs", "model, µs", "ratio", title="Single kernels", title_justify="left"
    )
    for elements, seconds in SWIGLU:
        model = device_time([Kernels(1, 3 * elements)], chip)
        table.add_row(
            f"npu_swiglu, {elements:,} in", f"{seconds * 1e6:.1f}", f"{model * 1e6:.1f}", f"{model / seconds:.2f}"
        )
    for tokens, both, fused in NORM_AND_CAST:
        size = tokens * 7168 * 2
        for label, seconds, kinds in (
            ("norm, then cast", both, [Kernels(1, 2 * size), Kernels(1, 3 * size)]),
            ("norm with cast", fused, [Kernels(1, 3 * size)]),
        ):
            model = step_time(kinds, chip)
            table.add_row(
                f"{label}, T={tokens}", f"{seconds * 1e6:.1f}", f"{model * 1e6:.1f}", f"{model / seconds:.2f}"
            )
    console.print(table)


def show_experiment(table: dict[str, dict], console) -> None:
    from rich.table import Table

    lengths = list(next(iter(table.values()))["modelled"])
    columns = ["variant", "published, %", *(f"model, T={length}" for length in lengths), f"launches, T={lengths[0]}"]
    view = Table(*columns, title="LoRA fine-tuning of Qwen2-7B: gain over the original", title_justify="left")
    for variant, row in table.items():
        modelled = [f"{row['modelled'][n]:+.2f}{'' if row['host_bound'][n] else ' (device)'}" for n in lengths]
        view.add_row(variant, str(row["published"] or ""), *modelled, f"{row['launches'][lengths[0]]:,.0f}")
    console.print(view)


FAILS = """\
Where the model fails, and what it cannot know:
- The published runs do not say how long their sequences were, nor the exact chip. The table therefore shows several
  lengths; "(device)" marks those where kernels, not launches, bound the step.
- In the host-bound regime every launch costs the same here. In truth the Python around a module's forward, autograd and the
  dispatcher cost as well, and a fused call saves them too; all-reduce, data loading and logging only dilute a gain.
- bytes / bandwidth ignores the L2 (128 to 192 MB): npu_swiglu of 15000 x 2048 and the norm of 512 tokens, which fit it, are
  faster than the model says.
- Operations / peak is the least time of a product; real products are slower, so device-bound gains come out too large.
- Launch costs are of another chip (950DT) than the published training runs (Atlas 900 A2).
Measure with benchmarks/train_step.py where there is an NPU."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in PARAMETERS:
        parser.add_argument(
            f"--{name}", type=float, default=getattr(Chip, name), help=PARAMETERS[name].replace("%", "%%")
        )
    parser.add_argument("--lengths", default="128,512,1024", help="tokens of a micro batch")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    from rich.console import Console

    console = Console(width=max(Console().width, 110), highlight=False)
    chip = Chip(**{name: getattr(options, name) for name in PARAMETERS})
    show_parameters(chip, console)
    show_kernels(chip, console)
    table = experiment(tuple(int(length) for length in options.lengths.split(",")), chip)
    show_experiment(table, console)
    console.print(FAILS)
    if options.json:
        options.json.write_text(json.dumps({"chip": chip.__dict__, "experiment": table}, indent=1) + "\n")


if __name__ == "__main__":
    main()
