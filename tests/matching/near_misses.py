"""Layers that nearly compute what a fused layer computes. Each differs in one thing, and must be declined."""

import torch
import torch.nn.functional as F
from torch import nn

DIM, INNER, EXPERTS = 16, 24, 6


def module(forward, **attributes):
    """An instance of a class of its own with this forward; attributes may be tensors, modules or settings."""
    instance = type("Layer", (nn.Module,), {"forward": forward})()
    for name, value in attributes.items():
        setattr(instance, name, nn.Parameter(value) if isinstance(value, torch.Tensor) else value)
    return instance


# ---- norms ----------------------------------------------------------------------------------------------------------
def rms(x, eps):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


def norm(body, dtype=torch.float32, **attributes):
    """`body(self, x, n)` with n the normalized x."""

    def forward(self, x):
        return body(self, x, rms(x.float(), self.epsilon).to(x.dtype))

    return module(forward, scale=torch.ones(DIM, dtype=dtype), epsilon=1e-6, **attributes)


def counts_calls(self, x, n):
    self.calls += 1
    return self.scale * n


def keeps_history(self, x, n):
    self.history.append(x.shape)
    return self.scale * n


def grows_a_tensor(self, x, n):
    self.total += 1
    return self.scale * n


def changes_its_input(self, x, n):
    x.mul_(1.0)
    return self.scale * n


def alternates(self, x, n):
    alternates.calls += 1
    return self.scale * n * (1 + 0.01 * (alternates.calls % 2))


alternates.calls = 0

NORMS = {
    "eps outside the root": lambda: norm(
        lambda s, x, n: s.scale * x / (x.pow(2).mean(-1, keepdim=True).sqrt() + s.epsilon)
    ),
    "eps as a floor": lambda: norm(
        lambda s, x, n: s.scale * x * x.pow(2).mean(-1, keepdim=True).clamp(min=s.epsilon).rsqrt()
    ),
    "eps that grows with the length": lambda: norm(lambda s, x, n: s.scale * rms(x, s.epsilon * x.shape[1])),
    "a scale of 1.001": lambda: norm(lambda s, x, n: 1.001 * s.scale * n),
    "a clamp of the output at 100": lambda: norm(lambda s, x, n: (s.scale * n).clamp(-100, 100)),
    "a clamp of the input at 1000": lambda: norm(lambda s, x, n: s.scale * rms(x.clamp(-1000, 1000), s.epsilon)),
    "a soft cap": lambda: norm(lambda s, x, n: 50 * torch.tanh(s.scale * n / 50)),
    "weight.abs()": lambda: norm(lambda s, x, n: s.scale.abs() * n),
    "weight squared": lambda: norm(lambda s, x, n: s.scale.square() * n),
    "weight flipped": lambda: norm(lambda s, x, n: s.scale.flip(0) * n),
    "weight at least 0.01": lambda: norm(lambda s, x, n: s.scale.clamp(min=0.01) * n),
    "weight of the first half only": lambda: norm(
        lambda s, x, n: torch.cat((s.scale[: DIM // 2] * n[..., : DIM // 2], n[..., DIM // 2 :]), -1)
    ),
    "an offset of 0.5": lambda: norm(lambda s, x, n: (0.5 + s.scale) * n),
    "an offset of 2": lambda: norm(lambda s, x, n: (2 + s.scale) * n),
    "a constant added": lambda: norm(lambda s, x, n: s.scale * n + 1e-4),
    "a residual added": lambda: norm(lambda s, x, n: x + s.scale * n),
    "the mean subtracted": lambda: norm(lambda s, x, n: s.scale * rms(x - x.mean(-1, keepdim=True), s.epsilon)),
    "the unbiased variance": lambda: norm(
        lambda s, x, n: s.scale * x * (x.pow(2).sum(-1, keepdim=True) / (DIM - 1) + s.epsilon).rsqrt()
    ),
    "the sum instead of the mean": lambda: norm(
        lambda s, x, n: s.scale * x * (x.pow(2).sum(-1, keepdim=True) + s.epsilon).rsqrt()
    ),
    "mean of absolute values": lambda: norm(lambda s, x, n: s.scale * x / (x.abs().mean(-1, keepdim=True) + s.epsilon)),
    "groups of 4": lambda: norm(lambda s, x, n: s.scale * rms(x.unflatten(-1, (-1, 4)), s.epsilon).flatten(-2)),
    "the norm of all positions": lambda: norm(
        lambda s, x, n: s.scale * x * (x.pow(2).mean((-1, -2), keepdim=True) + s.epsilon).rsqrt()
    ),
    "the previous position's norm": lambda: norm(
        lambda s, x, n: s.scale * x * (x.roll(1, 0).pow(2).mean(-1, keepdim=True) + s.epsilon).rsqrt()
    ),
    "channels first for 4-D input": lambda: norm(
        lambda s, x, n: s.scale * (n if x.dim() < 4 else rms(x.transpose(1, -1), s.epsilon).transpose(1, -1))
    ),
    "scaled before it is normalized": lambda: norm(lambda s, x, n: rms(x * s.scale, s.epsilon)),
    "no gradient through the variance": lambda: norm(
        lambda s, x, n: s.scale * x * (x.detach().pow(2).mean(-1, keepdim=True) + s.epsilon).rsqrt()
    ),
    "no gradient for the weight": lambda: norm(lambda s, x, n: s.scale.detach() * n),
    "half the gradient": lambda: norm(lambda s, x, n: s.scale * (n / 2 + n.detach() / 2)),
    "nan_to_num": lambda: norm(lambda s, x, n: s.scale * n.nan_to_num()),
    "ones for rows of zeros": lambda: norm(lambda s, x, n: torch.where(x == 0, 1.0, s.scale * n)),
    "a squeeze at length 1": lambda: norm(lambda s, x, n: (s.scale * n).squeeze(1)),
    "another scale beyond 1000 positions": lambda: norm(
        lambda s, x, n: s.scale * n * (0.5 if x.shape[-2] > 1000 else 1.0)
    ),
    "another scale at a length of its settings": lambda: norm(
        lambda s, x, n: s.scale * n * (0.5 if x.shape[-2] > s.window else 1.0), window=2048
    ),
    "noise": lambda: norm(lambda s, x, n: s.scale * n + 1e-9 * torch.randn_like(n)),
    "a counter": lambda: norm(counts_calls, calls=0),
    "a list that grows": lambda: norm(keeps_history, history=[]),
    "a running total": lambda: norm(grows_a_tensor, total=torch.zeros(()).requires_grad_(False)),
    "an input changed in place": lambda: norm(changes_its_input),
    "every other call": lambda: norm(alternates),
    "a tuple": lambda: norm(lambda s, x, n: (s.scale * n, x)),
    "always fp32": lambda: norm(lambda s, x, n: (s.scale * n).float(), torch.bfloat16),
    "the variance in bf16": lambda: norm(lambda s, x, n: s.scale * rms(x, s.epsilon), torch.bfloat16),
    "1 + weight in bf16": lambda: norm(
        lambda s, x, n: (rms(x.float(), s.epsilon) * (1 + s.scale).float()).to(x.dtype), torch.bfloat16
    ),
}


# ---- gated norms ----------------------------------------------------------------------------------------------------
def gated_norm(body):
    def forward(self, x, gate):
        return body(self, x, gate)

    return module(forward, scale=torch.ones(DIM), epsilon=1e-6)


GATED_NORMS = {
    "a gate without activation": lambda: gated_norm(lambda s, x, g: s.scale * rms(x, s.epsilon) * g),
    "a gate that is added": lambda: gated_norm(lambda s, x, g: s.scale * rms(x, s.epsilon) + F.silu(g)),
    "a gate of twice its value": lambda: gated_norm(lambda s, x, g: s.scale * rms(x, s.epsilon) * F.silu(2 * g)),
    "the gate is normalized": lambda: gated_norm(lambda s, x, g: s.scale * rms(g, s.epsilon) * F.silu(x)),
    "a gate within the root": lambda: gated_norm(
        lambda s, x, g: s.scale * x * F.silu(g) * (x.pow(2).mean(-1, keepdim=True) + s.epsilon).rsqrt() * 1.001
    ),
}


# ---- gated MLPs -----------------------------------------------------------------------------------------------------
def mlp(body, **attributes):
    """`body(self, x, g, u)` with g and u the outputs of the two projections; its result goes through the last one."""

    def forward(self, x):
        return self.out(body(self, x, self.left(x), self.right(x)))

    linears = {"left": nn.Linear(DIM, INNER), "right": nn.Linear(DIM, INNER), "out": nn.Linear(INNER, DIM)}
    return module(forward, **linears, **attributes)


def whole(forward, **attributes):
    return module(
        forward, left=nn.Linear(DIM, INNER), right=nn.Linear(DIM, INNER), out=nn.Linear(INNER, DIM), **attributes
    )


def keeps_hidden(self, x, g, u):
    self.last = F.silu(g)
    return self.last * u


MLPS = {
    "a clamp of the gate at 100": lambda: mlp(lambda s, x, g, u: F.silu(g.clamp(max=100)) * u),
    "a clamp of up at 7": lambda: mlp(lambda s, x, g, u: F.silu(g) * u.clamp(-7, 7)),
    "a clamp of the product at 1e6": lambda: mlp(lambda s, x, g, u: (F.silu(g) * u).clamp(-1e6, 1e6)),
    "a multiplier of 1.001": lambda: mlp(lambda s, x, g, u: F.silu(g) * u * 1.001),
    "a multiplier in its settings": lambda: mlp(lambda s, x, g, u: F.silu(g * s.multiplier) * u, multiplier=0.5),
    "up plus 1": lambda: mlp(lambda s, x, g, u: F.silu(g) * (u + 1)),
    "a sub-norm": lambda: mlp(lambda s, x, g, u: s.between(F.silu(g) * u), between=nn.RMSNorm(INNER)),
    "a norm in front": lambda: mlp(lambda s, x, g, u: F.silu(s.left(s.before(x))) * u, before=nn.LayerNorm(DIM)),
    "relu": lambda: mlp(lambda s, x, g, u: F.relu(g) * u),
    "relu squared": lambda: mlp(lambda s, x, g, u: F.relu(g).square() * u),
    "quick_gelu": lambda: mlp(lambda s, x, g, u: g * torch.sigmoid(1.702 * g) * u),
    "swish with beta 1.01": lambda: mlp(lambda s, x, g, u: g * torch.sigmoid(1.01 * g) * u),
    "gelu with another constant": lambda: mlp(
        lambda s, x, g, u: 0.5 * g * (1 + torch.tanh(0.7979 * (g + 0.0447 * g**3))) * u
    ),
    "mish": lambda: mlp(lambda s, x, g, u: F.mish(g) * u),
    "both halves activated": lambda: mlp(lambda s, x, g, u: F.silu(g) * F.silu(u)),
    "a sum instead of a product": lambda: mlp(lambda s, x, g, u: F.silu(g) + u),
    "a residual in the middle": lambda: mlp(lambda s, x, g, u: F.silu(g) * u + g),
    "a residual around": lambda: whole(lambda s, x: x + s.out(F.silu(s.left(x)) * s.right(x))),
    "the largest only": lambda: mlp(lambda s, x, g, u: F.silu(torch.where(g >= g.topk(4, -1)[0][..., -1:], g, 0)) * u),
    "the previous position's gate": lambda: mlp(lambda s, x, g, u: F.silu(g.roll(1, -2)) * u),
    "the mean of the positions": lambda: mlp(lambda s, x, g, u: F.silu(g - g.mean(-2, keepdim=True)) * u),
    "weights read, children not called": lambda: whole(
        lambda s, x: s.out(F.silu(F.linear(x, s.left.weight, s.left.bias)) * s.right(x))
    ),
    "no gradient through the gate": lambda: mlp(lambda s, x, g, u: F.silu(g).detach() * u),
    "nan_to_num": lambda: mlp(lambda s, x, g, u: (F.silu(g) * u).nan_to_num()),
    "dropout in eval mode": lambda: mlp(lambda s, x, g, u: F.dropout(F.silu(g) * u, 0.1, True)),
    "state kept for later": lambda: mlp(keeps_hidden, last=None),
    "another activation beyond 512 positions": lambda: mlp(
        lambda s, x, g, u: (F.silu(g) if x.shape[-2] <= 512 else F.gelu(g)) * u
    ),
    "another activation for 2-D input": lambda: mlp(lambda s, x, g, u: (F.silu(g) if x.dim() == 3 else F.gelu(g)) * u),
    "no gate": lambda: whole(lambda s, x: s.out(F.silu(s.left(x)))),
}


# ---- rotary ---------------------------------------------------------------------------------------------------------
def rotate_half(x):
    half = x.shape[-1] // 2
    return torch.cat((-x[..., half:], x[..., :half]), -1)


def rotary(body):
    """`body(x, c, s, is_query)` with cos and sin unsqueezed."""

    def apply(q, k, cos, sin, unsqueeze_dim=1):
        c, s = cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)
        return body(q, c, s, True), body(k, c, s, False)

    return apply


ROTARIES = {
    "the key turned the other way": lambda: rotary(lambda x, c, s, q: x * c + rotate_half(x) * (s if q else -s)),
    "the key left alone": lambda: rotary(lambda x, c, s, q: x * c + rotate_half(x) * s if q else x),
    "the query scaled": lambda: rotary(lambda x, c, s, q: (x * c + rotate_half(x) * s) * (1.001 if q else 1)),
    "cos and sin exchanged": lambda: rotary(lambda x, c, s, q: x * s + rotate_half(x) * c),
    "no minus": lambda: rotary(lambda x, c, s, q: x * c + rotate_half(x).abs() * s),
    "a clamp at 1e4": lambda: rotary(lambda x, c, s, q: (x * c + rotate_half(x) * s).clamp(-1e4, 1e4)),
    "quarters turned": lambda: rotary(lambda x, c, s, q: x * c + x.roll(x.shape[-1] // 4, -1) * s),
    "position added": lambda: rotary(lambda x, c, s, q: x * c + rotate_half(x) * s + c),
    "normalized afterwards": lambda: rotary(lambda x, c, s, q: F.normalize(x * c + rotate_half(x) * s, dim=-1)),
    "another angle beyond 256 positions": lambda: rotary(
        lambda x, c, s, q: x * c + rotate_half(x) * (s if x.shape[-2] <= 256 else 2 * s)
    ),
    "another angle for head_dim 128": lambda: rotary(
        lambda x, c, s, q: x * c + rotate_half(x) * (s if x.shape[-1] < 128 else 2 * s)
    ),
    "no gradient through the turned half": lambda: rotary(lambda x, c, s, q: x * c + rotate_half(x).detach() * s),
}


# ---- packed experts -------------------------------------------------------------------------------------------------
def experts(body, weigh=lambda w: w, **attributes):
    """`body(self, x, g, u)`: the hidden features of one expert's rows x."""

    def forward(self, hidden_states, index, weights):
        weights, out = weigh(weights), torch.zeros_like(hidden_states)
        for expert in range(EXPERTS):
            rows, slots = torch.where(index == expert)
            x = hidden_states[rows]
            g, u = F.linear(x, self.into[expert]).chunk(2, -1)
            y = F.linear(body(self, x, g, u), self.out_of[expert]) * weights[rows, slots, None]
            out = out.index_add(0, rows, y.to(out.dtype))
        return out

    weights = {"into": torch.ones(EXPERTS, 2 * INNER, DIM), "out_of": torch.ones(EXPERTS, DIM, INNER)}
    return module(forward, **weights, **attributes)


def first_rows_only(self, x, g, u):
    return F.silu(g) * u * (torch.arange(len(x)) < 3)[:, None]


EXPERT_LAYERS = {
    "a clamp at 100": lambda: experts(lambda s, x, g, u: F.silu(g.clamp(max=100)) * u),
    "up plus 1": lambda: experts(lambda s, x, g, u: F.silu(g) * (u + 1)),
    "relu": lambda: experts(lambda s, x, g, u: F.relu(g) * u),
    "weights squared": lambda: experts(lambda s, x, g, u: F.silu(g) * u, lambda w: w.square()),
    "weights renormalized": lambda: experts(lambda s, x, g, u: F.silu(g) * u, lambda w: w / w.sum(-1, keepdim=True)),
    "weights without a gradient": lambda: experts(lambda s, x, g, u: F.silu(g) * u, lambda w: w.detach()),
    "a capacity of 3 tokens": lambda: experts(first_rows_only),
    "a scale of 1.001": lambda: experts(lambda s, x, g, u: F.silu(g) * u * 1.001),
}


# ---- routers --------------------------------------------------------------------------------------------------------
def router(body):
    def forward(self, x):
        logits = F.linear(x, self.matrix)
        weights, index = body(logits)
        return logits, weights, index

    return module(forward, matrix=torch.ones(EXPERTS, DIM))


def top(scores, weigh=lambda w: w):
    weights, index = scores.topk(2, -1)
    return weigh(weights), index


ROUTERS = {
    "a temperature": lambda: router(lambda logits: top((logits / 1.1).softmax(-1))),
    "a soft cap of the scores": lambda: router(lambda logits: top((30 * torch.tanh(logits / 30)).softmax(-1))),
    "weights squared": lambda: router(lambda logits: top(logits.softmax(-1), lambda w: w.square())),
    "an epsilon of 0.01 in the sum": lambda: router(
        lambda logits: top(logits.softmax(-1), lambda w: w / (w.sum(-1, keepdim=True) + 0.01))
    ),
    "a softmax of probabilities": lambda: router(lambda logits: top(logits.softmax(-1), lambda w: w.softmax(-1))),
    "the smallest": lambda: router(lambda logits: (-((-logits.softmax(-1)).topk(2, -1)[0]), (-logits).topk(2, -1)[1])),
    "absolute logits": lambda: router(
        lambda logits: (logits.abs().topk(2, -1)[0].softmax(-1), logits.abs().topk(2, -1)[1])
    ),
    "noise": lambda: router(lambda logits: top((logits + 1e-6 * torch.randn_like(logits)).softmax(-1))),
    "weights shifted by one": lambda: router(lambda logits: top(logits.softmax(-1), lambda w: w.roll(1, -1))),
}

NEAR_MISSES = {
    f"{kind}: {name}": make
    for kind, layers in (
        ("norm", NORMS),
        ("gated norm", GATED_NORMS),
        ("mlp", MLPS),
        ("rotary", ROTARIES),
        ("experts", EXPERT_LAYERS),
        ("router", ROUTERS),
    )
    for name, make in layers.items()
}
