"""Phi-3 and Phi-4 with Hugging Face's module names: packed projections, partial rotary embedding, longrope."""

import torch
from torch import Tensor, nn

from tapscope.engine.distributed.sharding import Shard
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.layers.activation import Activation
from tapscope.engine.layers.linear import PackedLinear, RowParallelLinear
from tapscope.engine.layers.probe import SHARD, WHOLE, Probe
from tapscope.engine.models.attention import SelfAttention
from tapscope.engine.models.decoder import CausalLM, DecoderLayer


class Phi3Attention(SelfAttention):
    """Attention with query, key and value packed into one checkpoint tensor.

    Counterpart of transformers' Phi3Attention.
    """

    linear_class = PackedLinear


class Phi3MLP(nn.Module):
    """down(up(x) * act(gate(x))) with gate and up packed into one checkpoint tensor.

    Counterpart of transformers' Phi3MLP.
    """

    def __init__(self, config: ModelConfig, size: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        shard = Shard.of(size, tp)
        self.gate_up_proj = PackedLinear(config.hidden_size, {"gate_proj": shard, "up_proj": shard}, False, dtype)
        self.gate_proj, self.up_proj = Probe(SHARD), Probe(SHARD)
        self.activation_fn = Activation(config.activation)
        self.down_proj = RowParallelLinear(shard, config.hidden_size, False, tp, dtype)
        self.tap_dims = {"in[hidden_states]": WHOLE, "out": WHOLE}

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        gate, up = self.gate_up_proj.split(self.gate_up_proj(hidden_states))
        output: Tensor = self.down_proj(self.up_proj(up) * self.activation_fn(self.gate_proj(gate)))
        return output


class Phi3DecoderLayer(DecoderLayer):
    """Layer with dropout modules, which are identities; counterpart of transformers' Phi3DecoderLayer."""

    attention_class = Phi3Attention
    mlp_class = Phi3MLP

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, layer, tp, dtype)
        self.resid_attn_dropout, self.resid_mlp_dropout = Probe(WHOLE), Probe(WHOLE)

    def attention_summand(self, output: Tensor) -> Tensor:
        """Pass the attention output through the dropout module: an identity, but a site."""
        dropped: Tensor = self.resid_attn_dropout(output)
        return dropped

    def mlp_summand(self, output: Tensor) -> Tensor:
        """Pass the MLP output through the dropout module: an identity, but a site."""
        dropped: Tensor = self.resid_mlp_dropout(output)
        return dropped


class Phi3ForCausalLM(CausalLM):
    """Phi-3, arXiv:2404.14219, and Phi-4, arXiv:2412.08905; transformers' `modeling_phi3.py`."""

    layer_class = Phi3DecoderLayer
