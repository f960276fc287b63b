"""KV cache: a pool of pages on the device."""

import torch
from torch import Tensor

from tapscope.engine.kv_cache.cache_layout import CacheLayout
from tapscope.engine.kv_cache.kv_format import KVFormat
from tapscope.engine.kv_cache.kv_pool import KVPool


class KVCache:
    """Keys and values of every layer on this rank, each [layers, pages + 1, page_size, kv_heads, dim].

    The page after the last is the *dummy page*: padding rows write to it, and gathers longer than a request read from
    it. The pool is zero-initialised, so that unwritten positions are never NaN. Keys and values are written and read in
    ``kv_format.computed``. Attention always reads stored values, also those of the step's own rows, so that a request's
    values do not depend on how its prompt is chunked.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_pages: int,
        page_size: int,
        kv_format: KVFormat,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (layout.num_layers, num_pages + 1, page_size, layout.kv_heads)
        self.layout, self.kv_format = layout, kv_format
        self.num_pages = num_pages
        self.page_size = page_size
        exact_dim = 0 if kv_format.is_plain else layout.exact_dim
        self._keys = KVPool((*shape, layout.key_dim - exact_dim), kv_format, device)
        self._values = KVPool((*shape, layout.value_dim), kv_format, device)
        plain = KVFormat(kv_format.computed, kv_format.computed)
        self._exact = KVPool((*shape, exact_dim), plain, device) if exact_dim else None

    @property
    def device(self) -> torch.device:
        """Device of the pool."""
        return self.keys.device

    @property
    def keys(self) -> Tensor:
        """Stored keys, without exact features, which are stored separately."""
        return self._keys.tensor

    @property
    def values(self) -> Tensor:
        """Stored values."""
        return self._values.tensor

    @property
    def gathered_bytes(self) -> int:
        """Bytes of one decoded position in one layer."""
        widths = self.layout.kv_heads * (self.layout.key_dim + self.layout.value_dim)
        return widths * self.kv_format.computed.itemsize

    @property
    def is_scaled(self) -> bool:
        """Whether any scale is not 1."""
        return self._keys.is_scaled or self._values.is_scaled

    def pools(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """Stored keys and values of ``layer`` by page; None if some features are stored separately."""
        return None if self._exact is not None else (self._keys.layers[layer], self._values.layers[layer])

    def scales(self, layer: int) -> tuple[float, float]:
        """Scales of the keys and values of ``layer``."""
        return self._keys.scale(layer), self._values.scale(layer)

    def set_scales(self, layer: int, key: float | None, value: float | None) -> None:
        """Set the scales of ``layer``; None keeps the present one. Positions cached by earlier steps become invalid."""
        for pool, scale in ((self._keys, key), (self._values, value)):
            if scale is not None:
                pool.set_scale(layer, scale)

    def pages(self, layer: int, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of whole pages, [pages * page_size, kv_heads, dim] each; valid until the next gather."""
        keys, values = self._keys.pages(layer, numbers), self._values.pages(layer, numbers)
        if self._exact is not None:
            keys = torch.cat((keys, self._exact.pages(layer, numbers)), dim=-1)
        return keys, values

    def positions(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at slots [n], [n, kv_heads, dim] each; valid until the next gather."""
        keys, values = self._keys.positions(layer, slots), self._values.positions(layer, slots)
        if self._exact is not None:
            keys = torch.cat((keys, self._exact.positions(layer, slots)), dim=-1)
        return keys, values

    def write(self, layer: int, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store [n, kv_heads, dim] at slots [n]."""
        if self._exact is not None:
            self._exact.write(layer, slots, key[..., -self.layout.exact_dim :])
            key = key[..., : -self.layout.exact_dim]
        self._keys.write(layer, slots, key)
        self._values.write(layer, slots, value)
