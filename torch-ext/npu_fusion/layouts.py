"""Weights merged at load: gate and up of a gated MLP as one matrix, which saves a matmul's launch and a read of its input.

`SwiGLUMLPLayout` beside the layer `SwiGLUMLP` is transformers' mechanism for a kernel that owns its weights: a checkpoint of
the plain model is converted while it is loaded, and back when the model is saved.
"""

from typing import Any, List, Optional

import torch
from torch import nn


class Conversions:
    """`conversion_mapping` of a layout, made when transformers asks for it."""

    def __get__(self, instance: Any, owner: type) -> List[Any]:
        from transformers.core_model_loading import Concatenate, WeightConverter

        return [
            WeightConverter(
                [f"mlp.gate_proj.{kind}", f"mlp.up_proj.{kind}"], f"mlp.gate_up_proj.{kind}", [Concatenate(dim=0)]
            )
            for kind in ("weight", "bias")
        ]


class SwiGLUMLPLayout(nn.Module):
    """A gated MLP of transformers with gate_proj and up_proj as the halves of gate_up_proj [2I, H]."""

    conversion_mapping = Conversions()

    def __init__(self, config: Any, intermediate_size: Optional[int] = None) -> None:
        from transformers.activations import ACT2FN

        super().__init__()
        width = config.intermediate_size if intermediate_size is None else intermediate_size
        bias = getattr(config, "mlp_bias", False)
        self.gate_up_proj = nn.Linear(config.hidden_size, 2 * width, bias=bias)
        self.down_proj = nn.Linear(width, config.hidden_size, bias=bias)
        self.act_fn = ACT2FN[config.hidden_act]

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up_proj(hidden_states).chunk(2, dim=-1)
        return self.down_proj(self.act_fn(gate) * up)
