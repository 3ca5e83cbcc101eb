"""Small random models of real families, with their expected swaps."""

import torch
import transformers
from transformers import AutoModelForCausalLM

SMALL = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
MOE = {**SMALL, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}

# family: (config class, settings, places that must be swapped in the two layers)
FAMILIES = {
    "llama": ("LlamaConfig", SMALL, {"RMSNorm": 5, "SwiGLUMLP": 2, "rotary_pos_emb": 2, "PreNormDecoderLayer": 2}),
    "qwen2": ("Qwen2Config", SMALL, {"RMSNorm": 5, "SwiGLUMLP": 2, "rotary_pos_emb": 2, "PreNormDecoderLayer": 2}),
    "qwen3": ("Qwen3Config", SMALL, {"RMSNorm": 9, "SwiGLUMLP": 2, "rotary_pos_emb": 2, "PreNormDecoderLayer": 2}),
    "qwen2_moe": (
        "Qwen2MoeConfig",
        {**MOE, "shared_expert_intermediate_size": 32},
        {"RMSNorm": 5, "SwiGLUMLP": 2, "MoEExperts": 2, "TopKRouter": 2, "rotary_pos_emb": 2, "PreNormDecoderLayer": 2},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        MOE,
        {"RMSNorm": 9, "MoEExperts": 2, "TopKRouter": 2, "rotary_pos_emb": 2, "PreNormDecoderLayer": 2},
    ),
    "mixtral": (
        "MixtralConfig",
        {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
        {"RMSNorm": 5, "MoEExperts": 2, "TopKRouter": 2, "rotary_pos_emb": 2, "PreNormDecoderLayer": 2},
    ),
}


def build_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Module:
    """A random model of `family` on the CPU, in eval mode, with every norm weight away from its initial 1."""
    name, settings, _ = FAMILIES[family]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(getattr(transformers, name)(**settings), attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.to(dtype).eval()


def token_ids(batch: int = 2, length: int = 11, seed: int = 1) -> torch.Tensor:
    return torch.randint(2, SMALL["vocab_size"], (batch, length), generator=torch.Generator().manual_seed(seed))


def loss_and_gradients(model: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict]:
    """The logits and the gradient of every parameter that has one, in float64 on the CPU."""
    model.zero_grad()
    output = model(**inputs, labels=inputs["input_ids"])
    output.loss.backward()
    gradients = {name: p.grad.detach().cpu().double() for name, p in model.named_parameters() if p.grad is not None}
    return output.logits.detach().cpu().double(), gradients
