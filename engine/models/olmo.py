"""OLMo 2 and 3 with Hugging Face's module names: post-norms, q/k norm over all heads, rope in float32."""

from typing import ClassVar

import torch
from torch import Tensor

from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.kv_cache.step_cache import StepCache
from tapscope.engine.layers.norm import Olmo2RMSNorm, ShardedRMSNorm
from tapscope.engine.layers.rope import RotaryEmbedding, rotate
from tapscope.engine.models.attention import SelfAttention
from tapscope.engine.models.decoder import CausalLM, Decoder, DecoderLayer, Rotation
from tapscope.engine.models.gemma import Gemma3Decoder, Gemma3RotaryEmbedding
from tapscope.engine.models.residual_stream import OnSum


class Olmo2Attention(SelfAttention):
    """Attention with RMS norms over all heads of queries and keys; counterpart of transformers' Olmo2Attention."""

    has_kernel = False

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, layer, tp, dtype)
        queries, keys = (shard.scaled(config.head_dim) for shard in (self.heads.queries, self.heads.keys))
        self.q_norm = ShardedRMSNorm(queries, config.rms_norm_eps, tp, dtype)
        self.k_norm = ShardedRMSNorm(keys, config.rms_norm_eps, tp, dtype)

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project [tokens, hidden] to normalized query and key, and value, [tokens, heads, dim] each."""
        query, key, value = self.qkv_proj(hidden_states)
        query = self._heads(self.q_norm(self.q_proj(query)))
        return query, self._heads(self.k_norm(self.k_proj(key))), self._heads(self.v_proj(value))

    def rotate(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply the rotary embedding in the dtype of ``cos`` and ``sin``; return the dtype of ``states``."""
        return rotate(states, cos, sin).to(states.dtype)


class Olmo2DecoderLayer(DecoderLayer):
    """Attention and MLP with post-norms and residual connections; counterpart of transformers' Olmo2DecoderLayer."""

    attention_class = Olmo2Attention
    norm_class = Olmo2RMSNorm

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, layer, tp, dtype)
        del self.input_layernorm
        self.post_feedforward_layernorm = Olmo2RMSNorm(config.hidden_size, config.rms_norm_eps, dtype)

    def summands(
        self,
        states: Tensor,
        residual: Tensor | None,
        past_key_values: StepCache,
        position_embeddings: Rotation,
        on_input: OnSum | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (output, residual), see :meth:`.DecoderLayer.summands`."""
        hidden_states = states if residual is None else residual + states
        if on_input is not None:
            on_input(hidden_states)
        states = self.mix(hidden_states, past_key_values, position_embeddings)
        hidden_states = hidden_states + self.post_attention_layernorm(states)
        return self.post_feedforward_layernorm(self.mlp(hidden_states)), hidden_states


class Olmo2RotaryEmbedding(RotaryEmbedding):
    """Cosines and sines in float32; counterpart of transformers' Olmo2RotaryEmbedding."""

    is_float32: ClassVar[bool] = True


class Olmo3RotaryEmbedding(Gemma3RotaryEmbedding):
    """Cosines and sines per layer type, in float32; counterpart of transformers' Olmo3RotaryEmbedding."""

    is_float32: ClassVar[bool] = True


class Olmo2Decoder(Decoder):
    """Counterpart of transformers' Olmo2Model."""

    rotary_class = Olmo2RotaryEmbedding


class Olmo3Decoder(Gemma3Decoder):
    """Counterpart of transformers' Olmo3Model: rope scaling applies to layers with full attention only."""

    rotary_class = Olmo3RotaryEmbedding


class Olmo2ForCausalLM(CausalLM):
    """OLMo 2, arXiv:2501.00656; transformers' `modeling_olmo2.py`."""

    decoder_class = Olmo2Decoder
    layer_class = Olmo2DecoderLayer


class Olmo3ForCausalLM(CausalLM):
    """OLMo 3: OLMo 2 with sliding windows; transformers' `modeling_olmo3.py`."""

    decoder_class = Olmo3Decoder
    layer_class = Olmo2DecoderLayer
