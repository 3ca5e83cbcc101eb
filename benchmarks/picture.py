"""The README's picture: memory traffic of a few layers, as bars of an SVG that needs no library to draw or to read."""

from __future__ import annotations

from html import escape

SHOWN = (  # (start of a case's name, mode, label)
    ("RMSNorm T=8192", "forward", "RMSNorm"),
    ("rotary T=8192", "forward", "Rotary embedding"),
    ("MLP T=8192", "forward", "MLP"),
    ("MoE block T=8192", "forward", "MoE block, 128 experts"),
    ("decoder layer T=8192 Qwen3-8B", "forward", "Qwen3-8B layer"),
    ("decoder layer T=8192 Qwen3-8B", "forward+backward", "Qwen3-8B layer, training"),
)
EAGER, OURS = "transformers", "npu-fusion"
STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif; fill: #1f2328 }
  .title { font-size: 17px; font-weight: 600 } .note, .axis { fill: #59636e; font-size: 12px } .label { font-weight: 600 }
  .eager { fill: #c9ced6 } .peer { fill: #8c97a6 } .ours { fill: #d1242f } .limit { stroke: #1f2328; stroke-width: 2 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .note, .axis { fill: #9198a1 }
    .eager { fill: #3d444d } .peer { fill: #656c76 } .ours { fill: #f85149 } .limit { stroke: #e6edf3 }
  }
"""


def draw(rows: list[dict]) -> str:
    """An SVG of eager, the best peer and npu-fusion in the cases of SHOWN that were run, with the limit marked."""
    groups: dict[tuple[str, str], dict[str, dict]] = {}
    for row in rows:
        groups.setdefault((row["name"], row["mode"]), {})[row["impl"]] = row
    shown = [
        (label, group)
        for start, mode, label in SHOWN
        for (name, case_mode), group in groups.items()
        if name.startswith(start) and case_mode == mode and {EAGER, OURS} <= set(group)
    ]
    left, width, bar, step = 190, 420, 15, 76
    height = 92 + step * len(shown) + 34
    body = [
        '<text class="title" x="16" y="28">Memory traffic of a layer on an Ascend NPU, % of eager transformers</text>',
        '<text class="note" x="16" y="48">Counted, not timed: the real torch_npu on an emulated device. Shorter is better.</text>',
    ]
    legend = (("eager", "eager"), ("peer", "best of verl, LLaMA-Factory, ms-swift"), ("ours", "npu-fusion"))
    x = 16
    for style, text in legend:
        body.append(f'<rect class="{style}" x="{x}" y="61" width="12" height="12" rx="2"/>')
        body.append(f'<text x="{x + 18}" y="72">{escape(text)}</text>')
        x += 40 + 7 * len(text)
    body.append(
        f'<line class="limit" x1="{x}" x2="{x}" y1="60" y2="74"/><text x="{x + 8}" y="72">least possible</text>'
    )
    for index, (label, group) in enumerate(shown):
        y = 92 + index * step
        body.append(f'<text class="label" x="16" y="{y + 32}">{escape(label)}</text>')
        eager = group[EAGER]
        peers = [row for name, row in group.items() if name not in (EAGER, OURS)]
        bars = [("eager", eager)]
        if peers:
            bars.append(("peer", min(peers, key=lambda row: row["bytes"])))
        bars.append(("ours", group[OURS]))
        for place, (style, row) in enumerate(bars):
            top, share = y + 6 + place * (bar + 3), row["bytes"] / eager["bytes"]
            text = f"{share:.0%} · {row['launches']} launches"
            body.append(
                f'<rect class="{style}" x="{left}" y="{top}" width="{share * width:.1f}" height="{bar}" rx="2"/>'
            )
            weight = ' class="label"' if style == "ours" else ""
            body.append(f'<text{weight} x="{left + max(share * width, 0) + 8:.1f}" y="{top + 12}">{text}</text>')
        mark = left + width * eager["limit"] / eager["bytes"]
        body.append(f'<line class="limit" x1="{mark:.1f}" x2="{mark:.1f}" y1="{y + 3}" y2="{y + 60}"/>')
    content = "\n".join(f"  {line}" for line in body)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 {height - 20}" width="800" height="{height - 20}" role="img" '
        f'aria-label="Memory traffic of fused layers">\n<style>{STYLE}</style>\n{content}\n</svg>\n'
    )
