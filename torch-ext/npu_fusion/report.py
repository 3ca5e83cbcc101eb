"""What people read: what would be swapped, what was, and how far the two are apart."""

from dataclasses import dataclass
from typing import Any, Dict, List, Sequence, Tuple

import torch
from torch import nn

from . import integration
from .layers import SPEC
from .mapping import layer_for
from .specs import Declined


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in cells)


@dataclass(frozen=True)
class Row:
    layer: str  # the layer that runs or would run there; "-" if there is none
    class_name: str
    count: int
    swapped: bool
    reason: str  # why not, if not


@dataclass(frozen=True)
class Report:
    """Rows of equal layer, class and outcome; prints as a table."""

    rows: Tuple[Row, ...]

    @property
    def swapped(self) -> Dict[str, int]:
        """{layer: number of places}"""
        counts: Dict[str, int] = {}
        for row in self.rows:
            if row.swapped:
                counts[row.layer] = counts.get(row.layer, 0) + row.count
        return counts

    def __str__(self) -> str:
        if not self.rows:
            return "no layer of this model is one that npu-fusion could swap"
        return table(
            ("layer", "class", "count", "swapped"),
            [
                (row.layer, row.class_name, row.count, "yes" if row.swapped else f"no: {row.reason}")
                for row in self.rows
            ],
        )

    __repr__ = __str__


def collect(outcomes: Sequence[Tuple[str, str, bool, str]]) -> Report:
    counts: Dict[Tuple[str, str, bool, str], int] = {}
    for outcome in outcomes:
        counts[outcome] = counts.get(outcome, 0) + 1
    rows = [Row(layer, name, count, swapped, reason) for (layer, name, swapped, reason), count in counts.items()]
    return Report(tuple(sorted(rows, key=lambda row: (not row.swapped, row.layer, row.class_name))))


def report(model: nn.Module) -> Report:
    """What runs fused in `model` now, and why the other candidates do not."""
    outcomes = []
    for site in integration.sites(model):
        layer = integration.swapped_layer(site)
        if layer:
            outcomes.append((layer, site.class_name, True, ""))
            continue
        on_record = site.target.__dict__.get(SPEC)
        decision = on_record if isinstance(on_record, Declined) else layer_for(site.spec)
        declined = isinstance(decision, Declined)
        reason = decision.reason if declined else "not kernelized"
        outcomes.append(("-" if declined else decision, site.class_name, False, reason))
    return collect(outcomes)


def plan(model_or_config: Any, only: Sequence[str] = (), exclude: Sequence[str] = ()) -> Report:
    """What `kernelize` would swap in a model, or in the model of a transformers config: no weights and no NPU needed.

    Args:
        model_or_config: a module on any device, or a PretrainedConfig, whose model is built on the meta device.
        only, exclude: as for `kernelize`.
    """
    model = model_or_config if isinstance(model_or_config, nn.Module) else integration.model_on_meta(model_or_config)
    outcomes = []
    for site in integration.sites(model):
        layer = layer_for(site.spec)
        if isinstance(layer, Declined):
            outcomes.append(("-", site.class_name, False, layer.reason))
        elif not integration.chosen(site, layer, only, exclude):
            outcomes.append((layer, site.class_name, False, integration.LEFT_OUT))
        else:
            outcomes.append((layer, site.class_name, True, ""))
    return collect(outcomes)


@dataclass(frozen=True)
class Difference:
    name: str
    layer: str
    error: float  # largest absolute difference over the largest absolute value of the eager output


@dataclass(frozen=True)
class Verification:
    """Differences in the order in which the layers ran; prints as a table."""

    differences: Tuple[Difference, ...]
    tolerance: float

    @property
    def first(self) -> Any:
        """The first layer whose output differs by more than the tolerance, or None."""
        return next((difference for difference in self.differences if not difference.error <= self.tolerance), None)

    def __str__(self) -> str:
        rows = [
            (d.name, d.layer, f"{d.error:.2e}", "" if d.error <= self.tolerance else "<-") for d in self.differences
        ]
        verdict = f"all within {self.tolerance:g}" if self.first is None else f"they part at {self.first.name}"
        return table(("name", "layer", "error", ""), rows) + f"\n{verdict}"

    __repr__ = __str__


def outputs(model: nn.Module, places: Dict[nn.Module, str], inputs: Dict[str, Any]) -> List[Tuple[str, torch.Tensor]]:
    """(name, output on the CPU) of every call of a module in `places`, in order, and of the model."""
    seen: List[Tuple[str, torch.Tensor]] = []

    def record(module, _args, output):
        for tensor in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(tensor, torch.Tensor):
                seen.append((places[module], tensor.detach().float().cpu()))

    handles = [module.register_forward_hook(record) for module in places]
    try:
        with torch.no_grad():
            result = model(**inputs) if isinstance(inputs, dict) else model(*inputs)
    finally:
        for handle in handles:
            handle.remove()
    result = result[0] if isinstance(result, (tuple, list)) or hasattr(result, "to_tuple") else result
    return [*seen, ("output of the model", result.detach().float().cpu())]


def verify(model: nn.Module, inputs: Any, tolerance: float = 0.05) -> Verification:
    """Run `model` eager and fused on the same inputs and compare the output of every swapped layer.

    Args:
        model: on its device, kernelized or not; it is left as it was found.
        inputs: keyword arguments (dict) or positional ones (tuple) of its forward.
        tolerance: relative to the largest value of an output. The default is 6 bf16 ulps at that value, which covers
            one rounding of difference a layer, handed on through a deep model.
    """
    was_kernelized = integration.is_kernelized(model)
    names = {site.target: site.name for site in integration.sites(model) if isinstance(site.target, nn.Module)}
    integration.restore(model)
    eager = outputs(model, names, inputs)
    integration.kernelize(model)
    fused = outputs(model, names, inputs)
    layers = {site.name: integration.swapped_layer(site) or "-" for site in integration.sites(model)}
    if not was_kernelized:
        integration.restore(model)
    differences = []
    for (name, expected), (_, result) in zip(eager, fused):
        error = (
            (expected - result).abs().max().item() / (expected.abs().max().item() or 1.0) if expected.numel() else 0.0
        )
        differences.append(Difference(name, layers.get(name, "-"), error))
    return Verification(tuple(differences), tolerance)
