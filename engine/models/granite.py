"""Granite under Hugging Face's names: multipliers of embeddings, residuals, attention scores and logits."""

import torch
from torch import Tensor

from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.kv_cache.step_cache import StepCache
from tapscope.engine.layers.norm import add_norm
from tapscope.engine.models.decoder import CausalLM, DecoderLayer, Rotation


class GraniteDecoderLayer(DecoderLayer):
    """A layer whose attention and MLP outputs are scaled before they are added; transformers' GraniteDecoderLayer."""

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, layer, tp, dtype)
        self.residual_multiplier = config.residual_multiplier

    def summands(
        self, states: Tensor, residual: Tensor | None, past_key_values: StepCache, position_embeddings: Rotation
    ) -> tuple[Tensor, Tensor]:
        """(output, residual) from (input, residual); see DecoderLayer."""
        normalised, residual = add_norm(self.input_layernorm, states, residual)
        states, _ = self.self_attn(
            hidden_states=normalised, position_embeddings=position_embeddings, past_key_values=past_key_values
        )
        scaled = states * self.residual_multiplier
        normalised, residual = add_norm(self.post_attention_layernorm, scaled, residual)
        return self.mlp(normalised) * self.residual_multiplier, residual


class GraniteForCausalLM(CausalLM):
    """Granite 3, arXiv:2408.13359 (muP multipliers); transformers' `modeling_granite.py`."""

    layer_class = GraniteDecoderLayer
