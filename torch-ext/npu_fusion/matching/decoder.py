"""Pre-norm decoder layers: x + attention(norm(x)), and to that its own mlp(norm(...)).

What is compared is the wiring: which child is called with what, and what is made of the answers. The children are matched
by themselves.
"""

import inspect

import torch
from torch import nn

from ..specs import DecoderLayer
from .probe import forward
from .stand_in import Mismatch, random, stand_in


def match_decoder(module):
    parameters = dict(inspect.signature(type(module).forward).parameters)
    options = {
        n: p for n, p in parameters.items() if n not in ("self", "hidden_states") and p.kind is not p.VAR_KEYWORD
    }
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    tokens = {name: Token(name) for name in (*options, *(["anything_else"] if takes_any else ()))}
    children, passed = wiring(module, tokens)
    if any(not isinstance(value, Token) or value.name != name for name, value in passed.items()):
        raise Mismatch("changes what it hands to its attention", candidate=False)
    if takes_any and "anything_else" not in passed:
        raise Mismatch("keeps arguments from its attention", candidate=False)
    if wiring(module, tokens, training=True) != (children, passed):
        raise Mismatch("is wired in another way while training", candidate=False)
    same, defaults = wiring(module, {})
    if same != children or defaults != {name: options[name].default for name in passed if name in options}:
        raise Mismatch("hands other arguments to its attention where none are given", candidate=False)
    ignored = tuple(name for name in options if name not in passed)
    return DecoderLayer(*children, arguments=tuple(defaults.items()), ignored=ignored)


class Token:
    """An argument that a forward can only hand on."""

    def __init__(self, name):
        self.name = name


class Recorder(nn.Module):
    """Stands for a child: notes its call and answers with a tensor. The second that is called, the attention, with a tuple."""

    def __init__(self, name, calls, answer):
        super().__init__()
        self.name, self.calls, self.answer = name, calls, answer

    def forward(self, *args, **kwargs):
        self.calls.append((self.name, args, kwargs))
        return (self.answer, None) if len(self.calls) == 2 else self.answer


def wiring(module, options, training=False):
    """((norm, attention, norm, mlp), what the attention is given beside the hidden states)."""
    shell = object.__new__(type(module))
    shell.__dict__.update(vars(module), _modules={})
    target, calls, x = stand_in(shell, training=training), [], random(1, 2, 3, 8)
    names = [name for name, child in module._modules.items() if child is not None]
    answers = {name: random(2 + i, 2, 3, 8) for i, name in enumerate(names)}
    target._modules.update({name: Recorder(name, calls, answers[name]) for name in names})
    with torch.no_grad():
        try:
            out = forward(target, x, **options)
            (first, a, _), (attention, args, passed), (second, b, _), (mlp, c, _) = calls
            (hidden,) = (*args, *([passed["hidden_states"]] if "hidden_states" in passed else ()))
            added = x + answers[attention]
            wired = a[0] is x and hidden is answers[first] and torch.equal(b[0], added) and c[0] is answers[second]
            wired = wired and len(a) == len(b) == len(c) == 1 and torch.equal(out, added + answers[mlp])
        except Exception as error:  # a layer that is wired in another way may fail in any way
            raise Mismatch(f"is wired in another way ({type(error).__name__})", candidate=False) from None
    if not wired:
        raise Mismatch("is wired in another way", candidate=False)
    return (first, attention, second, mlp), {name: value for name, value in passed.items() if name != "hidden_states"}
