"""Granite with Hugging Face's module names: multipliers of embeddings, residuals, attention scores and logits."""

import torch
from torch import Tensor

from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.models.decoder import CausalLM, DecoderLayer


class GraniteDecoderLayer(DecoderLayer):
    """Layer whose attention and MLP outputs are scaled before the residual addition.

    Counterpart of transformers' GraniteDecoderLayer.
    """

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, layer, tp, dtype)
        self.residual_multiplier = config.residual_multiplier

    def attention_summand(self, output: Tensor) -> Tensor:
        """Scale the attention output by ``residual_multiplier``."""
        return output * self.residual_multiplier

    def mlp_summand(self, output: Tensor) -> Tensor:
        """Scale the MLP output by ``residual_multiplier``."""
        return output * self.residual_multiplier


class GraniteForCausalLM(CausalLM):
    """Granite 3, arXiv:2408.13359 (muP multipliers); transformers' `modeling_granite.py`."""

    layer_class = GraniteDecoderLayer
