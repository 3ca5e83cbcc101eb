"""The dense model as a mixture of experts that must answer the same: SmolLM2 upcycled into a Mixtral.

    python examples/mixture.py [--question TEXT] [--experts N] [--json FILE]

Every expert is a copy of the layer's MLP and the weights of the chosen experts sum to 1, so whatever the (random) router
chooses, the mixture computes what the dense model does. It runs through permutation, grouped matmuls and their way back.
"""

import argparse
import json
from pathlib import Path

import npu_emulator.auto
import torch
from checkpoint import ask, load_kernel, smollm2
from rich.console import Console
from transformers import LlamaForCausalLM, MixtralConfig, MixtralForCausalLM


def upcycle(dense: LlamaForCausalLM, experts: int) -> MixtralForCausalLM:
    """A Mixtral with the weights of `dense`: each MLP becomes `experts` copies of itself behind a random router."""
    settings = {name: value for name, value in dense.config.to_dict().items() if name in MixtralConfig().to_dict()}
    settings.pop("model_type"), settings.pop("architectures", None)
    config = MixtralConfig(**settings, num_local_experts=experts, num_experts_per_tok=2, sliding_window=None)
    with torch.device("meta"):
        mixture = MixtralForCausalLM(config)
    mixture.to_empty(device="cpu").init_weights()
    mixture.model.rotary_emb = dense.model.rotary_emb
    shared = {name: value for name, value in dense.state_dict().items() if ".mlp." not in name}
    mixture.load_state_dict(shared, strict=False)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for source, target in zip(dense.model.layers, mixture.model.layers, strict=True):
            gate_up = torch.cat((source.mlp.gate_proj.weight, source.mlp.up_proj.weight))
            target.mlp.experts.gate_up_proj.copy_(gate_up.expand(experts, -1, -1))
            target.mlp.experts.down_proj.copy_(source.mlp.down_proj.weight.expand(experts, -1, -1))
            target.mlp.gate.weight.normal_(generator=generator)
    mixture.generation_config = dense.generation_config
    return mixture.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--question", default="What is the capital of France?")
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    arguments = parser.parse_args()
    console = Console()

    npu = load_kernel()
    with console.status("loading SmolLM2-135M-Instruct"):
        dense, tokenizer = smollm2()
    with console.status("upcycling"):
        mixture = upcycle(dense, arguments.experts).to("npu")
    dense.to("npu")
    with console.status("answering: dense and eager"):
        expected = ask(dense, tokenizer, arguments.question)
    npu.kernelize(mixture)
    with console.status("answering: mixture and fused"):
        answer = ask(mixture, tokenizer, arguments.question)

    report = npu.report(mixture)
    result = {
        "device": torch.npu.get_device_name(0),
        "emulated": npu_emulator.is_emulated(),
        "experts": arguments.experts,
        "answer_dense": tokenizer.decode(expected, skip_special_tokens=True),
        "answer_mixture": tokenizer.decode(answer, skip_special_tokens=True),
        "same_tokens": expected == answer,
        "swapped": report.swapped,
    }
    console.print(f"device    {result['device']}")
    console.print(f"dense     {result['answer_dense']}")
    console.print(f"mixture   {result['answer_mixture']}  ({'the same' if expected == answer else 'OTHER'} tokens)")
    print()
    print(report)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    if expected != answer:
        raise SystemExit("the mixture gave other tokens than the dense model")


if __name__ == "__main__":
    main()
