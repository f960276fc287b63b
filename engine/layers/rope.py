"""Rotary position embedding."""

import torch
from torch import Tensor, nn

from tapscope.engine.layers.probe import ANGLES, TOKENS, WHOLE
from tapscope.engine.model_config import ModelConfig


class RotaryEmbedding(nn.Module):
    """Cosines and sines of rotary position embedding, arXiv:2104.09864, halves side by side as transformers does."""

    inv_freq: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.register_buffer("inv_freq", inverse_frequencies(config), persistent=False)
        self.tap_dims = {"in[hidden_states]": WHOLE, "in[position_ids]": TOKENS, "out[0]": ANGLES, "out[1]": ANGLES}

    def forward(self, hidden_states: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Positions [tokens] -> cos and sin [tokens, head_dim] in the dtype of ``hidden_states``."""
        angles = position_ids[:, None].float() * self.inv_freq
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(hidden_states.dtype), angles.sin().to(hidden_states.dtype)


def inverse_frequencies(config: ModelConfig) -> Tensor:
    """[head_dim / 2] float32: theta^(-2i/d), with Llama 3.1's stretching of long wavelengths when asked for.

    ``llama3`` is `apply_scaling` of Meta's reference code, as in transformers' `_compute_llama3_parameters`:
    wavelengths above original/low are divided by factor, below original/high kept, between them blended.
    """
    rope = config.rope
    freq = 1.0 / (rope.theta ** (torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim))
    if rope.kind == "default":
        return freq
    turns = rope.original_max_positions * freq / (2 * torch.pi)  # rotations within the original context
    blend = ((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0, 1)
    return (1 - blend) * freq / rope.factor + blend * freq
