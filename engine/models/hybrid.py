"""HybridDecoderLayer: a decoder layer with either a recurrent layer or attention, depending on ``layer_types``."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.kv_cache.step_cache import StepCache
from tapscope.engine.models.decoder import Rotation
from tapscope.engine.models.moe import MoeDecoderLayer


class HybridDecoderLayer(MoeDecoderLayer):
    """Layer with a recurrent token mixer in ``config.linear_layers`` and with attention in the others."""

    recurrent_name: ClassVar[str] = "mamba"
    """Name of the recurrent layer in transformers."""
    recurrent_class: ClassVar[type[nn.Module]]
    """Class of the recurrent layer; called with hidden states [tokens, hidden] and the step's cache."""

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, layer, tp, dtype)
        self.is_recurrent = layer in config.linear_layers
        if self.is_recurrent and self.recurrent_name != "self_attn":
            self.add_module(self.recurrent_name, self.self_attn)
            del self.self_attn

    def make_attention(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> nn.Module:
        """Create the token mixer of layer ``layer``."""
        kind = self.recurrent_class if layer in config.linear_layers else self.attention_class
        return kind(config, layer, tp, dtype)

    def mix(self, hidden_states: Tensor, cache: StepCache, position_embeddings: Rotation) -> Tensor:
        """Return the mixer's output for normalized hidden states [tokens, hidden]."""
        if not self.is_recurrent:
            return super().mix(hidden_states, cache, position_embeddings)
        output: Tensor = getattr(self, self.recurrent_name)(hidden_states, cache)
        return output
