"""Small random models with a vision tower or with linear attention beside full attention."""

import torch
import transformers
from models.families import MOE, SMALL

TEXT = {**SMALL, "vocab_size": 160, "num_hidden_layers": 2}
LINEAR_ATTENTION = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "shared_expert_intermediate_size": 32,
}
VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "out_hidden_size": 64,
    "initializer_range": 0.2,
}
MARKS = {"image_token_id": 150, "video_token_id": 151, "vision_start_token_id": 152, "vision_end_token_id": 153}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}}
PARTIAL = {**MROPE["rope_parameters"], "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}
HYBRID = {"RMSNormGated": 1, "RMSNormZeroCentered": 7, "SwiGLUMLP": 2}

# family: (config, settings, places that must be swapped)
FAMILIES = {
    "qwen2_5_vl": (
        "Qwen2_5_VLConfig",
        {
            "text_config": {**TEXT, **MROPE},
            "vision_config": {**VISION, "window_size": 16, "fullatt_block_indexes": [1]},
            **MARKS,
        },
        {"PreNormDecoderLayer": 2, "RMSNorm": 10, "SwiGLUMLP": 4, "rotary_pos_emb": 4},
    ),
    "qwen3_vl": (
        "Qwen3VLConfig",
        {
            "text_config": {**TEXT, **MROPE},
            "vision_config": {**VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
            **MARKS,
        },
        {"RMSNorm": 9, "SwiGLUMLP": 2, "rotary_pos_emb": 4},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoeConfig",
        {
            "text_config": {**TEXT, **MOE, **MROPE, "vocab_size": 160, "num_local_experts": 4},
            "vision_config": {**VISION, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
            **MARKS,
        },
        {"PreNormDecoderLayer": 2, "RMSNorm": 9, "MoEExperts": 2, "TopKRouter": 2, "rotary_pos_emb": 4},
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        {**TEXT, **MOE, **LINEAR_ATTENTION},
        {**HYBRID, "MoEExperts": 2, "TopKRouter": 2, "rotary_pos_emb": 1},
    ),
    "qwen3_5": (
        "Qwen3_5Config",
        {
            "text_config": {**TEXT, **LINEAR_ATTENTION, "rope_parameters": PARTIAL},
            "vision_config": {**VISION, "num_position_embeddings": 16},
            **MARKS,
        },
        {**HYBRID, "rotary_pos_emb": 3},
    ),
    "qwen3_5_moe": (
        "Qwen3_5MoeConfig",
        {
            "text_config": {**TEXT, **MOE, **LINEAR_ATTENTION, "vocab_size": 160, "rope_parameters": PARTIAL},
            "vision_config": {**VISION, "num_position_embeddings": 16},
            **MARKS,
        },
        {**HYBRID, "MoEExperts": 2, "TopKRouter": 2, "rotary_pos_emb": 3},
    ),
}


def build_model(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.nn.Module:
    """A random model of `family` on the CPU, in eval mode, with every norm weight away from its initial value."""
    name, settings, _ = FAMILIES[family]
    config = getattr(transformers, name)(**settings)
    torch.manual_seed(seed)
    automatic = (
        transformers.AutoModelForImageTextToText if "vision_config" in settings else transformers.AutoModelForCausalLM
    )
    model = automatic.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return model.to(dtype).eval()


def inputs(family: str, device: str, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Text, and for a model with a vision tower one image of 8 x 8 patches among it."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(2, 128, (1, 9), generator=generator)
    settings = FAMILIES[family][1]
    if "vision_config" not in settings:
        return {"input_ids": ids.to(device)}
    image = torch.tensor([[152, *[150] * 16, 153]])
    ids = torch.cat((ids[:, :4], image, ids[:, 4:]), dim=1)
    vision = settings["vision_config"]
    features = 3 * vision["temporal_patch_size"] * vision["patch_size"] ** 2
    return {
        "input_ids": ids.to(device),
        "mm_token_type_ids": (ids == 150).int().to(device),
        "pixel_values": torch.randn(64, features, generator=generator).to(device, dtype),
        "image_grid_thw": torch.tensor([[1, 8, 8]], device=device),
    }
