"""CacheLayout: shape and size of one cached position."""

from dataclasses import dataclass

from tapscope.engine.kv_cache.kv_format import KVFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """What a model caches per position on this rank; the same in all layers."""

    num_layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    """0 where values are derived from the cached keys (:attr:`AttentionSpec.value_dim`)."""

    exact_dim: int = 0
    """The last features of a key that stay in the type the model computes in, whatever the cache is stored in: the
    rotated part of a latent, as DeepSeek's own kernels (FlashMLA) have it."""

    def position_bytes(self, kv_format: KVFormat) -> int:
        """Bytes of one position in all layers."""
        scaled = (self.key_dim - self.exact_dim + self.value_dim) * kv_format.stored.itemsize
        return self.num_layers * self.kv_heads * (scaled + self.exact_dim * kv_format.computed.itemsize)
