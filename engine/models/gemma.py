"""Gemma 2 and 3: four norms per layer, scaled embeddings, soft-caps; Gemma 3 has one rotary base per layer type."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.family import FULL, SLIDING
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.kv_cache.step_cache import StepCache
from tapscope.engine.layers.norm import GemmaRMSNorm, add_norm
from tapscope.engine.layers.probe import ANGLES, TOKENS, WHOLE
from tapscope.engine.layers.rope import attention_scaling, cos_sin, inverse_frequencies
from tapscope.engine.models.attention import SelfAttention
from tapscope.engine.models.decoder import CausalLM, Decoder, DecoderLayer, Rotation
from tapscope.engine.models.residual_stream import OnSum


class GemmaAttention(SelfAttention):
    """Counterpart of transformers' Gemma2Attention and Gemma3Attention."""

    norm_class = GemmaRMSNorm


class GemmaDecoderLayer(DecoderLayer):
    """Attention and MLP with pre- and post-norms and residual connections.

    Counterpart of transformers' Gemma2DecoderLayer.
    """

    attention_class = GemmaAttention
    norm_class = GemmaRMSNorm

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, layer, tp, dtype)
        self.pre_feedforward_layernorm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps, dtype)
        self.post_feedforward_layernorm = GemmaRMSNorm(config.hidden_size, config.rms_norm_eps, dtype)

    def summands(
        self,
        states: Tensor,
        residual: Tensor | None,
        past_key_values: StepCache,
        position_embeddings: Rotation,
        on_input: OnSum | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return (output, residual), see :meth:`.DecoderLayer.summands`."""
        normalised, residual = add_norm(self.input_layernorm, states, residual, on_sum=on_input)
        states = self.mix(normalised, past_key_values, position_embeddings)
        normalised, residual = add_norm(self.pre_feedforward_layernorm, states, residual, self.post_attention_layernorm)
        return self.post_feedforward_layernorm(self.mlp(normalised)), residual


class Gemma3RotaryEmbedding(nn.Module):
    """Cosines and sines per layer type; called once per type, like transformers' Gemma3RotaryEmbedding."""

    is_float32: ClassVar[bool] = False
    """Whether cosines and sines are float32 rather than the input's dtype."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        ropes = {FULL: config.rope, SLIDING: config.local_rope or config.rope}
        self.layer_types = tuple(sorted(set(config.layer_types)))
        self.ropes = {kind: ropes[kind] for kind in self.layer_types}
        for kind, rope in self.ropes.items():
            head_dim = config.of_layer(config.layer_types.index(kind)).head_dim
            self.register_buffer(f"{kind}_inv_freq", inverse_frequencies(rope, head_dim), persistent=False)
        self.tap_dims = {"in[x]": WHOLE, "in[position_ids]": TOKENS, "out[0]": ANGLES, "out[1]": ANGLES}

    def forward(self, x: Tensor, position_ids: Tensor, layer_type: str, lengths: Tensor | None = None) -> Rotation:
        """Return cos and sin [tokens, head_dim] for positions [tokens], in the dtype of ``x`` or float32."""
        rope, inv_freq = self.ropes[layer_type], self.get_buffer(f"{layer_type}_inv_freq")
        dtype = torch.float32 if self.is_float32 else x.dtype
        return cos_sin(rope, inv_freq, attention_scaling(rope), dtype, position_ids, lengths)


class Gemma3Decoder(Decoder):
    """Decoder with separate rotary embeddings for sliding and global layers."""

    rotary_class = Gemma3RotaryEmbedding

    def make_rotary(self, config: ModelConfig) -> Any:
        """Create ``rotary_emb`` for all layer types."""
        self.layer_types = config.layer_types
        return self.rotary_class(config)

    def rotations(self, hidden_states: Tensor, position_ids: Tensor, cache: StepCache) -> list[Rotation]:
        """Return the cosines and sines of each layer, computed once per layer type."""
        kinds = sorted(set(self.layer_types))
        options = {"lengths": cache.row_lengths} if self.is_dynamic else {}
        by_type = {kind: self.rotary_emb(hidden_states, position_ids, kind, **options) for kind in kinds}
        return [by_type[kind] for kind in self.layer_types]


class Gemma2ForCausalLM(CausalLM):
    """Gemma 2, arXiv:2408.00118: soft-capped attention scores and logits; transformers' `modeling_gemma2.py`."""

    layer_class = GemmaDecoderLayer


class Gemma3ForCausalLM(CausalLM):
    """Gemma 3 text, arXiv:2503.19786: q/k norm, two rotary bases; transformers' `modeling_gemma3.py`."""

    decoder_class = Gemma3Decoder
    layer_class = GemmaDecoderLayer
