"""Falcon-H1 with Hugging Face's module names: parallel Mamba-2 and attention in every layer, muP multipliers."""

import torch
from torch import Tensor

from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.kv_cache.step_cache import StepCache
from tapscope.engine.models.attention import SelfAttention
from tapscope.engine.models.decoder import Decoder, DecoderLayer, Rotation
from tapscope.engine.models.mamba2 import Mamba2CausalLM, Mamba2Mixer
from tapscope.engine.models.mlp import GatedMLP


class FalconH1Attention(SelfAttention):
    """Counterpart of transformers' FalconH1Attention: keys are scaled before the rotary embedding."""

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, layer, tp, dtype)
        self.key_multiplier = config.key_multiplier

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project to query, key and value, with keys multiplied by ``key_multiplier``."""
        query, key, value = super().project(hidden_states)
        return query, key * self.key_multiplier, value


class FalconH1MLP(GatedMLP):
    """Counterpart of transformers' FalconH1MLP: gate and output are scaled."""

    def __init__(self, config: ModelConfig, size: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, size, tp, dtype)
        self.gate_multiplier, self.down_multiplier = config.mlp_multipliers

    def forward(self, x: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, hidden]."""
        gate, up = self.gate_up_proj(x)
        active = self.up_proj(up) * self.act_fn(self.gate_proj(gate) * self.gate_multiplier)
        output: Tensor = self.down_proj(active) * self.down_multiplier
        return output


class FalconH1DecoderLayer(DecoderLayer):
    """``mamba`` and ``self_attn`` on the same norm's output, then ``feed_forward``.

    Counterpart of transformers' FalconH1DecoderLayer.
    """

    attention_class = FalconH1Attention
    mlp_class = FalconH1MLP
    mlp_norm_name = "pre_ff_layernorm"
    mlp_name = "feed_forward"

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, layer, tp, dtype)
        self.mamba = Mamba2Mixer(config, layer, tp, dtype)
        assert config.mamba is not None
        self.ssm_out_multiplier = config.mamba.out_multiplier
        self.in_multiplier, self.out_multiplier = config.attention_in_multiplier, config.attention_out_multiplier

    def mix(self, hidden_states: Tensor, cache: StepCache, position_embeddings: Rotation) -> Tensor:
        """Return the weighted sum of both mixers' outputs for normalized hidden states [tokens, hidden]."""
        attended = super().mix(hidden_states * self.in_multiplier, cache, position_embeddings)
        recurrent: Tensor = self.mamba(hidden_states, cache)
        return recurrent * self.ssm_out_multiplier + attended * self.out_multiplier


class FalconH1Decoder(Decoder):
    """Counterpart of transformers' FalconH1Model."""

    final_norm_name = "final_layernorm"


class FalconH1ForCausalLM(Mamba2CausalLM):
    """Falcon-H1, arXiv:2507.22448; transformers' `modeling_falcon_h1.py`."""

    decoder_class = FalconH1Decoder
    layer_class = FalconH1DecoderLayer
