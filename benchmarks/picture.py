"""The README's picture: memory traffic of a few layers, eager, the best peer and npu-fusion, with the limit marked."""

from __future__ import annotations

import io

import matplotlib
from matplotlib.figure import Figure

SHOWN = (  # (start of a case's name, mode, label)
    ("RMSNorm T=8192", "forward", "RMSNorm"),
    ("rotary T=8192", "forward", "Rotary embedding"),
    ("MLP T=8192", "forward", "MLP"),
    ("MoE block T=8192", "forward", "MoE block, 128 experts"),
    ("decoder layer T=8192 Qwen3-8B", "forward", "Qwen3-8B layer"),
    ("decoder layer T=8192 Qwen3-8B", "forward+backward", "Qwen3-8B layer, training"),
)
EAGER, OURS = "transformers", "npu-fusion"
BARS = (("eager", "#c9ced6"), ("best of verl, LLaMA-Factory, ms-swift", "#8c97a6"), (OURS, "#d1242f"))
HEIGHT, GAP = 0.26, 1.05


def draw(rows: list[dict]) -> str:
    """An SVG of the cases of SHOWN that were run; texts stay texts."""
    groups: dict[tuple[str, str], dict[str, dict]] = {}
    for row in rows:
        groups.setdefault((row["name"], row["mode"]), {})[row["impl"]] = row
    shown = [
        (label, group)
        for start, mode, label in SHOWN
        for (name, case_mode), group in groups.items()
        if name.startswith(start) and case_mode == mode and {EAGER, OURS} <= set(group)
    ]
    figure = Figure(figsize=(8, 1.2 + 0.72 * len(shown)), layout="constrained")
    axes = figure.add_subplot(
        title="Memory traffic of a layer on an Ascend NPU, in % of eager transformers\n"
        "counted on an emulated device, not timed; shorter is better"
    )
    for index, (label, group) in enumerate(shown):
        eager, peers = group[EAGER], [row for name, row in group.items() if name not in (EAGER, OURS)]
        best = min(peers, key=lambda row: row["bytes"]) if peers else None
        for place, ((_, color), row) in enumerate(zip(BARS, (eager, best, group[OURS]), strict=True)):
            if row is not None:
                share, y = row["bytes"] / eager["bytes"], index * GAP + (place - 1) * HEIGHT
                axes.barh(y, share, HEIGHT * 0.9, color=color)
                weight = "bold" if row is group[OURS] else "normal"
                text = f"{share:.0%} · {row['launches']} launches"
                axes.text(share + 0.01, y, text, va="center", fontsize=8, weight=weight)
        axes.plot([eager["limit"] / eager["bytes"]] * 2, [index * GAP - 0.4, index * GAP + 0.4], color="black")
        axes.text(-0.02, index * GAP, label, ha="right", va="center", fontsize=10, weight="bold")
    handles = [matplotlib.patches.Patch(color=color, label=label) for label, color in BARS]
    handles.append(matplotlib.lines.Line2D([], [], color="black", label="least possible"))
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    axes.set(xlim=(0, 1.25), yticks=[], xticks=[])
    axes.invert_yaxis()
    axes.spines[:].set_visible(False)
    axes.title.set_fontsize(11)
    file = io.StringIO()
    # the same picture for the same numbers, byte for byte
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "npu-fusion"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
    return file.getvalue()
