"""What is recognised, in classes whose names nothing could know."""

import pickle

import pytest
import torch
import torch.nn.functional as F
from kernels import get_kernel
from matching.near_misses import DIM, EXPERTS, INNER, experts, gated_norm, mlp, module, norm, rms, rotate_half, whole
from torch import nn

npu = get_kernel("org/npu-fusion", version=1)
match, specs = npu.matching.match, npu.specs
BF16, FP32 = torch.bfloat16, torch.float32


# ---- norms ----------------------------------------------------------------------------------------------------------
def test_norm_rounded_before_its_weight():
    spec = match(norm(lambda s, x, n: s.scale * n))
    assert (spec.weight, spec.eps, spec.offset, spec.casting_mode, spec.training) == ("scale", 1e-6, 0, "llama", True)
    assert {(BF16, BF16), (BF16, FP32), (FP32, BF16), (FP32, FP32)} <= set(spec.dtypes)


def test_norm_rounded_after_one_plus_weight():
    spec = match(norm(lambda s, x, n: (rms(x.float(), s.epsilon) * (1 + s.scale.float())).to(x.dtype)))
    assert (spec.offset, spec.casting_mode) == (1, "gemma")


def test_norm_without_weight():
    spec = match(module(lambda self, x: rms(x.float(), self.tiny).to(x.dtype), tiny=1e-5))
    assert (spec.weight, spec.eps) == (None, 1e-5)


def test_norm_that_ignores_its_weight():
    assert match(norm(lambda s, x, n: n)).weight is None


@pytest.mark.parametrize("eps", [1e-12, 1e-6, 2.5e-5, 1e-3])
def test_eps_is_measured_where_no_attribute_holds_it(eps):
    spec = match(module(lambda self, x: self.g * rms(x.float(), eps).to(x.dtype), g=torch.ones(DIM)))
    assert spec.eps == eps


def test_eps_of_an_attribute_is_exact_and_a_decoy_is_not_believed():
    spec = match(norm(lambda s, x, n: s.scale * rms(x.float(), 1.2345678e-4).to(x.dtype), eps=1e-6, kappa=1.2345678e-4))
    assert spec.eps == 1.2345678e-4


def test_torch_rms_norm_uses_the_machine_epsilon():
    spec = match(nn.RMSNorm(DIM))
    assert (spec.weight, spec.eps, spec.casting_mode) == ("weight", torch.finfo(FP32).eps, "gemma")


def test_norm_whose_dtypes_differ_only_where_it_says_so():
    def body(self, x, n):  # as T5: a half-precision weight decides the output's dtype
        return self.scale * n.to(self.scale.dtype)

    assert (FP32, BF16) not in match(norm(body)).dtypes
    assert (FP32, FP32) in match(norm(body)).dtypes


@pytest.mark.parametrize("activation", ["silu", "sigmoid", "gelu"])
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("group_size", [None, 4])
def test_gated_norm(activation, gate_first, group_size):
    act = getattr(F, activation)

    def body(self, x, gate):
        h = x.float() * act(gate.float()) if gate_first else x.float()
        h = rms(h if group_size is None else h.unflatten(-1, (-1, group_size)), self.epsilon).view(x.shape)
        h = self.scale * h.to(x.dtype)
        return h if gate_first else (h * act(gate.float())).to(x.dtype)

    spec = match(gated_norm(body))
    assert (spec.activation, spec.gate_first, spec.group_size) == (activation, gate_first, group_size)
    assert not spec.gate_optional


def test_gate_that_may_be_left_out():
    def forward(self, x, gate=None):
        h = rms((x if gate is None else x * F.silu(gate.float())).float(), 1e-5)
        return self.scale * h.to(x.dtype)

    assert match(module(forward, scale=torch.ones(DIM))).gate_optional


def test_norm_with_dropout_is_left_alone_in_training():
    spec = match(norm(lambda s, x, n: F.dropout(s.scale * n, 0.1, s.training)))
    assert isinstance(spec, specs.Norm) and not spec.training


# ---- gated MLPs -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "activation, act",
    [("silu", F.silu), ("gelu", F.gelu), ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh"))],
)
def test_mlp_of_three_linears(activation, act):
    spec = match(mlp(lambda s, x, g, u: act(g) * u))
    assert (spec.gate, spec.up, spec.down, spec.activation) == ("left", "right", "out", activation)
    swapped = match(mlp(lambda s, x, g, u: g * act(u)))
    assert (swapped.gate, swapped.up) == ("right", "left")


@pytest.mark.parametrize("half", [0, 1])
def test_mlp_with_merged_projections(half):
    def forward(self, x):
        halves = self.both(x).chunk(2, -1)
        return self.out(F.silu(halves[half]) * halves[1 - half])

    spec = match(module(forward, both=nn.Linear(DIM, 2 * INNER), out=nn.Linear(INNER, DIM)))
    assert (spec.gate, spec.up, spec.gate_half) == ("both", "both", half)


def test_mlp_that_rounds_once():
    spec = match(mlp(lambda s, x, g, u: (F.silu(g.float()) * u.float()).to(g.dtype)))
    assert spec.upcast
    assert not match(mlp(lambda s, x, g, u: F.silu(g) * u)).upcast


def test_mlp_with_dropout_is_left_alone_in_training():
    spec = match(mlp(lambda s, x, g, u: s.drop(F.silu(g) * u), drop=nn.Dropout(0.01)))
    assert isinstance(spec, specs.MLP) and not spec.training


def test_mlp_whose_children_are_wrapped_or_hooked():
    from peft import LoraConfig, inject_adapter_in_model

    plain = mlp(lambda s, x, g, u: F.silu(g) * u)
    expected = match(plain)
    plain.left.register_forward_hook(lambda *args: None)
    plain.forward = lambda x: x  # what a hook or an earlier swap left on the instance
    assert match(plain) == expected
    with_lora = inject_adapter_in_model(LoraConfig(target_modules=["left", "out"], r=2), nn.Sequential(plain))[0]
    assert type(with_lora.left) is not nn.Linear
    assert match(with_lora) == expected


def test_mlp_that_asks_a_child_for_its_dtype():
    def forward(self, x):  # as T5 does
        hidden = F.silu(self.left(x)) * self.right(x)
        return self.out(hidden.to(self.out.weight.dtype))

    assert isinstance(match(whole(forward)), specs.MLP)


# ---- rotary ---------------------------------------------------------------------------------------------------------
def turn(x, c, s):
    return x * c + rotate_half(x) * s


def turn_pairs(x, c, s):
    return x * c + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * s


def test_rotary_of_halves():
    def spin(a, b, cos, sin, unsqueeze_dim=1):
        return tuple(turn(x, cos.unsqueeze(unsqueeze_dim), sin.unsqueeze(unsqueeze_dim)) for x in (a, b))

    spec = match(spin)
    assert (spec.arguments, spec.style, spec.cos, spec.sign) == (("a", "b", "cos", "sin"), "half", "full", 1)
    assert (spec.unsqueeze, spec.unsqueeze_argument, spec.partial) == (1, True, None)
    assert (BF16, BF16, BF16) in spec.dtypes and (BF16, FP32, FP32) in spec.dtypes
    assert (4, 3) in spec.ranks and (2, 2) not in spec.ranks


def test_rotary_the_other_way():
    spec = match(lambda q, k, cos, sin: tuple(turn(x, cos.unsqueeze(1), -sin.unsqueeze(1)) for x in (q, k)))
    assert (spec.style, spec.sign) == ("half", -1)


def test_rotary_of_pairs_in_fp32_for_one_tensor_with_sin_first():
    def spin(x, sin, cos):
        c, s = (t.repeat_interleave(2, -1).unsqueeze(-2).float() for t in (cos, sin))
        return turn_pairs(x.float(), c, s).to(x.dtype)

    spec = match(spin)
    assert (spec.arguments, spec.style, spec.cos) == (("x", "sin", "cos"), "interleaved", "half_width")
    assert (spec.unsqueeze, spec.upcast) == (-2, True)
    assert (BF16, FP32, BF16) in spec.dtypes


def test_rotary_from_pairs_to_halves_that_ignores_position_ids():
    def spin(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
        half = cos.shape[-1] // 2
        c, s = (t[..., :half].unsqueeze(unsqueeze_dim) for t in (cos, sin))
        return tuple(
            torch.cat((x[..., ::2] * c - x[..., 1::2] * s, x[..., 1::2] * c + x[..., ::2] * s), -1) for x in (q, k)
        )

    spec = match(spin)
    assert (spec.style, spec.cos, spec.ignored) == ("interleaved_to_half", "first_half", ("position_ids",))


@pytest.mark.parametrize("part", ["first", "last"])
def test_partial_rotary(part):
    def spin(q, k, cos, sin):
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        width = cos.shape[-1]
        if part == "first":
            return tuple(torch.cat((turn(x[..., :width], c, s), x[..., width:]), -1) for x in (q, k))
        return tuple(torch.cat((x[..., :-width], turn(x[..., -width:], c, s)), -1) for x in (q, k))

    assert match(spin).partial == part


def test_rotary_that_looks_its_angles_up_is_declined():
    def spin(q, k, cos, sin, position_ids):
        return tuple(turn(x, cos[position_ids].unsqueeze(1), sin[position_ids].unsqueeze(1)) for x in (q, k))

    assert match(spin) == specs.Declined("needs position_ids beside cos and sin")


# ---- experts --------------------------------------------------------------------------------------------------------
def test_experts():
    spec = match(experts(lambda s, x, g, u: F.silu(g) * u))
    assert (spec.gate_up, spec.down, spec.activation, spec.gate_half) == ("into", "out_of", "silu", 0)
    assert match(experts(lambda s, x, g, u: F.gelu(u) * g)).gate_half == 1
    assert spec.sentinel


def test_experts_transposed_with_biases_and_alternating_features():
    def forward(self, x, index, weights):
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            rows, slots = torch.where(index == expert)
            both = x[rows] @ self.w_in[expert] + self.b_in[expert]
            y = (F.silu(both[..., ::2]) * both[..., 1::2]) @ self.w_out[expert] + self.b_out[expert]
            out = out.index_add(0, rows, (y * weights[rows, slots, None]).to(x.dtype))
        return out

    spec = match(
        module(
            forward,
            w_in=torch.ones(EXPERTS, DIM, 2 * INNER),
            b_in=torch.ones(EXPERTS, 2 * INNER),
            w_out=torch.ones(EXPERTS, INNER, DIM),
            b_out=torch.ones(EXPERTS, DIM),
        )
    )
    assert (spec.transposed, spec.interleaved, spec.gate_up_bias, spec.down_bias) == (True, True, "b_in", "b_out")


def test_experts_in_fp32_whatever_their_dtype():
    def forward(self, x, index, weights):
        return self.rounded_nowhere(x.float(), index, weights.float()).to(x.dtype)

    def rounded_nowhere(self, x, index, weights):
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):
            rows, slots = torch.where(index == expert)
            g, u = F.linear(x[rows], self.into[expert].float()).chunk(2, -1)
            y = F.linear(F.silu(g) * u, self.out_of[expert].float()) * weights[rows, slots, None]
            out = out.index_add(0, rows, y)
        return out

    layer = module(forward, into=torch.ones(EXPERTS, 2 * INNER, DIM), out_of=torch.ones(EXPERTS, DIM, INNER))
    type(layer).rounded_nowhere = rounded_nowhere
    assert match(layer).dtypes == (FP32,)
    assert "roundings of bfloat16" in match(layer.to(BF16)).reason


def test_experts_in_a_list_are_declined():
    def forward(self, x, index, weights):
        return sum(e(x) for e in self.experts)

    layer = module(forward, experts=nn.ModuleList(mlp(lambda s, x, g, u: F.silu(g) * u) for _ in range(3)))
    assert match(layer) == specs.Declined("is made of other modules")


# ---- specs, settings, shapes ----------------------------------------------------------------------------------------
def test_specs_are_plain_data():
    spec = match(norm(lambda s, x, n: s.scale * n))
    assert pickle.loads(pickle.dumps(spec)) == spec
    assert hash(spec) == hash(pickle.loads(pickle.dumps(spec)))


def test_quantized_weights_are_declined_by_name():
    layer = norm(lambda s, x, n: s.scale.float() * n)
    layer.scale = nn.Parameter(torch.ones(DIM, dtype=torch.int8), requires_grad=False)
    assert "scale is int8" in match(layer).reason


@pytest.mark.parametrize("target", [None, 3, "rotary", nn.Linear(2, 2), nn.Sequential(), len, lambda x: x])
def test_other_targets_are_declined(target):
    assert isinstance(match(target), specs.Declined)
