"""SelfAttention: projections, rotary embedding and attention core, with Hugging Face's module names."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tapscope.engine.distributed.sharding import HeadShards
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.kv_cache.step_cache import StepCache
from tapscope.engine.layers.fused import fused_for
from tapscope.engine.layers.linear import FusedLinear, PackedLinear, RowParallelLinear, quantizer_of
from tapscope.engine.layers.norm import HEADS, RMSNorm
from tapscope.engine.layers.paged_attention import Attention, AttentionSpec, attend, attend_and_quantize
from tapscope.engine.layers.probe import ANGLE_INPUTS, WHOLE, Probe, is_watched, notify
from tapscope.engine.layers.rope import rotate, rotate_both


class SelfAttention(nn.Module):
    """Grouped-query attention, arXiv:2305.13245, over this rank's shard of the heads.

    With ``config.qk_norm``, queries and keys are normalized per head by ``q_norm`` and ``k_norm`` before the rotary
    embedding. A model family overrides the methods in which it differs: :meth:`project`, :meth:`norm_and_rotate` or
    :meth:`rotate`.
    """

    linear_class: ClassVar[type[FusedLinear]] = FusedLinear
    """Class of ``qkv_proj``."""
    has_kernel: ClassVar[bool] = True
    """Whether the fused kernel implements this class's :meth:`norm_and_rotate`."""
    norm_class: ClassVar[type[RMSNorm]] = RMSNorm
    """Class of ``q_norm`` and ``k_norm``."""

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__()
        config = config.of_layer(layer)
        self.head_dim = config.head_dim
        self.heads = HeadShards.of(config.num_heads, config.num_kv_heads, tp)
        width, kv_width = self.heads.queries.scaled(config.head_dim), self.heads.keys.scaled(config.head_dim)
        parts = {"q_proj": width, "k_proj": kv_width, "v_proj": kv_width}
        self.qkv_proj = self.linear_class(config.hidden_size, parts, config.qkv_bias, dtype)
        self.q_proj, self.k_proj, self.v_proj = (Probe(part.dims("h")) for part in parts.values())
        self.qk_norm = config.qk_norm
        self.has_rope = layer not in config.no_rope_layers
        self.scales_queries = config.temperature_floor is not None and not (config.no_rope_layers and self.has_rope)
        self.query_scale: Tensor | None = None
        """Per-token factors of the queries in this step, [tokens]; set by the decoder if ``scales_queries``."""
        is_rotated_whole = self.has_rope and config.rope.rotary_dim(config.head_dim) == config.head_dim
        self._may_fuse = self.has_kernel and is_rotated_whole and not self.scales_queries
        if config.qk_norm:
            self.q_norm = self.norm_class(config.head_dim, config.rms_norm_eps, dtype, HEADS)
            self.k_norm = self.norm_class(
                config.head_dim, config.rms_norm_eps, dtype, self.heads.keys.dims("num_heads", "d")
            )
        spec = AttentionSpec(
            scale=config.attention_scale,
            window=None if config.chunk(layer) else config.window(layer),
            chunk=config.chunk(layer),
            softcap=config.attention_softcap,
        )
        self.attn = Attention(layer, spec, self.heads)
        self.o_proj = RowParallelLinear(width, config.hidden_size, config.o_bias, tp, dtype)
        first, end = self.heads.used
        self._uses_all_heads = not self.heads.keys.is_whole or (end - first) * self.head_dim == kv_width.count
        self._hidden_by_fusion = (self.attn, self.q_norm, self.k_norm) if config.qk_norm else (self.attn,)
        self.tap_dims = {"in[hidden_states]": WHOLE, "out[0]": WHOLE} | ANGLE_INPUTS

    @property
    def first_linear(self) -> FusedLinear:
        """The linear layer that consumes the input."""
        return self.qkv_proj

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any, past_key_values: StepCache
    ) -> tuple[Tensor, None]:
        """[tokens, hidden] -> ([tokens, hidden], None); transformers returns attention weights instead of None.

        ``position_embeddings``: cosines and sines; None for models without rotary embedding.
        """
        query, key, value = self.project(hidden_states)
        return self.o_proj(self.core(query, key, value, position_embeddings, past_key_values)), None

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project [tokens, hidden] to query, key and value, [tokens, heads, dim] each."""
        projected = self.qkv_proj(hidden_states)
        if isinstance(self.qkv_proj, PackedLinear):
            projected = self.qkv_proj.split(projected)
        query, key, value = projected
        return self._heads(self.q_proj(query)), self._heads(self.k_proj(key)), self._heads(self.v_proj(value))

    def core(self, query: Tensor, key: Tensor, value: Tensor, rotation: Any, cache: StepCache) -> Tensor:
        """Store keys and values in the cache and attend; return the output of ``attn`` [tokens, heads * dim].

        ``query``, ``key`` and ``value`` are the outputs of :meth:`project`.
        """
        output = self._fused_core(query, key, value, rotation, cache)
        if output is None:
            query, key = self.norm_and_rotate(query, key, rotation)
            output = self.attn(self.scaled(query), self._used(key), self._used(value), cache)
        return output

    def norm_and_rotate(self, query: Tensor, key: Tensor, rotation: Any) -> tuple[Tensor, Tensor]:
        """Apply norms, then the rotary embedding, to query and key [tokens, heads, dim], if the layer has them."""
        if self.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        if not self.has_rope or rotation is None:
            return query, key
        cos, sin = rotation
        return rotate_both(query, key, lambda states: self.rotate(states, cos, sin))

    def rotate(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply the rotary embedding to ``states`` [tokens, heads, dim], given the outputs of ``rotary_emb``."""
        return rotate(states, cos, sin)

    def scaled(self, query: Tensor) -> Tensor:
        """Return ``query`` [tokens, heads, dim] multiplied by ``query_scale``, if set."""
        return query if self.query_scale is None else (query * self.query_scale[:, None, None]).to(query.dtype)

    def _fused_core(self, query: Tensor, key: Tensor, value: Tensor, rotation: Any, cache: StepCache) -> Tensor | None:
        """Compute :meth:`core` with one kernel for q/k norm, rope and cache write; return None if not applicable."""
        pools = cache.pools(self.attn.layer)
        fused = fused_for(query, *self._hidden_by_fusion)
        if fused is None or pools is None or not (self._uses_all_heads and self._may_fuse):
            return None
        rope, norm = fused.rope, None
        if self.qk_norm and (is_watched(self.q_norm) or is_watched(self.k_norm)):
            query, key = self.q_norm(query), self.k_norm(key)
        elif self.qk_norm:
            norm = rope.HeadNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, self.q_norm.is_gemma)
        pool = rope.CachePool(*pools, cache.scales(self.attn.layer))
        query, key = rope.rotate_and_store(
            query, key, value, rotation, cache.slots_of(self.attn.layer), pool, norm=norm
        )
        where, quantizer = (query, self.attn.layer, cache, self.attn.spec), quantizer_of(self.o_proj)
        core = attend(*where).flatten(1) if quantizer is None else attend_and_quantize(*where, quantizer)
        notify(self.attn, core, query, key, value, cache)
        return core

    def _used(self, tensor: Tensor) -> Tensor:
        start, end = self.heads.used
        return tensor[:, start:end] if self.heads.keys.is_whole and end - start < tensor.shape[1] else tensor

    def _heads(self, tensor: Tensor) -> Tensor:
        return tensor.view(len(tensor), -1, self.head_dim)
