"""Every layer of transformers that could be swapped, and every language model: is it, and does it compute the same?

    python benchmarks/coverage.py [--json FILE] [--page FILE] [--only MODULE ...] [--compile] [--jobs N]

Builds each site of census.csv at a small size, runs it eagerly on the NPU (an emulated one where there is none), swaps
it with `npu.kernelize` and runs it again: forward and backward, in fp32 and bf16, on ordinary and on heavy-tailed
inputs. Then the same with whole language models: see coverage_models.py. Prints a table by kind of layer. Wrong means that a swapped layer differs from eager; what is not swapped runs
transformers' own code, for the reason that is given. Nothing here is a time: see footprint.py and model.py for cost.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import coverage_models
from coverage_models import ModelResult
from coverage_sites import Site, build, census

ROOT = Path(__file__).resolve().parent.parent
KINDS = {
    "norm": "norms",
    "mlp": "gated MLPs",
    "experts": "packed experts",
    "rotary": "rotary functions",
    "router": "routers",
}
# Largest difference from eager, relative to the largest value of the tensor.
# fp32: sums in another order, of at most some hundred terms of 2^-24 each.
# bf16: eager rounds to 2^-9 after each step, the fused op once; the longest chain here has six such steps, and a
# product of two rounded gradients doubles them.
# Beyond that, ours may be no further from the fp32 result on the CPU than twice eager's: where a value sits on the edge
# of a clamp, eager's gradient jumps as much as ours, and F.gelu on A2 and A3 is the tanh form, whatever was asked for.
BOUNDS = {"float32": (1e-5, 2e-5), "bfloat16": (6 * 2**-9, 12 * 2**-9)}


@dataclass
class Result:
    """What became of a site. `status` is verified, wrong, declined, or recognised: known, but no layer serves it."""

    kind: str
    module: str
    name: str
    decorated: str
    status: str = "declined"
    layer: str = ""
    reason: str = ""
    fused: dict[str, list[str]] = field(default_factory=dict)  # dtype -> torch_npu's ops that ran
    errors: dict[str, tuple[float, float]] = field(default_factory=dict)  # dtype -> forward, backward


# --- one process: sites one after another


def start(local_kernels: str) -> None:
    """Prepares a worker."""
    global npu
    os.environ["LOCAL_KERNELS"] = local_kernels
    import logging
    import warnings

    import npu_emulator.auto  # noqa: F401  before torch
    import torch
    import torch_npu  # noqa: F401
    import transformers
    from kernels import get_kernel

    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    npu = get_kernel("org/npu-fusion", version=1)


def check_all(sites: list[Site]) -> list[Result]:
    return [check(site) for site in sites]


def check_model(name: str, compiled: bool) -> list[ModelResult]:
    return [coverage_models.check(name, npu, compiled)]


def check(site: Site) -> Result:
    result = Result(site.kind, site.module, site.name, site.decorated)
    for dtype in BOUNDS:
        try:
            host = Host(site, dtype)
        except Exception as error:
            result.reason = f"cannot be built here: {type(error).__name__}: {error}"
            return result
        try:
            check_dtype(host, dtype, result)
        except Exception as error:  # eager ran: see Host.inputs
            result.status, result.reason = "wrong", f"{dtype}: raised {type(error).__name__}: {str(error)[:200]}"
        finally:
            npu.restore(host.model)
    return result


class Host:
    """A small model that does nothing but call the site."""

    def __init__(self, site: Site, dtype: str):
        import torch
        from torch import nn

        self.site, self.dtype = site, getattr(torch, dtype)
        self.model = nn.Module()
        self.model.anchor = nn.Parameter(torch.zeros(1))
        self.target = build(site, small=True)
        if isinstance(self.target, nn.Module) and site.kind != "rotary":
            self.model.layer = self.target
            self.call = self.target
        else:
            # a forward that looks the function up where the model's own attention does
            scope = vars(sys.modules[f"transformers.models.{site.module}.modeling_{site.module}"])
            forward = eval(f"lambda self, *args, **kwargs: {site.name}(*args, **kwargs)", scope)
            self.model.layer = self.call = type("Attention", (nn.Module,), {"forward": forward})()
        self.model.to("npu", self.dtype)

    def swapped_layer(self) -> str | None:
        for place in npu.integration.sites(self.model):
            if place.target is self.target or (place.scope is not None and place.attribute == self.site.name):
                return npu.integration.swapped_layer(place)
        return None

    def inputs(self) -> Iterator[tuple]:
        """Inputs that eager takes: ordinary ones, then heavy-tailed ones."""
        import torch

        def random(*shape, seed, tail=0.0):
            generator = torch.Generator().manual_seed(seed + len(shape))
            x = torch.randn(shape, generator=generator) * (torch.randn(shape, generator=generator) * tail).exp()
            return x.to("npu", self.dtype)

        for seed, tail in ((0, 0.0), (100, 1.0)):
            for args in self.candidates(
                lambda *shape, seed=seed, tail=tail: random(*shape, seed=seed + len(shape), tail=tail)
            ):
                try:
                    with torch.no_grad():
                        out = self.call(*(a.clone() if isinstance(a, torch.Tensor) else a for a in args))
                except Exception:
                    continue
                yield without_ties(args, out) if self.site.kind == "router" else args
                break

    def candidates(self, random: Callable) -> Iterator[tuple]:
        import torch

        kind, tensors = self.site.kind, list(self.model.layer.state_dict(keep_vars=True).values())
        widths = sorted({size for tensor in tensors for size in tensor.shape if size > 1}) or [64]
        if kind == "norm":
            for width in widths:
                x = random(2, 9, width)
                yield from ((x,), (x, random(2, 9, width)))
        if kind == "mlp":
            yield from ((random(2, 9, width),) for width in widths)
        if kind == "experts":
            experts = tensors[0].shape[0]
            index = torch.stack(
                [torch.randperm(experts, generator=torch.Generator().manual_seed(t))[:2] for t in range(17)]
            )
            weights = random(17, 2).float().softmax(-1).to(self.dtype)
            yield from ((random(17, width), index.to("npu"), weights) for width in widths)
        if kind == "router":
            experts, width = next(tensor.shape for tensor in tensors if tensor.dim() == 2 and tensor.shape[0] > 1)
            for shape in ((18, width), (2, 9, width)):
                yield (random(*shape),)
                yield random(*shape), random(experts)
        if kind == "rotary":
            yield from self.rotary_candidates(random)

    def rotary_candidates(self, random: Callable) -> Iterator[tuple]:
        """Arguments of the layout that the function was recognised for."""
        spec = npu.matching.match(self.target)
        if isinstance(spec, npu.specs.Declined):
            return
        width = 32
        columns = {"full": width, "first_half": width, "half_width": width // 2}[spec.cos]
        shapes = {  # (ranks of x and cos), with a head for each layout
            (4, 3): ((2, 3, 9) if spec.unsqueeze == 1 else (2, 9, 3), (2, 9)),
            (4, 2): ((2, 3, 9) if spec.unsqueeze is None else (2, 9, 3), (9,)),
            (3, 2): ((9, 3), (9,)),
            (4, 4): ((2, 3, 9), (2, 1, 9)),
            (3, 3): ((2, 9), (2, 9)),
            (2, 2): ((9,), (9,)),
        }
        for ranks in spec.ranks:
            shape, positions = shapes[ranks]
            given = {"cos": random(*positions, columns), "sin": random(*positions, columns).roll(1, 0)}
            yield tuple(given[name] if name in given else random(*shape, width) for name in spec.arguments)


def check_dtype(host: Host, dtype: str, result: Result) -> None:
    spec = npu.matching.match(host.target)
    layer = npu.mapping.layer_for(spec)
    if isinstance(layer, npu.specs.Declined):
        result.reason = result.reason or layer.reason + (f" ({dtype})" if result.status == "verified" else "")
        if result.status == "declined" and not isinstance(spec, npu.specs.Declined):
            result.status = "recognised"
        return
    inputs = list(host.inputs())
    eager = [evaluate(host, args) for args in inputs]
    exact = [evaluate_on_cpu(host, args) for args in inputs]
    npu.kernelize(host.model)
    if not inputs or host.swapped_layer() != layer:
        result.status = "wrong"
        result.reason = f"{layer} was not swapped in" if inputs else "no input was found that eager takes"
        return
    result.layer = layer
    errors, wrong = [0.0, 0.0], False
    with recording() as ops:
        for args, *known in zip(inputs, eager, exact, strict=True):
            for i, (ours, theirs, truth) in enumerate(zip(evaluate(host, args), *known, strict=True)):
                error = difference(ours, theirs)
                errors[i] = max(errors[i], error)
                if error > BOUNDS[dtype][i]:
                    wrong |= not difference(ours, truth, False) <= 2 * difference(theirs, truth, False) < float("inf")
    result.errors[dtype], result.fused[dtype] = tuple(errors), sorted(ops)
    if wrong:
        result.status = "wrong"
        result.reason = f"{dtype}: forward differs by {errors[0]:.1e}, backward by {errors[1]:.1e}"
    elif result.status != "wrong":
        result.status = "verified"


def evaluate(host: Host, args: tuple) -> tuple[list, list]:
    """(results, gradients for the floating arguments and the parameters)."""
    import torch

    leaves = [a.clone().requires_grad_(a.is_floating_point()) if isinstance(a, torch.Tensor) else a for a in args]
    if host.site.kind == "rotary":  # cos and sin are constants to a model
        for leaf, argument in zip(leaves, npu.matching.match(host.target).arguments, strict=True):
            leaf.requires_grad_(argument not in ("cos", "sin"))
    out = host.call(*(leaf.clone() for leaf in leaves))
    outs = [o for o in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(o, torch.Tensor)]
    if host.site.kind == "router":
        outs = without_order(outs)
    wanted = [leaf for leaf in leaves if leaf.requires_grad] + [
        p for p in host.model.layer.parameters() if p.requires_grad
    ]
    moving = [o for o in outs if o.requires_grad]
    generator = torch.Generator().manual_seed(1)
    cotangents = [torch.randn(o.shape, generator=generator).to(o.device, o.dtype) for o in moving]
    gradients = torch.autograd.grad(moving, wanted, cotangents, allow_unused=True) if moving else []
    return [o.detach() for o in outs], list(gradients)


def without_ties(args: tuple, out: Any) -> tuple:
    """Only the tokens whose experts have different logits: which of two equal ones is chosen is nobody's definition."""
    x, *bias = args
    for logits in out if isinstance(out, tuple) and x.dim() == 2 else ():
        if getattr(logits, "dim", int)() == 2 and logits.is_floating_point() and len(logits) == len(x):
            return x[[len(set(row)) == len(row) for row in logits.tolist()]], *bias
    return args


def without_order(outs: list) -> list:
    """A router's results with its weights at their experts: the order of the k is not part of what it computes."""
    import torch

    index = next((o for o in outs if not o.is_floating_point() and o.dim() == 2), None)
    if index is None:
        return outs
    experts = 1 + max(int(index.max()), *(o.shape[-1] for o in outs))
    spread = [
        torch.zeros(len(o), experts, dtype=o.dtype, device=o.device).scatter(1, index, o)
        for o in outs
        if o.is_floating_point() and o.shape == index.shape
    ]
    return [o for o in outs if o.shape != index.shape] + spread + [index.sort(-1)[0]]


def evaluate_on_cpu(host: Host, args: tuple) -> tuple[list, list]:
    """Eager with the same numbers, in fp32 on the CPU."""
    import torch

    host.model.to("cpu", torch.float32)
    try:
        return evaluate(host, tuple(a.cpu().float() if a.is_floating_point() else a.cpu() for a in args))
    finally:
        host.model.to("npu", host.dtype)


def difference(ours: list, theirs: list, dtypes: bool = True) -> float:
    """Largest difference relative to the largest value; inf where one has what the other has not, or another dtype."""
    worst = 0.0 if len(ours) == len(theirs) else float("inf")
    for a, b in zip(ours, theirs, strict=False):
        if a is None or b is None:
            worst = worst if a is b else float("inf")
        elif a.shape != b.shape or (dtypes and a.dtype != b.dtype):
            worst = float("inf")
        elif a.numel():
            worst = max(worst, coverage_models.distance(a, b))
    return worst


class recording:
    """The torch_npu ops that run inside, by name."""

    def __enter__(self) -> set[str]:
        from torch.utils._python_dispatch import TorchDispatchMode

        seen: set[str] = set()

        class Record(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                if function.namespace == "npu":
                    seen.add(function.overloadpacket.__name__)
                return function(*args, **(kwargs or {}))

        self.mode = Record()
        self.mode.__enter__()
        return seen

    def __exit__(self, *error: Any) -> None:
        self.mode.__exit__(*error)


# --- all processes


def sweep(only: list[str] | None, jobs: int, compiled: bool) -> tuple[list[Result], list[ModelResult]]:
    """Results of all layers and of all models; of those modeling modules and model types only, if given."""
    sites = [site for site in census() if not only or site.module in only]
    families: dict[str, list[Site]] = {}
    for site in sites:
        families.setdefault(site.module, []).append(site)
    results: list = []
    with tempfile.TemporaryDirectory(prefix="npu-fusion-build-") as directory:
        local = os.environ.get("LOCAL_KERNELS")
        if local is None:
            runpy.run_path(str(ROOT / "scripts" / "build.py"))["build"](Path(directory))
            local = f"org/npu-fusion={directory}"
        pool = ProcessPoolExecutor(jobs, get_context("spawn"), initializer=start, initargs=(local,))
        with pool:
            models = [name for name in pool.submit(coverage_models.names).result() if not only or name in only]
            tasks = {pool.submit(check_all, group): name for name, group in families.items()}
            tasks |= {pool.submit(check_model, name, compiled): name for name in models}
            with progress(len(sites) + len(models)) as advance:
                for task in as_completed(tasks):
                    results += task.result()
                    advance(len(task.result()), f"{tasks[task]:24.24}")
    order = {(site.kind, site.module, site.name): i for i, site in enumerate(sites)}
    layers = [r for r in results if isinstance(r, Result)]
    layers.sort(key=lambda r: order[r.kind, r.module, r.name])
    return layers, sorted((r for r in results if isinstance(r, ModelResult)), key=lambda r: r.name)


class progress:
    def __init__(self, total: int):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.bar, self.total = Progress(*columns, console=Console(stderr=True)), total

    def __enter__(self) -> Callable[[int, str], None]:
        self.bar.start()
        task = self.bar.add_task("starting", total=self.total)
        return lambda count, what: self.bar.update(task, advance=count, description=what)

    def __exit__(self, *error: Any) -> None:
        self.bar.stop()


def summary(results: list[Result]) -> dict[str, dict[str, Any]]:
    kinds = {}
    for kind in KINDS:
        mine = [r for r in results if r.kind == kind]
        status = Counter(r.status for r in mine)
        kinds[kind] = {
            "sites": len(mine),
            "recognised": len(mine) - status["declined"],
            "swapped": status["verified"] + status["wrong"],
            "fused": sum(bool(r.fused) and all(r.fused.values()) for r in mine),
            "verified": status["verified"],
            "declined": status["declined"] + status["recognised"],
            "wrong": status["wrong"],
            "reasons": dict(Counter(r.reason for r in mine if r.status in ("declined", "recognised")).most_common()),
        }
    return kinds


def families(results: list[Result]) -> list[dict[str, Any]]:
    """Every modeling module of the installed transformers, those without such layers included."""
    import importlib.util

    models = Path(importlib.util.find_spec("transformers").origin).parent / "models"
    names = sorted(file.stem.removeprefix("modeling_") for file in models.glob("*/modeling_*.py"))
    sites: dict[str, list] = {name: [] for name in names}
    for result in results:
        sites.setdefault(result.module, []).append(asdict(result))
    return [{"family": name, "sites": found} for name, found in sites.items()]


COLUMNS = ("sites", "recognised", "swapped", "fused", "verified", "declined", "wrong")


def table(kinds: dict[str, dict[str, Any]]) -> list[str]:
    header = f"{'':18}" + "".join(f"{column:>12}" for column in COLUMNS)
    return [header, *(f"{KINDS[kind]:18}" + "".join(f"{row[c]:>12}" for c in COLUMNS) for kind, row in kinds.items())]


def page(
    kinds: dict[str, dict[str, Any]], found: list[dict[str, Any]], models: list[ModelResult], transformers: str
) -> str:
    """docs/coverage.md: what is swapped, to look a model up in."""
    with_sites = [family for family in found if family["sites"]]
    lines = [
        "# What is swapped in which model",
        "",
        f"Written by `make coverage` with transformers {transformers}: every layer was built small, swapped by",
        "`npu.kernelize` and compared with eager, forward and backward, in fp32 and bf16, on an emulated NPU where",
        "there is no real one. No list decides what is swapped: each layer is probed. Nothing here is about speed.",
        "",
        f"| | {' | '.join(COLUMNS)} |",
        f"| --- |{' ---: |' * len(COLUMNS)}",
        *(f"| {KINDS[kind]} | {' | '.join(str(row[c]) for c in COLUMNS)} |" for kind, row in kinds.items()),
        "",
        "Recognised: matching knows what it computes. Swapped: a layer of npu-fusion runs. Fused: ops of torch_npu",
        "run in both dtypes. Declined: transformers' own code runs, for the reason below. Wrong: differs from eager.",
        "",
        f"## By model: {len(with_sites)} of {len(found)} modeling modules have such layers",
        "",
        "Verified of all, by kind. Names are those of `transformers.models`.",
        "",
        f"| model | {' | '.join(KINDS.values())} | left alone |",
        f"| --- |{' ---: |' * len(KINDS)} --- |",
    ]
    for family in with_sites:
        cells = []
        for kind in KINDS:
            mine = [site for site in family["sites"] if site["kind"] == kind]
            cells.append(f"{sum(s['status'] == 'verified' for s in mine)}/{len(mine)}" if mine else "")
        alone = ", ".join(f"`{s['name']}`" for s in family["sites"] if s["status"] != "verified")
        lines.append(f"| {family['family']} | {' | '.join(cells)} | {alone} |")
    lines += ["", *coverage_models.page(models)]
    lines += ["## What is left alone, and why", "", "| layer | reason |", "| --- | --- |"]
    for family in with_sites:
        for site in family["sites"]:
            if site["reason"]:  # of a verified one: in the other dtype
                reason = site["reason"].replace("|", "\\|")
                lines.append(f"| `{site['module']}.{site['name']}` | {site['status']}: {reason} |")
    without = [family["family"] for family in found if not family["sites"]]
    lines += ["", "## Models without such layers", "", ", ".join(without) + "."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, help="write everything there")
    parser.add_argument("--page", type=Path, help="write docs/coverage.md there")
    parser.add_argument(
        "--only", nargs="+", metavar="MODULE", help="modeling modules and model types, such as qwen3_moe"
    )
    parser.add_argument("--compile", action="store_true", help="compile the models, too (minutes)")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    options = parser.parse_args()
    from importlib.metadata import version

    results, models = sweep(options.only, options.jobs, options.compile)
    kinds, found = summary(results), families(results)
    print("\n".join(table(kinds)))
    print(coverage_models.headline(models))
    wrong = [r for r in (*results, *models) if r.status == "wrong"]
    for r in wrong:
        print(f"wrong: {r.name if isinstance(r, ModelResult) else f'{r.module}.{r.name}'}: {r.reason}")
    data = {
        "transformers": version("transformers"),
        "kinds": kinds,
        "families": found,
        "models": [asdict(model) for model in models],
    }
    if options.json:
        options.json.write_text(json.dumps(data, indent=1))
    if options.page:
        options.page.write_text(page(kinds, found, models, data["transformers"]))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
