"""Kernel launches and memory traffic of fused layers, counted side by side: transformers, other people's patches, npu-fusion.

    python benchmarks/footprint.py [--json FILE] [--svg FILE] [--only "MoE block"] [--tokens 1,8192]

Every implementation runs in a process of its own on the same inputs, on the emulated NPU: the real torch_npu, whose
launches and bytes are counted. Matrix products are counted but not computed. No number here is a time, and none says how
fast anything is on Ascend hardware; see model.py for what one may expect, and why one should measure.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from cases import MODES, PARTS, TOKENS, Case, cases, limit

ROOT = Path(__file__).resolve().parent.parent
EAGER, OURS = "transformers", "npu-fusion"
ATTENTION = "flash_attention_2"  # on an NPU, transformers runs torch_npu's fused attention under this name


# --- one process: one implementation, all cases


def measure(
    implementation: str, wanted: list[Case], modes: tuple[str, ...] = MODES, attention: str = ATTENTION
) -> Iterator[dict]:
    """Rows of the table for one implementation. To be called once in a process: patches of classes are not taken back.

    Args:
        implementation: "transformers", "npu-fusion" or a peer of peers.py.
        attention: transformers' attn_implementation, the same for every implementation.
    """
    import npu_emulator

    npu_emulator.start()
    adopt = _adopter(implementation)
    for mode in modes:
        for (part, shape), group in itertools.groupby(wanted, key=lambda case: (case.part, case.shape)):
            model = _model(shape, attention, training=mode != "forward")
            adopt(model)
            with _on_npu(model, part, mode != "forward") as module:
                for case in group:
                    row = _count(model, module, case, mode)
                    yield {"name": case.name, "impl": implementation, "mode": mode, "scale": case.scale, **row}
            gc.collect()


def _adopter(implementation: str):
    """Patches transformers if the implementation does so, and returns what it does to a model."""
    if implementation == EAGER:
        return lambda model: None
    if implementation == OURS:
        import runpy

        from kernels import get_local_kernel

        with tempfile.TemporaryDirectory() as directory:
            runpy.run_path(str(ROOT / "scripts" / "build.py"))["build"](Path(directory))
            kernel = get_local_kernel(Path(directory))
        return kernel.kernelize
    import peers

    directory = peers.install()[implementation]
    peers.patch_classes(implementation, directory)
    return lambda model: peers.patch_model(implementation, model, directory)


def _model(shape, attention: str, training: bool):
    """A model of one decoder layer on the meta device."""
    import torch

    modeling = importlib.import_module(f"transformers.models.{shape.modeling}.modeling_{shape.modeling}")
    cls = getattr(modeling, shape.causal_lm)
    config = cls.config_class(
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        num_hidden_layers=1,
        vocab_size=8,
        architectures=[shape.causal_lm],
        **({} if shape.q_lora else {"head_dim": shape.head_dim}),
        **shape.config,
    )
    if shape.experts:
        config.moe_intermediate_size = shape.intermediate
        config.num_experts_per_tok = shape.top_k
        for attribute in ("num_experts", "num_local_experts", "n_routed_experts"):
            if hasattr(config, attribute):
                setattr(config, attribute, shape.experts)
    if shape.q_lora:
        config.n_group, config.topk_group = _expert_groups(shape)
    with torch.device("meta"):
        model = cls._from_config(config, dtype=torch.bfloat16, attn_implementation=attention)
    return model.train(training)


@contextmanager
def _on_npu(model, part: str, training: bool):
    """The measured module of the model, with memory on the NPU for its parameters and, in training, their gradients.

    Weights keep what the memory holds: products are not computed, and their values do not change a count.
    """
    import torch

    layer = model.model.layers[0]
    module = {"RMSNorm": layer.input_layernorm, "MLP": layer.mlp, "MoE block": layer.mlp}.get(part, layer)
    if part == "rotary":
        module = torch.nn.Module()
    module.to_empty(device="npu")
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.dim() < 2:
            tensor.data.fill_(0.5)
    for parameter in module.parameters():
        parameter.requires_grad_(training)
        if training:  # there already, so that a step accumulates into it
            parameter.grad = torch.empty_like(parameter)
    try:
        yield module
    finally:
        module.to_empty(device="meta")
        for parameter in module.parameters():
            parameter.grad = None


def _count(model, module, case: Case, mode: str) -> dict:
    import npu_emulator
    import torch
    from torch.autograd.graph import saved_tensors_hooks

    training = mode != "forward"
    inputs, call = _call(model, module, case)
    if training:
        for tensor in inputs:
            tensor.requires_grad_()
            tensor.grad = torch.zeros_like(tensor)
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if tensor.device.type == "npu" and storage.data_ptr() not in own:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    routing = _Routing(case) if case.shape.experts else nullcontext()
    # every measured part returns tensors of the shapes that it takes
    gradients = [torch.ones_like(tensor) for tensor in inputs] if training else None
    with torch.set_grad_enabled(training):
        if case.tokens < max(TOKENS):  # what only a first call does, does not count
            with npu_emulator.count(skip_matmuls=True):
                _step(call, inputs, gradients, routing)
        torch.npu.reset_peak_memory_stats()
        before = torch.npu.memory_allocated()
        with npu_emulator.count(skip_matmuls=True) as traffic, saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = _step(call, inputs, gradients, routing)
        peak = torch.npu.max_memory_allocated() - before
        del outputs
    return {
        "launches": traffic.launches,
        "bytes": traffic.bytes,
        "peak": peak,
        "saved": sum(saved.values()) if training else 0,
        "limit": limit(case, mode, getattr(routing, "hit", None)),
        "host_syncs": traffic.host_syncs,
        "by_op": {op: [t.launches, t.bytes_read + t.bytes_written] for op, t in sorted(traffic.by_op.items())},
    }


def _step(call, inputs, gradients, routing):
    import torch

    with routing:
        outputs = call(*inputs)
    if gradients is not None:
        torch.autograd.backward(outputs, gradients)
    return outputs


def _call(model, module, case: Case):
    """(inputs, function of the inputs that returns a tuple of outputs)"""
    import torch

    shape, tokens = case.shape, case.tokens

    def constant(*size):
        return torch.full(size, 0.5, dtype=torch.bfloat16, device="npu")

    layer = model.model.layers[0]
    width = shape.rope_dim or shape.head_dim
    cos, sin = constant(1, tokens, width), constant(1, tokens, width)
    if case.part == "rotary":
        modeling = importlib.import_module(type(layer).__module__)
        inputs = [constant(1, heads, tokens, shape.head_dim) for heads in (shape.heads, shape.kv_heads)]
        return inputs, lambda q, k: modeling.apply_rotary_pos_emb(q, k, cos, sin)
    hidden_states = [constant(1, tokens, shape.hidden)]
    if module is layer:
        return hidden_states, lambda x: (layer(x, position_embeddings=(cos, sin)),)
    return hidden_states, lambda x: (module(x),)


def _Routing(case: Case):
    """A mode in which every router sees the same drawn logits, since matrix products are not computed.

    The logits go into the router's product without a launch: emulated device memory is the host's. Attribute `hit`: how
    many experts the tokens chose.
    """
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    shape, tokens = case.shape, case.tokens
    products = {torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.matmul, torch.ops.aten.linear}

    class Routing(TorchDispatchMode):
        def __init__(self):
            super().__init__()
            generator = torch.Generator().manual_seed(0)
            chosen = torch.stack([_choice(shape, generator) for _ in range(tokens)])
            self.logits = torch.full((tokens, shape.experts), -4.0)
            # distinct values, so that no order is left to a tie
            self.logits.scatter_(1, chosen, torch.linspace(4, 3, shape.top_k).expand(tokens, -1))
            self.hit = chosen.unique().numel()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if func.overloadpacket in products and result.shape[-1] == shape.experts:
                logits = self.logits.to(result.dtype)
                if result.numel() == logits.numel() and result.is_contiguous():
                    ctypes.memmove(result.data_ptr(), logits.data_ptr(), logits.nbytes)
            return result

    return Routing()


def _choice(shape, generator):
    """The experts of one token: any top_k, or as many in each of the groups that DeepSeek-V3 admits."""
    import torch

    count, kept = _expert_groups(shape)
    size = shape.experts // count
    groups = torch.randperm(count, generator=generator)[:kept]
    return torch.cat(
        [group * size + torch.randperm(size, generator=generator)[: shape.top_k // kept] for group in groups]
    )


def _expert_groups(shape) -> tuple[int, int]:
    """(groups, groups kept) of the router: 8 and 4 in DeepSeek-V3, fewer where scaling left groups of less than 4 experts."""
    if not shape.q_lora:
        return 1, 1
    count = min(8, shape.experts // 4)
    return count, count // 2


# --- all implementations, the table and what it says


def run(implementations: list[str], wanted: list[Case], modes: tuple[str, ...], arguments: list[str]) -> list[dict]:
    """Measure every implementation, one process after the other."""
    from rich.console import Console
    from rich.progress import Progress

    rows = []
    with Progress(console=Console(stderr=True)) as progress:
        for implementation in implementations:
            task = progress.add_task(implementation, total=len(wanted) * len(modes))
            command = [sys.executable, __file__, *arguments, "--worker", implementation]
            with (
                tempfile.TemporaryFile("w+") as errors,
                subprocess.Popen(
                    command, stdout=subprocess.PIPE, stderr=errors, text=True, env=_environment()
                ) as process,
            ):
                for line in process.stdout:
                    if line.startswith("{"):
                        rows.append(json.loads(line))
                        progress.advance(task)
                if process.wait():
                    errors.seek(0)
                    sys.exit(f"{implementation} failed:\n{errors.read()[-4000:]}")
    return rows


def _environment() -> dict[str, str]:
    return {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", **os.environ, "HF_HUB_OFFLINE": "1"}


def groups(rows: list[dict]) -> dict[tuple[str, str], dict[str, dict]]:
    """Rows by (case, mode), then by implementation, in the order of the cases."""
    table: dict[tuple[str, str], dict[str, dict]] = {}
    for row in rows:
        table.setdefault((row["name"], row["mode"]), {})[row["impl"]] = row
    order = {part: index for index, part in enumerate(PARTS)}
    return dict(
        sorted(table.items(), key=lambda item: next(order[part] for part in PARTS if item[0][0].startswith(part)))
    )


def unpatched(row: dict, eager: dict) -> bool:
    """True where a peer does what transformers does: it has no patch for this model."""
    return row["impl"] != EAGER and row["by_op"] == eager["by_op"]


# Why npu-fusion is not first in a metric, where the ops do not say it: (start of the case's name, mode, metric) -> reason
REASONS = {
    ("MLP", "forward+backward", "peak"): "the gradients of gate and up leave one node of autograd together",
    ("decoder layer", "forward+backward", "peak"): "the gradients of gate and up leave one node of autograd together",
    (
        "MoE block",
        "forward+backward",
        "saved",
    ): "the router keeps its probabilities in fp32; shows where one token is routed",
}


def behind(group: dict[str, dict]) -> str:
    """Where npu-fusion is not first or tied, and by which ops; empty where it is."""
    ours, notes = group[OURS], []
    for metric in ("launches", "bytes", "peak", "saved", "host_syncs"):
        best = min(group.values(), key=lambda row: row[metric])
        if ours[metric] > best[metric] * 1.001:
            text = (
                f"{metric} {ours[metric] / best[metric]:.3f} of {best['impl']}'s"
                if best[metric]
                else f"{metric} {ours[metric]}"
            )
            reason = next((why for key, why in REASONS.items() if _matches(key, ours, metric)), "")
            if reason:
                text += f" ({reason})"
            elif metric in ("launches", "bytes"):
                text += f" ({_difference(ours['by_op'], best['by_op'], metric == 'bytes')})"
            notes.append(text)
    return "; ".join(notes)


def _matches(key: tuple[str, str, str], row: dict, metric: str) -> bool:
    return row["name"].startswith(key[0]) and (row["mode"], metric) == key[1:]


def _difference(ours: dict, best: dict, index: int) -> str:
    more = {op: ours.get(op, [0, 0])[index] - best.get(op, [0, 0])[index] for op in {*ours, *best}}
    ops = sorted((op for op in more if more[op]), key=lambda op: -abs(more[op]))[:4]
    return ", ".join(f"{op} {_size(more[op], sign=True) if index else format(more[op], '+d')}" for op in ops)


def _size(count: float, sign: bool = False) -> str:
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= scale:
            return f"{count / scale:{'+' if sign else ''}.{3 if unit == 'GB' else 1}f} {unit}"
    return f"{count:{'+' if sign else ''}d} B"


def show(rows: list[dict]) -> None:
    """Print the table, the rows in which npu-fusion is behind, and what the scaling did."""
    from rich.console import Console
    from rich.table import Table

    console = Console(width=max(Console().width, 132), highlight=False)
    table = Table(title="Counted on the emulated NPU; nothing here is a time", title_justify="left")
    for column in ("", "launches", "bytes", "of limit", "npu-fusion / this", "peak", "saved", "host syncs"):
        table.add_column(column, justify="right" if column else "left")
    notes = []
    for (name, mode), group in groups(rows).items():
        ours, eager = group.get(OURS), group.get(EAGER)
        bound = next(iter(group.values()))["limit"]
        table.add_row(f"[bold]{name}, {mode}[/bold]", "", _size(bound), "limit", "", "", "", "")
        for implementation, row in group.items():
            label = f"  {implementation}"
            if eager and unpatched(row, eager):
                label += " (no patch)" if implementation != OURS else " (eager)"
            table.add_row(
                label,
                str(row["launches"]),
                _size(row["bytes"]),
                f"{row['bytes'] / row['limit']:.3f}",
                f"{ours['bytes'] / row['bytes']:.3f}" if ours and row is not ours else "",
                _size(row["peak"]),
                _size(row["saved"]) if mode != "forward" else "",
                str(row["host_syncs"]),
            )
        table.add_section()
        if ours and (note := behind(group)):
            notes.append(f"{name}, {mode}: {note}")
    console.print(table)
    if any(OURS in group for group in groups(rows).values()):
        console.print(f"npu-fusion is first or tied in {len(groups(rows)) - len(notes)} of {len(groups(rows))} cases.")
        for note in notes:
            console.print(f"- {note}", soft_wrap=True)
    if any(row["scale"] > 1 for row in rows):
        console.print(
            "Scaled: experts and tokens were halved together until a training step fitted into memory (--budget), so that "
            "an expert sees as many tokens as in the published shape. A case's name has the sizes that were run."
        )


def bars(rows: list[dict]) -> list[tuple[str, float, float, float]]:
    """(what, figure, at most, least possible) for the goals that this project set itself, where their cases were run.

    A goal that is a ratio to a peer can be out of reach: where the peer's own traffic is close to the limit.
    """
    table = {key: group for key, group in groups(rows).items() if OURS in group and len(group) > 1}
    found = []

    def bar(prefix: str, mode: str, metric: str, most: float, against: str | None = None, scale: float = 1) -> None:
        for (name, case_mode), group in table.items():
            if case_mode != mode or not name.startswith(prefix):
                continue
            ours, others = group[OURS], {key: row for key, row in group.items() if key != OURS}
            if against == "best peer":
                reference = min(row[metric] for key, row in others.items() if key != EAGER) if len(others) > 1 else None
            else:
                reference = others[against][metric] if against in others else None
            if against is None:
                found.append((f"{name}, {mode}: {metric}", ours[metric], most, 0))
            elif reference:
                least = ours["limit"] / reference if metric == "bytes" else 0
                found.append((f"{name}, {mode}: {metric} of {against}'s", ours[metric] / reference, most, least))

    bar("MLP T=8192", "forward", "bytes", 0.69, "verl")
    bar("MLP T=8192", "forward", "bytes", 0.82, EAGER)
    bar("MLP T=8192", "forward", "launches", 4)
    bar("MLP T=8192", "forward+backward", "bytes", 0.93, "best peer")
    bar("MLP T=8192", "forward+backward", "saved", 1, "best peer")
    bar("MoE block T=8192", "forward", "bytes", 0.83, "best peer")
    bar("MoE block T=8192", "forward", "launches", 10)
    bar("MoE block T=8192", "forward", "host_syncs", 0)
    bar("MoE block T=8192", "forward+backward", "bytes", 0.90, "best peer")
    bar("MoE block T=8192", "forward+backward", "launches", 1, "best peer")
    bar("MoE block T=8192", "forward+backward", "peak", 1, "best peer")
    bar("decoder layer T=8192 Qwen3-8B", "forward", "launches", 20)
    bar("decoder layer T=8192 Qwen3-8B", "forward+backward", "launches", 1, "best peer")
    bar("decoder layer T=8192 Qwen3-8B", "forward+backward", "bytes", 1, "best peer")
    for (name, mode), group in table.items():
        if name.startswith(("RMSNorm", "rotary", "MLP T=8192", "MoE block T=1 ")) and mode == "forward":
            found.append((f"{name}, {mode}: bytes of the limit", group[OURS]["bytes"] / group[OURS]["limit"], 1.05, 1))
    return found


def show_bars(rows: list[dict]) -> None:
    from rich.console import Console

    console = Console(width=max(Console().width, 120), highlight=False)
    for what, figure, most, least in bars(rows):
        verdict = "[green]met   [/green]" if figure <= most else "[red]missed[/red]"
        reach = f"; out of reach, the limit is {least:.3f}" if least > most else ""
        console.print(f"{verdict} {figure:8.3f} (at most {most}{reach}) {what}")


PAGE_START, PAGE_END = "<!-- footprint: written by make bench -->", "<!-- footprint: end -->"


def page(text: str, rows: list[dict]) -> str:
    """`text` with the table between its two markers written anew."""
    lines = [
        "| T=8192 or as scaled | | launches | GB moved | of the limit | peak, GB | saved, GB |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    largest = {key: group for key, group in groups(rows).items() if all(f" T={t} " not in key[0] for t in TOKENS[:-1])}
    for (name, mode), group in largest.items():
        for row in group.values():
            patched = row["impl"] in (EAGER, OURS) or EAGER not in group or not unpatched(row, group[EAGER])
            if not patched:
                continue
            figures = [str(row["launches"]), f"{row['bytes'] / 1e9:.3f}", f"{row['bytes'] / row['limit']:.2f}"]
            figures += [f"{row['peak'] / 1e9:.2f}", f"{row['saved'] / 1e9:.2f}" if mode != "forward" else ""]
            if row["impl"] == OURS:
                figures = [f"**{figure}**" if figure else "" for figure in figures]
            first = f"{name}, {mode}" if row is next(iter(group.values())) else ""
            lines.append(f"| {first} | {row['impl']} | " + " | ".join(figures) + " |")
    before, after = text.split(PAGE_START)[0], text.split(PAGE_END)[1]
    return before + "\n".join([PAGE_START, *lines, PAGE_END]) + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="write every row to this file")
    parser.add_argument("--svg", type=Path, help="draw the picture of the README into this file")
    parser.add_argument("--page", type=Path, help="write the table into this page, between its markers")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)), help="numbers of tokens")
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--implementations", help="comma-separated; all of them by default")
    parser.add_argument("--attention", default=ATTENTION, help="attn_implementation of the decoder layers")
    parser.add_argument("--budget", type=float, default=8, help="GiB of device memory that a case may take")
    parser.add_argument("--from-json", type=Path, help="show an earlier run")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()

    tokens = tuple(int(count) for count in options.tokens.split(","))
    wanted = [case for case in cases(tokens, int(options.budget * 2**30)) if options.only in case.name]
    modes = tuple(options.modes.split(","))
    if options.worker:
        for row in measure(options.worker, wanted, modes, options.attention):
            print(json.dumps(row), flush=True)
        return
    if options.from_json:
        rows = json.loads(options.from_json.read_text())["cases"]
    else:
        import peers

        implementations = options.implementations.split(",") if options.implementations else [EAGER, *peers.PEERS, OURS]
        if set(implementations) & set(peers.PEERS):
            peers.install()
        if not wanted:
            parser.error(f"no case has {options.only!r} in its name")
        rows = run(implementations, wanted, modes, sys.argv[1:])
    if options.json:
        options.json.write_text(json.dumps({"cases": rows}, indent=1) + "\n")
    show(rows)
    show_bars(rows)
    if options.page:
        options.page.write_text(page(options.page.read_text(), rows))
    if options.svg:
        import picture

        options.svg.write_text(picture.draw(rows))


if __name__ == "__main__":
    main()
