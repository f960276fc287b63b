"""Command R and R7B with Hugging Face's module names: parallel attention and MLP, LayerNorm without bias."""

import torch
from torch import Tensor

from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.kv_cache.step_cache import StepCache
from tapscope.engine.layers.norm import CohereLayerNorm, add_norm
from tapscope.engine.layers.rope import RotaryEmbedding, rotate_pairs
from tapscope.engine.models.attention import SelfAttention
from tapscope.engine.models.decoder import CausalLM, Decoder, DecoderLayer, Rotation
from tapscope.engine.models.residual_stream import OnSum


class CohereRotaryEmbedding(RotaryEmbedding):
    """Cosines and sines for rotating adjacent features; counterpart of transformers' CohereRotaryEmbedding."""

    def forward(self, x: Tensor, position_ids: Tensor, lengths: Tensor | None = None) -> Rotation:
        """Return cos and sin [tokens, head_dim] for positions [tokens]; adjacent features have the same frequency."""
        cos, sin = super().forward(x, position_ids, lengths)
        half = cos.shape[-1] // 2
        return cos[:, :half].repeat_interleave(2, dim=-1), sin[:, :half].repeat_interleave(2, dim=-1)


class CohereAttention(SelfAttention):
    """Attention that rotates pairs of adjacent features in float32.

    Counterpart of transformers' CohereAttention and Cohere2Attention.
    """

    has_kernel = False

    def rotate(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate pairs of adjacent features in float32."""
        return rotate_pairs(states.float(), cos[:, ::2], sin[:, ::2]).to(states.dtype)


class CohereDecoderLayer(DecoderLayer):
    """Layer whose attention and MLP read the same norm's output; counterpart of transformers' CohereDecoderLayer."""

    attention_class = CohereAttention
    norm_class = CohereLayerNorm

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, layer, tp, dtype)
        del self.post_attention_layernorm

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
        return self.mlp(normalised), residual + self.mix(normalised, past_key_values, position_embeddings)


class CohereDecoder(Decoder):
    """Counterpart of transformers' CohereModel."""

    rotary_class = CohereRotaryEmbedding


class CohereForCausalLM(CausalLM):
    """Command R; transformers' `modeling_cohere.py`."""

    decoder_class = CohereDecoder
    layer_class = CohereDecoderLayer


class Cohere2ForCausalLM(CausalLM):
    """Command R7B and A, arXiv:2504.00698: sliding windows, and full layers without rope; `modeling_cohere2.py`."""

    decoder_class = CohereDecoder
    layer_class = CohereDecoderLayer
