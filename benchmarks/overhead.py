"""Host cost: what Python adds to a fused call, next to the bare torch.ops.npu calls and to verl's forwards.

    python benchmarks/overhead.py [--json FILE]

Tensors are tiny, so that a call's CPU time is that of the host: Python, the dispatcher and the launch. On the emulated NPU
the launch is the emulator's, in every column alike; ratios are of interest there, not times. Ratios are medians over
rounds that measure both sides one after the other, so that a busy machine disturbs both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import MethodType

from train_step import ROOT, load_kernel


def paired(calls: dict[str, Callable], rounds: int, repeats: int) -> dict[str, list[float]]:
    """CPU seconds of this thread in one call of each, once in every round; the order turns from round to round."""
    names = list(calls)
    times: dict[str, list[float]] = {name: [] for name in names}
    for call in calls.values():
        for _ in range(repeats):
            call()
    for index in range(rounds):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            call = calls[name]
            begin = time.thread_time()
            for _ in range(repeats):
                call()
            times[name].append((time.thread_time() - begin) / repeats)
    return times


def summary(times: dict[str, list[float]], of: str) -> dict[str, dict[str, float]]:
    """Median microseconds of each, and the median of its paired ratios to `of`: below 1, `of` is slower."""
    return {
        name: {
            "us": statistics.median(values) * 1e6,
            "ratio": statistics.median(ours / theirs for ours, theirs in zip(times[of], values, strict=True)),
        }
        for name, values in times.items()
    }


def layers(npu) -> dict[str, dict[str, Callable]]:
    """Calls by layer: "npu-fusion", "verl" and "bare", the torch.ops.npu and aten calls that the layer needs at least."""
    import copy

    import peers
    import torch
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe import modeling_qwen3_moe as modeling

    verl = peers.verl_patch(peers.install()["verl"])
    config = Qwen3MoeConfig(
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    )
    ops, dtype = torch.ops.npu, torch.float32  # what a CPU multiplies fastest, as it stands in for the device
    x = torch.randn(1, 4, 64).to("npu", dtype).requires_grad_()

    def pair(module, forward):
        """The module with npu-fusion's layer, and a copy with verl's forward."""
        module = module.to("npu", dtype).eval()
        theirs = copy.deepcopy(module)
        theirs.forward = MethodType(forward, theirs)
        return npu.kernelize(torch.nn.Sequential(module))[0], theirs

    norm, verl_norm = pair(modeling.Qwen3MoeRMSNorm(64), verl.rms_norm_forward_npu)
    mlp, verl_mlp = pair(modeling.Qwen3MoeMLP(config, intermediate_size=64), verl.silu_forward_npu)
    moe, verl_moe = pair(modeling.Qwen3MoeSparseMoeBlock(config), verl.qwen3_moe_sparse_moe_block_forward_npu)
    for block in (moe, verl_moe):
        torch.nn.init.normal_(block.gate.weight)
        torch.nn.init.normal_(block.experts.gate_up_proj)
        torch.nn.init.normal_(block.experts.down_proj)
    attention = modeling.Qwen3MoeAttention(config, 0)
    npu.kernelize(torch.nn.Sequential(attention))
    rotary = modeling.apply_rotary_pos_emb
    q, k = (torch.randn(1, heads, 4, 64).to("npu", dtype).requires_grad_() for heads in (4, 2))
    cos, sin = (torch.randn(1, 4, 64).to("npu", dtype) for _ in range(2))

    def bare_rotary():
        c, s = cos.unsqueeze(1), sin.unsqueeze(1)
        return ops.npu_rotary_mul(q, c, s), ops.npu_rotary_mul(k, c, s)

    # [B, N, S, D] seen, [B, S, N, D] in memory, as attention has several positions; verl's call makes aclnn copy both
    q_seen, k_seen = (x.transpose(1, 2).contiguous().transpose(1, 2).detach().requires_grad_() for x in (q, k))

    def bare_rotary_of_views():
        c, s = cos.unsqueeze(2), sin.unsqueeze(2)
        return [ops.npu_rotary_mul(x.transpose(1, 2), c, s).transpose(1, 2) for x in (q_seen, k_seen)]

    gate, up, down = mlp.gate_proj.weight, mlp.up_proj.weight, mlp.down_proj.weight

    def bare_mlp():
        products = x.new_empty(2, 4, gate.shape[0])
        torch.mm(x[0], gate.t(), out=products[0])
        torch.mm(x[0], up.t(), out=products[1])
        return torch.nn.functional.linear(ops.npu_swiglu(products, 0), down)

    router, packed, out = moe.gate.weight, moe.experts.gate_up_proj, moe.experts.down_proj

    def bare_moe():
        rows = x[0]
        weights, index, _ = ops.npu_moe_gating_top_k_softmax_v2(torch.nn.functional.linear(rows, router), k=2, renorm=1)
        permuted, places, counts, _ = ops.npu_moe_init_routing_v2(
            rows,
            index,
            active_num=8,
            expert_num=8,
            drop_pad_mode=0,
            expert_tokens_num_type=1,
            expert_tokens_num_flag=True,
            quant_mode=-1,
            active_expert_range=[0, 8],
            row_idx_type=0,
        )
        options = {"group_list": counts, "split_item": 3, "group_type": 0, "group_list_type": 1}
        hidden = ops.npu_swiglu(ops.npu_grouped_matmul([permuted], [packed.transpose(1, 2)], **options)[0])
        hidden = ops.npu_grouped_matmul([hidden], [out.transpose(1, 2)], **options)[0]
        return ops.npu_moe_token_unpermute(hidden, places, weights)

    weight, eps = norm.weight, norm.variance_epsilon
    return {
        "RMSNorm": {
            "npu-fusion": lambda: norm(x),
            "verl": lambda: verl_norm(x),
            "bare": lambda: ops.npu_rms_norm(x, weight, eps)[0],
        },
        "rotary": {
            "npu-fusion": lambda: rotary(q, k, cos, sin),
            "verl": lambda: verl.apply_rotary_pos_emb_npu(q, k, cos, sin),
            "bare": bare_rotary,
        },
        "rotary of views": {
            "npu-fusion": lambda: rotary(q_seen, k_seen, cos, sin),
            "verl": lambda: verl.apply_rotary_pos_emb_npu(q_seen, k_seen, cos, sin),
            "bare": bare_rotary_of_views,
        },
        "MLP": {"npu-fusion": lambda: mlp(x), "verl": lambda: verl_mlp(x), "bare": bare_mlp},
        "MoE block": {"npu-fusion": lambda: moe(x), "verl": lambda: verl_moe(x), "bare": bare_moe},
    }


def training(calls: dict[str, Callable]) -> dict[str, Callable]:
    """The same calls with gradients recorded; bare calls record none of their own where torch_npu has no backward."""
    import torch

    def recorded(call):
        def run():
            with torch.enable_grad():
                return call()

        return run

    return {name: recorded(call) for name, call in calls.items() if name != "bare"}


STARTUP = """
import json, sys, time
import npu_emulator.auto
import torch
sys.path.insert(0, sys.argv[1])
begin = time.process_time()
import npu_fusion
imported = time.process_time() - begin
import kernels, transformers
from transformers.models.qwen3_moe import modeling_qwen3_moe
begin = time.process_time()
npu_fusion.register()
registered = time.process_time() - begin
config = transformers.Qwen3MoeConfig(
    num_hidden_layers=94, hidden_size=4096, moe_intermediate_size=1536, num_attention_heads=64, num_key_value_heads=4,
    head_dim=128, num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, vocab_size=151936,
)
with torch.device("meta"):
    model = transformers.Qwen3MoeForCausalLM(config)
begin = time.process_time()
npu_fusion.kernelize(model)
print(json.dumps({"import": imported, "register": registered, "kernelize": time.process_time() - begin}))
"""


def startup(rounds: int) -> dict[str, float]:
    """CPU seconds of import (beyond torch), register() and kernelize of a 94-layer, 128-expert model on meta; medians.

    CPU seconds, as other processes then do not count; on an idle machine that is the time that passes.
    """
    found: dict[str, list[float]] = {}
    for _ in range(rounds):
        command = [sys.executable, "-c", STARTUP, str(ROOT / "torch-ext")]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        for name, seconds in json.loads(output.splitlines()[-1]).items():
            found.setdefault(name, []).append(seconds)
    return {name: statistics.median(values) for name, values in found.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=101)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()

    import npu_emulator.auto
    import torch
    from rich.console import Console
    from rich.table import Table

    torch.set_num_threads(1)
    found: dict[str, dict] = {"calls": {}}
    with torch.no_grad():
        for layer, calls in layers(load_kernel()).items():
            for mode, of_mode in (("inference", calls), ("training", training(calls))):
                times = paired(of_mode, options.rounds, options.repeats)
                found["calls"][f"{layer}, {mode}"] = summary(times, "npu-fusion")
    found["startup"] = startup(5)

    table = Table("layer", "npu-fusion, µs", "verl, µs", "bare, µs", "of verl's", "of bare")
    for layer, row in found["calls"].items():
        bare = row.get("bare", {"us": float("nan"), "ratio": float("nan")})
        values = (row["npu-fusion"]["us"], row["verl"]["us"], bare["us"])
        table.add_row(
            layer, *(f"{value:.1f}" for value in values), f"{row['verl']['ratio']:.3f}", f"{bare['ratio']:.3f}"
        )
    console = Console(highlight=False)
    console.print(table)
    for name, seconds in found["startup"].items():
        console.print(f"{name}: {seconds:.3f} s of CPU")
    if emulated := npu_emulator.is_emulated():
        console.print("Launches are the emulator's: ratios say something, microseconds do not.")
    if options.json:
        options.json.write_text(json.dumps({"emulated": emulated, **found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
