"""Rotary position embedding: functions, and modules without state, that take cos and sin."""

import itertools
from functools import partial

import torch

from .. import ops
from ..specs import Rotary
from .probe import FLOATS, all_near, forward, lengths, near, parameters, required, run, same_rounding
from .stand_in import Mismatch, random

SHAPES = {  # (ranks of x and cos): shapes in front of the last dimension
    (4, 3): ((2, 5, 5), (2, 5)),  # as many heads as positions, so that values alone tell layouts apart
    (3, 2): ((5, 5), (5,)),
    (4, 2): ((2, 5, 5), (5,)),
    (4, 4): ((2, 5, 5), (2, 1, 5)),
    (3, 3): ((2, 5), (2, 5)),
    (2, 2): ((5,), (5,)),
}
WIDTH = 16
COLUMNS = {"full": WIDTH, "first_half": WIDTH, "half_width": WIDTH // 2}  # of cos
STYLES = ("half", "interleaved", "interleaved_to_half")


def match_rotary(function):
    names = [p.name for p in parameters(function)]
    count = min(names.index("cos"), names.index("sin"))
    if count not in (1, 2) or sorted(names[count : count + 2]) != ["cos", "sin"]:
        raise Mismatch("does not take one or two tensors, then cos and sin", candidate=False)
    if set(required(function)) - set(names[: count + 2]):
        raise Mismatch(f"needs {', '.join(required(function)[count + 2 :])} beside cos and sin", candidate=False)
    probe = Probe(function, names[count : count + 2], count)
    rotation = probe.find()
    kind, unsqueeze, ranks = rotation
    columns, shapes = COLUMNS[kind[1]], SHAPES[ranks[0]]
    args = probe.inputs(*shapes, columns)
    checks = [
        ("for large inputs (a clamp?)", (probe.inputs(*shapes, columns, scale=1e5), {})),
        ("for another head_dim", (probe.inputs(*shapes, columns * 8, width=WIDTH * 8), {})),
        *(
            (f"at length {n}", (probe.inputs(*long(n, ranks[0], unsqueeze), columns), {}))
            for n in (1, *lengths(function))
        ),
        ("in its gradients", (args, {"gradients": True})),
    ]
    for when, (inputs, options) in checks:
        if not probe.agrees(kind, unsqueeze, inputs, **options):
            raise Mismatch(f"computes a rotation, but differs {when}")

    narrow = probe.inputs(*shapes, columns // 2)
    partly = next((part for part in ("first", "last") if probe.agrees((*kind[:3], part), unsqueeze, narrow)), None)
    heads = probe.inputs(*SHAPES[4, 3], columns)
    by_argument = "unsqueeze_dim" in names and all(probe.agrees(kind, d, heads, unsqueeze_dim=d) for d in (1, 2))
    others = [name for name in names[count + 2 :] if name != "unsqueeze_dim"]
    ignored = tuple(name for name in others if probe.agrees(kind, unsqueeze, args, **{name: torch.arange(4, -1, -1)}))
    dtypes, upcast = probe.dtypes(kind, unsqueeze, shapes, columns)
    style, cos, sign, _ = kind
    return Rotary(
        tuple(names[: count + 2]), style, cos, sign, partly, unsqueeze, by_argument, ignored, dtypes, upcast, ranks
    )


def long(n, ranks, unsqueeze):
    """SHAPES[ranks] with n positions and one head."""
    one = {4: (1, 1, n) if unsqueeze in (1, None) else (1, n, 1), 3: (1, n), 2: (n,)}[ranks[0]]
    if ranks == (3, 2) and unsqueeze is not None:
        one = (n, 1)
    return one, tuple(n if size == 5 else 1 for size in SHAPES[ranks][1])


class Probe:
    """Compares `function` with a rotation of a kind: (style, columns of cos, sign, part that is rotated)."""

    def __init__(self, function, tables, count):
        self.function, self.tables, self.count = function, tables, count
        self.results = {}

    def inputs(self, shape, positions, columns, width=WIDTH, dtypes=(torch.float32, torch.float32), scale=1.0):
        xs = [random(20 + i, *shape, width, dtype=dtypes[0], scale=scale) for i in range(self.count)]
        return (*xs, *(random(30 + i, *positions, columns, dtype=dtypes[1]) for i in range(2)))

    def forward(self, target, *args, **options):
        cos, sin = args[self.count :]
        return forward(target, *args[: self.count], cos=cos, sin=sin, **options)

    def reference(self, _, *args, kind, unsqueeze, upcast=False):
        cos, sin = (t if unsqueeze is None else t.unsqueeze(unsqueeze) for t in args[self.count :])
        if upcast:
            return [rotate(x.float(), cos.float(), sin.float(), *kind).to(x.dtype) for x in args[: self.count]]
        return [rotate(x, cos, sin, *kind) for x in args[: self.count]]

    def agrees(self, kind, unsqueeze, args, gradients=False, cached=None, **options):
        try:
            if cached is None or cached not in self.results:
                outs = run(partial(self.forward, **options), self.function, args, gradients)
                self.results[cached] = outs
            outs = self.results[cached]
            expected = run(partial(self.reference, kind=kind, unsqueeze=unsqueeze), None, args, gradients)
            return all(o.shape == x.shape for o, x in zip(expected, args[: self.count])) and all_near(
                outs, expected, 2e-5
            )
        except Mismatch as mismatch:
            if cached is not None and cached not in self.results:
                self.results[cached] = [mismatch]  # agrees with nothing
            return False

    def find(self):
        """(kind, unsqueeze, ranks seen to agree): the rotation that agrees for the most shapes."""
        best = None
        for style, cos, sign, unsqueeze in itertools.product(STYLES, COLUMNS, (1, -1), (1, -2, None)):
            kind = (style, cos, sign, None)
            ranks = tuple(
                ranks
                for ranks, shapes in SHAPES.items()
                if self.agrees(kind, unsqueeze, self.inputs(*shapes, COLUMNS[cos]), cached=(ranks, COLUMNS[cos]))
            )
            if ranks and (best is None or len(ranks) > len(best[2])):
                best = kind, unsqueeze, ranks
            if (4, 3) in ranks:
                break
        if best is None:
            raise Mismatch("does not rotate x by cos and sin in a way that is known here")
        return best

    def dtypes(self, kind, unsqueeze, shapes, columns):
        """(x, cos, result) dtypes that agree, and whether bf16 is computed in fp32 and rounded once."""
        found, upcast = [], False
        reference = partial(self.reference, kind=kind, unsqueeze=unsqueeze)
        for pair in itertools.product(FLOATS, FLOATS):
            args = self.inputs(*shapes, columns, dtypes=pair)
            try:
                outs = run(self.forward, self.function, args)
            except Mismatch:
                continue
            exact = run(reference, None, [a.double() for a in args])
            if len({o.dtype for o in outs}) == 1 and all(near(o.double(), e, 0.02) for o, e in zip(outs, exact)):
                found.append((*pair, outs[0].dtype))
            if pair == (torch.bfloat16, torch.bfloat16):
                upcast = all(map(same_rounding, outs, run(partial(reference, upcast=True), None, args)))
        return tuple(found), upcast


def rotate(x, cos, sin, style, columns, sign, part):
    """ops.rotary_reference, after what the styles that it does not know do to cos, sin and x."""
    if columns != "full":
        half = cos.shape[-1] // (2 if columns == "first_half" else 1)
        cos, sin = cos[..., :half], sin[..., :half]
        double = (lambda t: t.repeat_interleave(2, -1)) if style == "interleaved" else (lambda t: torch.cat((t, t), -1))
        cos, sin = double(cos), double(sin)
    rest, width = None, cos.shape[-1]
    if part == "last":
        rest, x = x[..., :-width], x[..., -width:]
    if style == "interleaved_to_half":
        x = torch.cat((x[..., :width:2], x[..., 1:width:2], x[..., width:]), -1)
    out = ops.rotary_reference(x, cos, sign * sin, style == "interleaved")
    return out if rest is None else torch.cat((rest.to(out.dtype), out), -1)
