"""Starcoder2 with Hugging Face's module names: LayerNorm, biases, an MLP without a gate."""

import torch
from torch import Tensor, nn

from tapscope.engine.distributed.sharding import Shard
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.layers.activation import Activation
from tapscope.engine.layers.linear import ColumnParallelLinear, RowParallelLinear
from tapscope.engine.layers.norm import LayerNorm
from tapscope.engine.layers.probe import WHOLE
from tapscope.engine.models.decoder import CausalLM, DecoderLayer


class Starcoder2MLP(nn.Module):
    """c_proj(act(c_fc(x))); counterpart of transformers' Starcoder2MLP."""

    def __init__(self, config: ModelConfig, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        shard = Shard.of(config.intermediate_size, tp)
        self.c_fc = ColumnParallelLinear(config.hidden_size, shard, config.mlp_bias, dtype)
        self.act = Activation(config.activation)
        self.c_proj = RowParallelLinear(shard, config.hidden_size, config.mlp_bias, tp, dtype)
        self.tap_dims = {"in[hidden_states]": WHOLE, "out": WHOLE}

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        output: Tensor = self.c_proj(self.act(self.c_fc(hidden_states)))
        return output


class Starcoder2DecoderLayer(DecoderLayer):
    """Counterpart of transformers' Starcoder2DecoderLayer."""

    norm_class = LayerNorm

    def make_mlp(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> nn.Module:
        """Create the ``mlp`` module of layer ``layer``."""
        return Starcoder2MLP(config, tp, dtype)


class Starcoder2ForCausalLM(CausalLM):
    """StarCoder2, arXiv:2402.19173; transformers' `modeling_starcoder2.py`."""

    layer_class = Starcoder2DecoderLayer
