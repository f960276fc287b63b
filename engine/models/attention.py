"""SelfAttention: projections, rotary embedding and the attention core under Hugging Face's names."""

import torch
from torch import Tensor, nn

from tapscope.engine.attention import Attention, AttentionSpec
from tapscope.engine.cache import StepCache
from tapscope.engine.layers.linear import FusedLinear, RowParallelLinear
from tapscope.engine.layers.probe import ANGLE_INPUTS, SHARD, WHOLE, Probe
from tapscope.engine.model_config import ModelConfig
from tapscope.engine.parallel import TensorParallel


class SelfAttention(nn.Module):
    """Grouped-query attention, arXiv:2305.13245, with this rank's share of the heads."""

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        parts = {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width}
        self.qkv_proj = FusedLinear(config.hidden_size, parts, config.attention_bias, tp, dtype)
        self.q_proj, self.k_proj, self.v_proj = Probe(SHARD), Probe(SHARD), Probe(SHARD)
        self.attn = Attention(layer, AttentionSpec(scale=config.head_dim**-0.5))
        self.o_proj = RowParallelLinear(width, config.hidden_size, config.attention_bias, tp, dtype)
        self.tap_dims = {"in[hidden_states]": WHOLE, "out[0]": WHOLE} | ANGLE_INPUTS

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor], past_key_values: StepCache
    ) -> tuple[Tensor, None]:
        """[tokens, hidden] -> ([tokens, hidden], None); transformers returns attention weights second."""
        query, key, value = self.qkv_proj(hidden_states)
        cos, sin = position_embeddings
        query = rotate(self._heads(self.q_proj(query)), cos, sin)
        key = rotate(self._heads(self.k_proj(key)), cos, sin)
        value = self._heads(self.v_proj(value))
        return self.o_proj(self.attn(query, key, value, past_key_values)), None

    def _heads(self, tensor: Tensor) -> Tensor:
        return tensor.view(len(tensor), -1, self.head_dim)


def rotate(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of [tokens, heads, head_dim] by cos and sin [tokens, head_dim], first half against second."""
    first, second = states.chunk(2, dim=-1)
    return states * cos.unsqueeze(1) + torch.cat((-second, first), dim=-1) * sin.unsqueeze(1)
