"""CacheLayout, CacheEntry and CacheGroup: shape, size and address of the values that layers cache per position."""

from collections.abc import Mapping
from dataclasses import dataclass

from tapscope.engine.kv_cache.kv_format import KVFormat


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """Number of heads and features that one layer caches per position on this rank."""

    kv_heads: int
    key_dim: int
    value_dim: int
    """0 if values are derived from the cached keys (:attr:`AttentionSpec.value_dim`)."""

    exact_dim: int = 0
    """Number of trailing key features that are always stored in the compute dtype: the rotated part of a latent, as in
    DeepSeek's FlashMLA."""

    def position_bytes(self, kv_format: KVFormat) -> int:
        """Return the number of bytes stored per position."""
        scaled = (self.key_dim - self.exact_dim + self.value_dim) * kv_format.stored.itemsize
        return self.kv_heads * (scaled + self.exact_dim * kv_format.computed.itemsize)


@dataclass(frozen=True, slots=True)
class IndexKeys:
    """Address of the keys of a layer's indexer (sparse attention)."""

    layer: int


CacheEntry = int | IndexKeys
"""Address of a cache entry: a layer number for the layer's keys and values, or :class:`IndexKeys`."""


@dataclass(frozen=True, slots=True)
class CacheGroup:
    """Entries that share page tables, each with its own layout, and their number of pages.

    Index keys are in the group of their layer: they are read as far back as the layer's latents and live as long.
    """

    layouts: Mapping[CacheEntry, CacheLayout]
    num_pages: int
