"""DeepSeek-V3.2 and GLM-5 with Hugging Face's module names: sparse latent attention to indexer-selected keys (DSA)."""

import torch
from torch import Tensor

from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.kv_cache.cache_layout import CacheEntry, CacheLayout, IndexKeys
from tapscope.engine.kv_cache.step_cache import StepCache
from tapscope.engine.layers.indexer import Chosen, Indexer
from tapscope.engine.layers.mla import LatentAttention
from tapscope.engine.layers.probe import is_watched
from tapscope.engine.models.deepseek import (
    AttentionInputs,
    DeepseekV3Attention,
    DeepseekV3DecoderLayer,
    LatentCausalLM,
)


class DeepseekV32Attention(DeepseekV3Attention):
    """Counterpart of transformers' DeepseekV32Attention and GlmMoeDsaAttention.

    Layers without an indexer, as in GLM-5, reuse the keys selected by the previous layer.
    """

    def __init__(self, config: ModelConfig, layer: int, tp: TensorParallel, dtype: torch.dtype) -> None:
        super().__init__(config, layer, tp, dtype)
        assert config.index is not None, "sparse attention needs ModelConfig.index"
        self.indexer = None if layer in config.index.shared_layers else Indexer(config, layer, dtype)

    def _attend(
        self, query: Tensor, latent: Tensor, cached: Tensor, cache: StepCache, inputs: AttentionInputs
    ) -> Tensor:
        """Cache latents and index keys, select positions, and attend to them.

        Maps queries [tokens, heads, nope + rope] to [tokens, heads, value].
        """
        hidden_states, residual, rotation = inputs
        assert residual is not None, "the indexer reads the queries' latent"
        no_values = cached.new_empty(len(cached), 1, 0)
        cache.write(self.layer, cached.unsqueeze(1), no_values)
        if self.indexer is not None:
            cache.write(self.indexer.entry, self.indexer.keys(hidden_states, rotation).unsqueeze(1), no_values)
            cache.chosen_keys = self.indexer(hidden_states, residual, rotation, cache)
        chosen: Chosen = cache.chosen_keys
        if chosen.is_all:
            return self._attend_all(query, latent, cache)
        kv = self._expand(latent, cache) if cache.max_request_rows > 1 or is_watched(self.kv_b_proj) else None
        core = LatentAttention(self.layer, self.mla, self.scale, self.kv_b_proj.weight)
        return core.sparse(query, kv, cache, chosen)


class DeepseekV32DecoderLayer(DeepseekV3DecoderLayer):
    """Counterpart of transformers' DeepseekV32DecoderLayer."""

    attention_class = DeepseekV32Attention


class DeepseekV32ForCausalLM(LatentCausalLM):
    """DeepSeek-V3.2, arXiv:2512.02556; transformers' `modeling_deepseek_v32.py`."""

    layer_class = DeepseekV32DecoderLayer

    def cache_layouts(self, layer: int) -> dict[CacheEntry, CacheLayout]:
        """Return the layouts of the latent and, in layers with an indexer, the index key, replicated on every rank.

        Index keys keep the compute dtype regardless of the cache dtype, because rounding would change the selected
        keys.
        """
        assert self.config.index is not None
        layouts = super().cache_layouts(layer)
        if layer not in self.config.index.shared_layers:
            size = self.config.index.head_dim
            layouts[IndexKeys(layer)] = CacheLayout(kv_heads=1, key_dim=size, value_dim=0, exact_dim=size)
        return layouts


class GlmMoeDsaForCausalLM(DeepseekV32ForCausalLM):
    """GLM-5; transformers' `modeling_glm_moe_dsa.py`."""
