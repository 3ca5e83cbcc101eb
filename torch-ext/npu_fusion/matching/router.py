"""Routers: scores of one linear layer, the k best experts of each token, and their weights."""

import itertools
from dataclasses import replace

import torch
import torch.nn.functional as F

from ..specs import Router
from .probe import FLOATS, forward, near, parameters, run
from .stand_in import Mismatch, random, stand_in, whole

TOKENS = 64


def route(logits, k, score, renormalize, correction_bias, groups):
    """(weights, index) [T, k] as `specs.Router` words it."""
    before = {"softmax": lambda x: x.softmax(-1), "sigmoid": torch.sigmoid}.get(score, lambda x: x)
    after = {"softmax_topk": lambda x: x.softmax(-1), "sigmoid_topk": torch.sigmoid}.get(score, lambda x: x)
    scores = before(logits)
    choice = scores if correction_bias is None else scores + correction_bias
    if groups:
        number, kept, best, fill = groups
        grouped = choice.unflatten(-1, (number, -1))
        best = grouped.topk(min(2, grouped.shape[-1]), -1)[0].sum(-1) if best == "top2sum" else grouped.amax(-1)
        keep = torch.zeros_like(best).scatter_(-1, best.topk(kept, -1)[1], 1).bool()
        choice = grouped.masked_fill(~keep.unsqueeze(-1), fill).flatten(-2)
    index = choice.topk(k, -1)[1]
    weights = after(scores.gather(-1, index))
    return (weights / (weights.sum(-1, keepdim=True) + 1e-20) if renormalize else weights), index


def match_router(module):
    weights = {name: whole(parameter) for name, parameter in module.named_parameters()}
    matrices = {name: weight for name, weight in weights.items() if weight.dim() == 2 and weight.shape[0] > 1}
    if len(matrices) != 1 or any(weight.dim() > 2 for weight in weights.values()):
        raise Mismatch("is not one matrix of scores", candidate=False)
    (name, matrix), *_ = matrices.items()
    probe = Probe(module, name, *matrix.shape)
    target, x = probe.stand_in(), random(61, TOKENS, probe.hidden)
    outs = probe.find_roles(target, x)
    spec = probe.find(target, x, outs)
    for when, other in (
        ("for larger inputs (a soft cap?)", x * 1.5),
        ("for small inputs", x * 0.01),
        ("for few tokens", x[:4]),
    ):
        if not probe.agrees(spec, target, other, 1e-4):
            raise Mismatch(f"computes top-k routing, but differs {when}")
    if "logits" in spec.returns:
        far, where = x * 1e3, spec.returns.index("logits")
        if not near(probe.run(target, far)[where].float(), probe.logits(spec, target, far)):
            raise Mismatch("computes top-k routing, but its logits differ for large inputs (a soft cap?)")
    try:
        training = bool(probe.agrees(spec, probe.stand_in(training=True), x, 2e-5))
    except Mismatch:
        training = False
    found = {upcast: tuple(probe.dtypes(replace(spec, upcast=upcast), x)) for upcast in (False, True)}
    upcast = len(found[True]) > len(found[False])
    return replace(spec, upcast=upcast, dtypes=found[upcast], training=training, flatten=probe.flat)


class Probe:
    def __init__(self, module, name, experts, hidden):
        self.module, self.name, self.experts = module, name, experts
        self.sizes = {} if hidden <= 64 or hidden == experts else {hidden: 38}
        self.hidden = self.sizes.get(hidden, hidden)
        # a bias that the caller holds
        self.arguments = [p.name for p in parameters(module)[1:2] if p.default in (p.empty, None)]
        self.flat = True

    def stand_in(self, **options):
        return stand_in(self.module, self.sizes, **options)

    def vectors(self, target):
        """What could be a bias, by dotted name."""
        named = itertools.chain(target.named_parameters(), target.named_buffers())
        found = {n: t.detach().flatten() for n, t in named if t.numel() == self.experts and n != self.name}
        return {**found, **{f"argument {name}": random(62, self.experts) for name in self.arguments}}

    def run(self, target, x):
        """The results, [T, ...] each; with a batch dimension and the caller's bias where the target needs them."""
        bias = [random(62, self.experts) for _ in self.arguments]
        for shape, more in itertools.product((x.shape, (4, -1, x.shape[-1])), ((), bias)):
            try:
                outs = run(forward, target, (x.reshape(shape), *more))
            except Mismatch as mismatch:
                problem = mismatch
                continue
            self.flat = len(shape) == 2
            return [o.flatten(0, 1) if isinstance(o, torch.Tensor) and o.dim() == 3 else o for o in outs]
        raise problem

    def find_roles(self, target, x):
        outs = self.run(target, x)
        try:
            rows = {i: o for i, o in enumerate(outs) if o.dim() == 2 and len(o) == TOKENS}
            (self.index,) = (i for i, o in rows.items() if not o.is_floating_point())
            self.k = outs[self.index].shape[1]
            (self.weights,) = (i for i, o in rows.items() if o.is_floating_point() and o.shape[1] == self.k)
        except (AttributeError, ValueError):
            raise Mismatch("does not return the weights and indices of a top k", candidate=False) from None
        return outs

    def logits(self, spec, target, x):
        weight, bias = target.get_parameter(self.name).detach(), self.vectors(target).get(spec.bias)
        x, weight = (x.float(), weight.float()) if spec.upcast else (x, weight)
        return F.linear(x, weight, bias)

    def compare(self, spec, target, x, outs):
        """(whether the same experts are chosen, expected weights of those, their weights)."""
        correction = self.vectors(target).get(spec.correction_bias)
        logits = self.logits(spec, target, x).float()
        weights, index = route(logits, self.k, spec.score, spec.renormalize, correction, spec.groups)
        dense = torch.zeros(len(x), self.experts).scatter_(1, index, weights)
        same = torch.equal(index.sort(-1)[0], outs[self.index].sort(-1)[0])
        return same, dense.gather(1, outs[self.index]), outs[self.weights].float()

    def find(self, target, x, outs):
        for spec in self.hypotheses(list(self.vectors(target))):
            same, expected, weights = self.compare(spec, target, x, outs)
            if not same:
                continue
            spec = replace(spec, scale=float(f"{(weights / expected).median().item():.5g}"))
            if near(weights, expected * spec.scale, 2e-5):
                return replace(spec, returns=self.roles(outs, self.logits(spec, target, x)))
        raise Mismatch("does not choose the top k of softmax or sigmoid scores of one linear layer")

    def hypotheses(self, vectors):
        numbers = sorted({v for v in vars(self.module).values() if type(v) is int and 1 <= v < self.experts})
        groups = [None]
        for number, kept in itertools.product(numbers, numbers):
            if self.experts % number == 0 and kept < number:
                groups += itertools.product((number,), (kept,), ("top2sum", "max"), (float("-inf"), 0.0))
        scores = ("softmax", "sigmoid", "softmax_topk", "sigmoid_topk")
        for group, bias, correction, score in itertools.product(groups, [None, *vectors], [None, *vectors], scores):
            if bias is None or bias != correction:
                for renormalize in (False,) if score == "softmax_topk" else (False, True):
                    yield Router(self.name, self.k, score, renormalize, 1.0, bias, correction, group)

    def roles(self, outs, logits):
        def role(i, out):
            if i in (self.index, self.weights):
                return "indices" if i == self.index else "weights"
            if near(out.float(), logits):
                return "logits"
            if near(out.float(), logits.softmax(-1)) or near(out.float(), logits.sigmoid()):
                return "probs"
            raise Mismatch("computes top-k routing, but returns something else beside it")

        return tuple(role(i, out) for i, out in enumerate(outs))

    def agrees(self, spec, target, x, tolerance):
        """The results, if choice, weights and logits are those of the spec; else None."""
        outs = self.run(target, x)
        same, expected, weights = self.compare(spec, target, x, outs)
        logits = self.logits(spec, target, x).float()
        same &= all(near(o.float(), logits, 1e-5) for o, role in zip(outs, spec.returns) if role == "logits")
        return outs if same and near(weights, expected * spec.scale, tolerance) else None

    def dtypes(self, spec, x):
        """(x, weight, results) dtypes that agree."""
        for pair in itertools.product(FLOATS, FLOATS):
            try:
                outs = self.agrees(spec, self.stand_in(dtype=pair[1]), x.to(pair[0]), 0.01)  # weights rounded to 2^-8
            except (Mismatch, RuntimeError):  # the linear layer refuses two dtypes
                continue
            if outs:
                yield (*pair, tuple(o.dtype for o in outs))
