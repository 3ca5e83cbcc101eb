"""A real model answers on an Ascend NPU, before and after npu-fusion swapped its layers.

    python examples/smollm2.py [--question TEXT] [--json FILE]

Without an NPU the real torch_npu runs on the emulator: answers and launch counts are right, time means nothing.
"""

import argparse
import json
from pathlib import Path

import npu_emulator.auto
import torch
from checkpoint import ask, load_kernel, smollm2
from rich.console import Console


def launches_per_token(model: torch.nn.Module) -> int | None:
    """Kernel launches of one decoding step at position 1, counted by the emulator; None on a real device."""
    if not npu_emulator.is_emulated():
        return None
    with torch.no_grad():
        prompt = torch.tensor([[1]], device=model.device)
        cache = model(prompt, use_cache=True).past_key_values
        with npu_emulator.count() as traffic:
            model(prompt, past_key_values=cache, use_cache=True)
    return traffic.launches


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--question", default="What is the capital of France?")
    parser.add_argument("--json", type=Path, help="also write the result to this file")
    arguments = parser.parse_args()
    console = Console()

    npu = load_kernel()
    with console.status("loading SmolLM2-135M-Instruct"):
        model, tokenizer = smollm2()
        model.to("npu")
    with console.status("answering with the layers of transformers"):
        eager, eager_launches = ask(model, tokenizer, arguments.question), launches_per_token(model)
    npu.kernelize(model)
    with console.status("answering with the layers of npu-fusion"):
        fused, fused_launches = ask(model, tokenizer, arguments.question), launches_per_token(model)

    report = npu.report(model)
    result = {
        "device": torch.npu.get_device_name(0),
        "emulated": npu_emulator.is_emulated(),
        "answer_eager": tokenizer.decode(eager, skip_special_tokens=True),
        "answer_fused": tokenizer.decode(fused, skip_special_tokens=True),
        "same_tokens": eager == fused,
        "swapped": report.swapped,
        "launches_per_token": {"eager": eager_launches, "fused": fused_launches},
    }
    console.print(f"device    {result['device']}")
    console.print(f"question  {arguments.question}")
    console.print(f"eager     {result['answer_eager']}")
    console.print(f"fused     {result['answer_fused']}  ({'the same' if eager == fused else 'OTHER'} tokens)")
    print()
    print(report)
    print()
    if eager_launches is not None:
        console.print(f"launches per decoded token: {eager_launches} eager, {fused_launches} fused")
        console.print("The device is emulated: this shows what runs, never how fast an Ascend NPU is.")
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=2) + "\n")
    if eager != fused:
        raise SystemExit("the fused model gave other tokens")


if __name__ == "__main__":
    main()
