"""CacheLayout: shape and size of one cached position."""

from dataclasses import dataclass

from tapscope.engine.kv_cache.kv_format import KVFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """Heads and features that this rank caches per position; the same in all layers."""

    num_layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    """0 if values are derived from the cached keys (:attr:`AttentionSpec.value_dim`)."""

    exact_dim: int = 0
    """Number of trailing key features that are always stored in the compute dtype: the rotated part of a latent, as in
    DeepSeek's FlashMLA."""

    def position_bytes(self, kv_format: KVFormat) -> int:
        """Bytes of one position in all layers."""
        scaled = (self.key_dim - self.exact_dim + self.value_dim) * kv_format.stored.itemsize
        return self.num_layers * self.kv_heads * (scaled + self.exact_dim * kv_format.computed.itemsize)
