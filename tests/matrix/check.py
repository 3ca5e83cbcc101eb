"""What the kernel does in this Python environment, as JSON: run by scripts/matrix.py with each pair's own interpreter.

    python tests/matrix/check.py <directory that holds torch-npu/>

Each check is one thing that a user does. It passes, or its error is the row's.
"""

import copy
import importlib.metadata
import inspect
import json
import os
import sys
import tempfile
import traceback
from pathlib import Path

import npu_emulator.auto  # noqa: F401  before torch
import torch

BUILD = Path(sys.argv[1])
TOKENS = torch.arange(24).view(2, 12) % 64
# fp32 on one device: fused and eager differ by the order of a few sums and one rounding a layer
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 64,
    "attn_implementation": "eager",
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "output_router_logits": True}


def version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "-"


def load():
    """(how, kernel): with kernels' loader where the installed kernels knows npu, else by import."""
    import kernels

    # LOCAL_KERNELS is older than trust_remote_code, but was not looked at before a version was resolved on the Hub
    if "trust_remote_code" in inspect.signature(kernels.get_kernel).parameters:
        os.environ["LOCAL_KERNELS"] = f"org/npu-fusion={BUILD}"
        return "get_kernel", kernels.get_kernel("org/npu-fusion", version=1)
    try:
        return "get_local_kernel", kernels.get_local_kernel(BUILD, "npu_fusion")
    except Exception:  # kernels < 0.10.3 knows no npu and stops with an AssertionError or finds no variant
        traceback.print_exc()
    sys.path.insert(0, str(BUILD / "torch-npu"))
    import npu_fusion

    return "import npu_fusion", npu_fusion


HOW, npu = load()


def models():
    """Name -> (model class, config) of the families that this transformers has."""
    import transformers

    for name, options in (
        ("Llama", {}),
        ("Gemma", {}),
        ("Qwen3Moe", EXPERTS),
        ("Mixtral", {"output_router_logits": True}),
    ):
        config = getattr(transformers, f"{name}Config")(**SIZES, **options)
        yield name, getattr(transformers, f"{name}ForCausalLM"), config


def step(model):
    """Everything that a training step shows: outputs, router logits, gradients."""
    tokens = TOKENS.to(model.device)
    output = model(tokens, labels=tokens)
    output.loss.backward()
    routers = getattr(output, "router_logits", None) or ()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return [output.logits, *routers], gradients


def check_kernelize():
    """Every family, eager and swapped: the same outputs, router logits and gradients. Returns what was swapped."""
    swapped = {}
    for name, cls, config in models():
        torch.manual_seed(0)
        eager = cls(config).to("npu").train()
        fused = npu.kernelize(copy.deepcopy(eager))
        (outputs, gradients), (fused_outputs, fused_gradients) = step(eager), step(fused)
        for theirs, ours in zip(outputs, fused_outputs, strict=True):
            torch.testing.assert_close(ours, theirs, **TOLERANCE, msg=lambda text, name=name: f"{name}: {text}")
        for key, gradient in gradients.items():
            assert (gradient is None) == (fused_gradients[key] is None), f"{name}: gradient of {key}"
            if gradient is not None:
                torch.testing.assert_close(
                    fused_gradients[key], gradient, **TOLERANCE, msg=f"{name}: gradient of {key}"
                )
        swapped[name] = npu.report(fused).swapped
        assert swapped[name], f"{name}: nothing was swapped"
        npu.restore(fused)
        assert not npu.report(fused).swapped
    return swapped


def saved(directory: str):
    import transformers

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))
    model.save_pretrained(directory)
    return transformers.AutoModelForCausalLM, model


def loaded_as(**options):
    """from_pretrained with `options` swaps layers and computes what the plain model does. Returns what was swapped."""
    with tempfile.TemporaryDirectory() as directory:
        auto, plain = saved(directory)
        model = auto.from_pretrained(directory, device_map="npu", **options)
        with torch.no_grad():
            torch.testing.assert_close(model(TOKENS.to("npu")).logits.cpu(), plain(TOKENS).logits, **TOLERANCE)
        swapped = npu.report(model).swapped
        assert swapped, "nothing was swapped"
        return swapped


def check_use_kernels():
    npu.register()
    try:
        return loaded_as(use_kernels=True)
    finally:
        npu.unregister()


def check_kernel_config():
    return loaded_as(kernel_config=npu.KernelConfig())


def check_doctor():
    diagnosis = npu.doctor()
    return {"ok": diagnosis.ok, "says": diagnosis["transformers"].value, "advice": diagnosis["transformers"].advice}


if __name__ == "__main__":
    result = {name: version(name) for name in ("transformers", "kernels", "huggingface_hub", "torch", "torch_npu")}
    result["loaded"] = HOW
    for check in (check_kernelize, check_use_kernels, check_kernel_config, check_doctor):
        name = check.__name__.removeprefix("check_")
        try:
            result[name] = check()
        except Exception as error:
            traceback.print_exc()
            result[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    print(json.dumps(result))
