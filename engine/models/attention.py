"""SelfAttention: projections, rotary embedding and the attention core under Hugging Face's names."""

from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from tapscope.engine.distributed.sharding import HeadShards
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.kv_cache.step_cache import StepCache
from tapscope.engine.layers.fused import fused_for
from tapscope.engine.layers.linear import FusedLinear, PackedLinear, RowParallelLinear
from tapscope.engine.layers.norm import HEADS, RMSNorm
from tapscope.engine.layers.paged_attention import Attention, AttentionSpec, attend
from tapscope.engine.layers.probe import ANGLE_INPUTS, WHOLE, Probe, is_watched, notify
from tapscope.engine.layers.rope import rotate, rotate_both


class SelfAttention(nn.Module):
    """Grouped-query attention, arXiv:2305.13245, with this rank's share of the heads.

    With ``config.qk_norm`` each head's query and key pass through ``q_norm`` and ``k_norm`` before they are rotated.
    """

    linear_class: ClassVar[type[FusedLinear]] = FusedLinear
    """Class of ``qkv_proj``."""
    has_fused_rope: ClassVar[bool] = True
    """Whether the fused kernel rotates as :meth:`rotate` does."""

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
        """Factor of the step's queries [tokens], set by the decoder if ``scales_queries``."""
        self._has_fused_rope = (
            self.has_fused_rope and self.has_rope and config.rope.rotary_dim(config.head_dim) == config.head_dim
        )
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
        norms = [self.q_norm, self.k_norm] if config.qk_norm else []
        self._hidden_by_fusion = (self.q_proj, self.k_proj, self.v_proj, self.attn, *norms)
        self.tap_dims = {"in[hidden_states]": WHOLE, "out[0]": WHOLE} | ANGLE_INPUTS

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any, past_key_values: StepCache
    ) -> tuple[Tensor, None]:
        """[tokens, hidden] -> ([tokens, hidden], None); transformers returns attention weights second.

        ``position_embeddings``: cosines and sines, None in models without rotary embedding.
        """
        projected = self.qkv_proj(hidden_states)
        if isinstance(self.qkv_proj, PackedLinear):
            projected = self.qkv_proj.split(projected)
        query, key, value = projected
        core = self._fused_core(hidden_states, query, key, value, position_embeddings, past_key_values)
        if core is not None:
            return self.o_proj(core), None
        query, key = self._heads(self.q_proj(query)), self._heads(self.k_proj(key))
        value = self._heads(self.v_proj(value))
        if self.qk_norm:
            query, key = self.q_norm(query), self.k_norm(key)
        if self.has_rope and position_embeddings is not None:
            cos, sin = position_embeddings
            query, key = rotate_both(query, key, lambda states: self.rotate(states, cos, sin))
        query = self.scaled(query)
        core = self.attn(query, self._used(key), self._used(value), past_key_values)
        return self.o_proj(core), None

    def scaled(self, query: Tensor) -> Tensor:
        """Queries [tokens, heads, dim] times ``query_scale``."""
        return query if self.query_scale is None else (query * self.query_scale[:, None, None]).to(query.dtype)

    def rotate(self, states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary embedding of [tokens, heads, dim] by the outputs of ``rotary_emb``."""
        return rotate(states, cos, sin)

    def _fused_core(
        self, hidden_states: Tensor, query: Tensor, key: Tensor, value: Tensor, rotation: Any, cache: StepCache
    ) -> Tensor | None:
        """Output of ``attn``, with one kernel for q/k norm, rope and the cache write; None if it does not apply."""
        pools = cache.pools(self.attn.layer)
        fused = fused_for(hidden_states, *self._hidden_by_fusion)
        if fused is None or pools is None or not (self._uses_all_heads and self._has_fused_rope) or self.scales_queries:
            return None
        rope, norm = fused.rope, None
        for probe, projected in ((self.q_proj, query), (self.k_proj, key), (self.v_proj, value)):
            notify(probe, projected, projected)
        query, key, value = (self._heads(part) for part in (query, key, value))
        if self.qk_norm and (is_watched(self.q_norm) or is_watched(self.k_norm)):
            query, key = self.q_norm(query), self.k_norm(key)
        elif self.qk_norm:
            norm = rope.HeadNorm(self.q_norm.weight, self.k_norm.weight, self.q_norm.eps, self.q_norm.is_gemma)
        pool = rope.CachePool(*pools, cache.scales(self.attn.layer))
        query, key = rope.rotate_and_store(
            query, key, value, rotation, cache.slots_of(self.attn.layer), pool, norm=norm
        )
        core = attend(query, self.attn.layer, cache, self.attn.spec).flatten(1)
        notify(self.attn, core, query, key, value, cache)
        return core

    def _used(self, tensor: Tensor) -> Tensor:
        start, end = self.heads.used
        return tensor[:, start:end] if self.heads.keys.is_whole and end - start < tensor.shape[1] else tensor

    def _heads(self, tensor: Tensor) -> Tensor:
        return tensor.view(len(tensor), -1, self.head_dim)
