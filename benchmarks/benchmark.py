"""Times of each op and layer where there is an NPU, in the format of kernels.

    kernels benchmark org/npu-fusion         # or: kernels benchmark build/torch-npu, after `make build`

Every workload is compared with its plain PyTorch reference. The runner of kernels 0.17 does not wait for an NPU, so the
workloads do.
"""

import copy

import torch
from kernels.benchmark import Benchmark

TOKENS, HIDDEN, INTERMEDIATE = 4096, 4096, 12288


class OnNpu:
    """What the workloads share. Not a Benchmark itself: kernels would run it."""

    seed = 0

    def random(self, *shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape) * scale).to(self.device, torch.bfloat16)

    def keep(self, out: torch.Tensor) -> None:
        self.out = out
        if self.device == "npu":
            torch.npu.synchronize()


class Ops(OnNpu, Benchmark):
    """Values are kept small: kernels compares with an absolute tolerance of 0.01, a bfloat16 step at 1 is 0.008."""

    def setup_rms_norm(self):
        self.x, self.weight = self.random(TOKENS, HIDDEN), self.random(HIDDEN, scale=0.1)

    def benchmark_rms_norm(self):
        self.keep(self.kernel.ops.rms_norm(self.x, self.weight, 1e-6))

    def verify_rms_norm(self) -> torch.Tensor:
        return self.kernel.ops.rms_norm_reference(self.x, self.weight, 1e-6)

    def setup_add_rms_norm(self):
        self.setup_rms_norm()
        self.residual = self.random(TOKENS, HIDDEN)

    def benchmark_add_rms_norm(self):
        self.keep(self.kernel.ops.add_rms_norm(self.x, self.residual, self.weight, 1e-6)[0])

    def verify_add_rms_norm(self) -> torch.Tensor:
        return self.kernel.ops.add_rms_norm_reference(self.x, self.residual, self.weight, 1e-6)[0]

    def setup_swiglu(self):
        self.gate_up = self.random(TOKENS, 2 * INTERMEDIATE, scale=0.1)

    def benchmark_swiglu(self):
        self.keep(self.kernel.ops.swiglu(self.gate_up))

    def verify_swiglu(self) -> torch.Tensor:
        return self.kernel.ops.swiglu_reference(self.gate_up)

    def setup_gated_linear(self):
        self.x = self.random(TOKENS, HIDDEN, scale=0.1)
        self.gate, self.up = (self.random(INTERMEDIATE, HIDDEN, scale=0.02) for _ in range(2))

    def benchmark_gated_linear(self):
        self.keep(self.kernel.ops.gated_linear(self.x, self.gate, self.up))

    def verify_gated_linear(self) -> torch.Tensor:
        return self.kernel.ops.gated_linear_reference(self.x, self.gate, self.up)

    def setup_rotary(self):
        self.q, self.k = (self.random(1, heads, TOKENS, 128, scale=0.1) for heads in (32, 8))
        angles = torch.arange(TOKENS).unsqueeze(-1) / 10000 ** (torch.arange(64) / 64)
        angles = torch.cat((angles, angles), -1).unsqueeze(0)
        self.cos, self.sin = angles.cos().to(self.q), angles.sin().to(self.q)

    def benchmark_rotary(self):
        self.keep(torch.cat(self.kernel.ops.apply_rotary_pos_emb(self.q, self.k, self.cos, self.sin), 1))

    def verify_rotary(self) -> torch.Tensor:
        cos, sin = self.cos.unsqueeze(1), self.sin.unsqueeze(1)
        return torch.cat([self.kernel.ops.rotary_reference(x, cos, sin) for x in (self.q, self.k)], 1)

    def setup_moe_experts(self):
        experts, k, intermediate = 64, 8, 768
        self.x = self.random(TOKENS, HIDDEN, scale=0.1)
        self.gate_up = self.random(experts, 2 * intermediate, HIDDEN, scale=0.02)
        self.down = self.random(experts, HIDDEN, intermediate, scale=0.02)
        weights, self.index = torch.randn(TOKENS, experts).softmax(-1).topk(k, dim=-1)
        self.index, self.weights = self.index.to(self.device), weights.to(self.x)

    def benchmark_moe_experts(self):
        self.keep(self.kernel.ops.moe_experts(self.x, self.index, self.weights, self.gate_up, self.down))

    def verify_moe_experts(self) -> torch.Tensor:
        return self.kernel.ops.experts_reference(self.x, self.index, self.weights, self.gate_up, self.down)


class RMSNorm(torch.nn.Module):
    """transformers' LlamaRMSNorm, for a benchmark that needs torch and kernels only."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(HIDDEN))
        self.variance_epsilon = 1e-6

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        dtype = hidden_states.dtype
        hidden_states = hidden_states.to(torch.float32)
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        return self.weight * (hidden_states * torch.rsqrt(variance + self.variance_epsilon)).to(dtype)


class MLP(torch.nn.Module):
    """transformers' LlamaMLP."""

    def __init__(self):
        super().__init__()
        self.gate_proj = torch.nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.up_proj = torch.nn.Linear(HIDDEN, INTERMEDIATE, bias=False)
        self.down_proj = torch.nn.Linear(INTERMEDIATE, HIDDEN, bias=False)
        self.act_fn = torch.nn.SiLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Layers(OnNpu, Benchmark):
    """Modules before and after `kernelize`, forward and backward."""

    def build(self, module: torch.nn.Module) -> None:
        self.module = module.to(self.device, torch.bfloat16)
        self.swapped = self.kernel.kernelize(torch.nn.Sequential(copy.deepcopy(self.module)))
        self.x = self.random(1, TOKENS, HIDDEN, scale=0.1).requires_grad_()

    def gradient(self, module: torch.nn.Module) -> torch.Tensor:
        out = module(self.x)
        (gradient,) = torch.autograd.grad(out, self.x, torch.full_like(out, 0.05))
        return gradient

    def setup_rms_norm(self):
        self.build(RMSNorm())

    def benchmark_rms_norm(self):
        self.keep(self.gradient(self.swapped))

    def verify_rms_norm(self) -> torch.Tensor:
        return self.gradient(self.module)

    def setup_mlp(self):
        self.build(MLP())

    def benchmark_mlp(self):
        self.keep(self.gradient(self.swapped))

    def verify_mlp(self) -> torch.Tensor:
        return self.gradient(self.module)
