"""DeepSeek-V2 and V3 with Hugging Face's module names: multi-head latent attention and mixture-of-experts layers."""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from tapscope.engine.distributed.sharding import Shard
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.kv_cache.cache_layout import CacheLayout
from tapscope.engine.kv_cache.step_cache import StepCache
from tapscope.engine.layers.linear import ColumnParallelLinear, ReplicatedLinear, RowParallelLinear
from tapscope.engine.layers.mla import LatentAttention
from tapscope.engine.layers.norm import RMSNorm
from tapscope.engine.layers.probe import ANGLE_INPUTS, ANGLES, SHARD, TOKENS, WHOLE, Probe, is_watched
from tapscope.engine.layers.rope import (
    attention_scaling,
    cos_sin,
    inverse_frequencies,
    rotate,
    rotate_both,
    rotate_complex,
    rotate_to_halves,
    yarn_mscale,
)
from tapscope.engine.layers.routers import DeepseekV2Router, DeepseekV3Router
from tapscope.engine.models.decoder import Decoder
from tapscope.engine.models.moe import MoeCausalLM, MoeDecoderLayer

_NORM_EPS = 1e-6  # for norms of latents, for which transformers ignores rms_norm_eps


class AttentionInputs(NamedTuple):
    """The inputs of an indexer."""

    hidden_states: Tensor
    """[tokens, hidden]."""
    residual: Tensor | None
    """Normalized latent of the queries, [tokens, q_lora_rank]; None if queries are projected directly."""
    position_embeddings: Any


class DeepseekAttention(nn.Module):
    """Multi-head latent attention, arXiv:2405.04434, over this rank's shard of the heads.

    Every submodule of transformers' attention exists and is called; ``kv_b_proj`` is called on the step's own rows
    only, and in a step that absorbs it (:mod:`tapscope.engine.layers.mla`) only if it has hooks. Additional probes:
    `query` (rotated queries), `latent` (cached latents), `attn` (output of the attention core).
    """

    absorb = True
    """Whether decode rows attend to latents; if False, every step expands keys and values of all positions."""

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        assert config.mla is not None, "latent attention needs ModelConfig.mla"
        self.layer, self.mla = layer, config.mla
        self.scale = self.mla.head_dim**-0.5 * yarn_mscale(config.rope.factor, config.rope.mscale_all_dim) ** 2
        self._make_query(config, tp, dtype)
        rank, heads = self.mla.kv_lora_rank, Shard.of(config.num_heads, tp)
        self.kv_a_proj_with_mqa = ReplicatedLinear(config.hidden_size, rank + self.mla.rope_dim, config.qkv_bias, dtype)
        self.kv_a_layernorm = RMSNorm(rank, _NORM_EPS, dtype)
        keys_values = heads.scaled(self.mla.nope_dim + self.mla.value_dim)
        self.kv_b_proj = ColumnParallelLinear(rank, keys_values, False, dtype)
        # The absorbed form applies this weight to queries and outputs, without calling the module.
        self.kv_b_proj.may_stay_quantized = self.kv_b_proj.may_have_adapters = False
        self.query, self.latent, self.attn = Probe("t num_heads[tp] d"), Probe(WHOLE), Probe(SHARD)
        self.o_proj = RowParallelLinear(heads.scaled(self.mla.value_dim), config.hidden_size, config.o_bias, tp, dtype)
        self.tap_dims = {"in[hidden_states]": WHOLE, "out[0]": WHOLE} | ANGLE_INPUTS

    def _make_query(self, config: ModelConfig, tp: TensorParallel, dtype: torch.dtype) -> None:
        rank, features = self.mla.q_lora_rank, Shard.of(config.num_heads, tp).scaled(self.mla.head_dim)
        if rank is None:
            self.q_proj = ColumnParallelLinear(config.hidden_size, features, False, dtype)
            return
        self.q_a_proj = ReplicatedLinear(config.hidden_size, rank, config.qkv_bias, dtype)
        self.q_a_layernorm = RMSNorm(rank, _NORM_EPS, dtype)
        self.q_b_proj = ColumnParallelLinear(rank, features, False, dtype)

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any, past_key_values: StepCache
    ) -> tuple[Tensor, None]:
        """[tokens, hidden] -> ([tokens, hidden], None); transformers returns attention weights instead of None."""
        mla = self.mla
        query, residual = self._project_query(hidden_states)
        query, rotated_query = torch.split(query, [mla.nope_dim, mla.rope_dim], dim=-1)
        compressed = self.kv_a_proj_with_mqa(hidden_states)
        latent, rotated_key = torch.split(compressed, [mla.kv_lora_rank, mla.rope_dim], dim=-1)
        latent = self.kv_a_layernorm(latent)
        rotation = lambda states: self.rotate(states, position_embeddings)  # noqa: E731
        rotated_query, rotated_key = rotate_both(rotated_query, rotated_key.unsqueeze(1), rotation)
        query = self.query(torch.cat((query, rotated_query), dim=-1))
        cached = self.latent(torch.cat((latent, rotated_key.squeeze(1)), dim=-1))
        inputs = AttentionInputs(hidden_states, residual, position_embeddings)
        output = self._attend(query, latent, cached, past_key_values, inputs)
        return self.o_proj(self.attn(output.flatten(1))), None

    def rotate(self, states: Tensor, position_embeddings: Any) -> Tensor:
        """Apply the rotary embedding to ``states`` [tokens, heads, rope], given the output of ``rotary_emb``."""
        raise NotImplementedError

    def _project_query(self, hidden_states: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return queries [tokens, heads, nope + rope] and their normalized latent, None without ``q_lora_rank``."""
        residual = None
        if self.mla.q_lora_rank is None:
            query = self.q_proj(hidden_states)
        else:
            residual = self.q_a_layernorm(self.q_a_proj(hidden_states))
            query = self.q_b_proj(residual)
        return query.view(len(query), -1, self.mla.head_dim), residual

    def _attend(
        self, query: Tensor, latent: Tensor, cached: Tensor, cache: StepCache, inputs: AttentionInputs
    ) -> Tensor:
        """Cache the step's latents and attend; map queries [tokens, heads, nope + rope] to [tokens, heads, value]."""
        cache.write(self.layer, cached.unsqueeze(1), cached.new_empty(len(cached), 1, 0))
        return self._attend_all(query, latent, cache)

    def _attend_all(self, query: Tensor, latent: Tensor, cache: StepCache) -> Tensor:
        """Attend to all positions up to each row."""
        core = LatentAttention(self.layer, self.mla, self.scale, self.kv_b_proj.weight)
        if not self.absorb:
            return core.expanded(query, self._expand(latent, cache), cache)
        if cache.max_request_rows > 1:
            return core.mixed(query, self._expand(latent, cache), cache)
        if is_watched(self.kv_b_proj):
            self._expand(latent, cache)
        return core.absorbed(query, cache)

    def _expand(self, latent: Tensor, cache: StepCache) -> Tensor:
        """Return keys and values of the step's rows, [tokens, heads * (nope + value)], from the latents as cached."""
        if cache.is_rounded:
            latent = cache.written(self.layer)[0][:, 0, : self.mla.kv_lora_rank]
        expanded: Tensor = self.kv_b_proj(latent)
        return expanded


class DeepseekV3Attention(DeepseekAttention):
    """Counterpart of transformers' DeepseekV3Attention."""

    def rotate(self, states: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> Tensor:
        """Rotate by cosines and sines [tokens, rope].

        As in transformers, interleaved pairs are returned as two halves.
        """
        return (rotate_to_halves if self.mla.is_interleaved else rotate)(states, *position_embeddings)


class DeepseekV3DecoderLayer(MoeDecoderLayer):
    """Counterpart of transformers' DeepseekV3DecoderLayer."""

    attention_class = DeepseekV3Attention
    router = DeepseekV3Router


class LatentCausalLM(MoeCausalLM):
    """A causal LM with latent attention."""

    def cache_layout(self, layer: int) -> CacheLayout:
        """Return the layout of a latent per position, replicated on every rank; values are derived from it."""
        assert self.config.mla is not None
        mla = self.config.mla
        width = mla.kv_lora_rank + mla.rope_dim
        return CacheLayout(kv_heads=1, key_dim=width, value_dim=0, exact_dim=mla.rope_dim)


class DeepseekV3ForCausalLM(LatentCausalLM):
    """DeepSeek-V3 and R1, arXiv:2412.19437; transformers' `modeling_deepseek_v3.py`."""

    layer_class = DeepseekV3DecoderLayer


class DeepseekV2Rotary(nn.Module):
    """Rotations as complex numbers of magnitude ``attention_scaling``.

    Counterpart of transformers' DeepseekV2RotaryEmbedding.
    """

    inv_freq: Tensor

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.rope = config.rope
        self.register_buffer("inv_freq", inverse_frequencies(config.rope, config.head_dim), persistent=False)
        self.attention_scaling = attention_scaling(config.rope)
        self.tap_dims = {"in[x]": WHOLE, "in[position_ids]": TOKENS, "out": ANGLES}

    def forward(self, x: Tensor, position_ids: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Return rotations [tokens, rope / 2] complex64 for positions [tokens]; ``lengths`` as in RotaryEmbedding."""
        wide = torch.float32
        cos, sin = cos_sin(self.rope, self.inv_freq, self.attention_scaling, wide, position_ids, lengths)
        return torch.complex(cos, sin)[:, : len(self.inv_freq)]


class DeepseekV2Decoder(Decoder):
    """Counterpart of transformers' DeepseekV2Model."""

    def make_rotary(self, config: ModelConfig) -> nn.Module:
        """Create ``rotary_emb`` with complex rotations."""
        return DeepseekV2Rotary(config)


class DeepseekV2Attention(DeepseekAttention):
    """Counterpart of transformers' DeepseekV2Attention: rotates interleaved pairs in place, in float32."""

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, layer, tp, dtype)
        self.tap_dims |= {"in[position_embeddings]": ANGLES}

    def rotate(self, states: Tensor, position_embeddings: Tensor) -> Tensor:
        """Rotate by complex numbers [tokens, rope / 2]."""
        return rotate_complex(states, position_embeddings)


class DeepseekV2DecoderLayer(MoeDecoderLayer):
    """Counterpart of transformers' DeepseekV2DecoderLayer."""

    attention_class = DeepseekV2Attention
    router = DeepseekV2Router

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, layer, tp, dtype)
        self.tap_dims |= {"in[position_embeddings]": ANGLES}


class DeepseekV2ForCausalLM(LatentCausalLM):
    """DeepSeek-V2, arXiv:2405.04434; transformers' `modeling_deepseek_v2.py`."""

    layer_class = DeepseekV2DecoderLayer
    decoder_class = DeepseekV2Decoder
