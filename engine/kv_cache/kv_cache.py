"""KVCache: pools of KV cache pages on the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tapscope.engine.kv_cache.cache_layout import CacheEntry, CacheGroup, CacheLayout
from tapscope.engine.kv_cache.kv_format import KVFormat
from tapscope.engine.kv_cache.kv_pool import KVPool
from tapscope.engine.kv_cache.state_cache import StateCache


class _LayerPool:
    """Keys and values of all entries with one layout, each [entries, pages + 1, page_size, kv_heads, dim]."""

    def __init__(
        self,
        layout: CacheLayout,
        num_entries: int,
        num_pages: int,
        page_size: int,
        kv_format: KVFormat,
        device: torch.device,
    ) -> None:
        self.layout = layout
        shape = (num_entries, num_pages + 1, page_size, layout.kv_heads)
        exact_dim = 0 if kv_format.is_plain else layout.exact_dim
        self.keys = KVPool((*shape, layout.key_dim - exact_dim), kv_format, device)
        self.values = KVPool((*shape, layout.value_dim), kv_format, device)
        plain = KVFormat(kv_format.computed, kv_format.computed)
        self.exact = KVPool((*shape, exact_dim), plain, device) if exact_dim else None
        self.parts = [part for part in (self.keys, self.values, self.exact) if part is not None]


@dataclass(frozen=True, slots=True)
class _Place:
    """Location of an entry's keys and values."""

    group: int
    pool: _LayerPool
    number: int
    """Index of the entry in ``pool``."""


class KVCache:
    """Keys and values of every layer on this rank, in pages.

    Each group of entries has its own pages and page tables, and one pool per distinct layout. The page after the last
    page of a pool is its *dummy page*: padding rows write to it, and gathers longer than a request read from it. The
    pools are zero-initialized, so that unwritten positions are never NaN.

    Keys and values are written and read in ``kv_format.computed``. Attention always reads stored values, also for the
    step's own rows, so that a request's values do not depend on how its prompt is chunked.
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        page_size: int,
        kv_format: KVFormat,
        device: torch.device | str = "cpu",
    ) -> None:
        """``groups``: cache groups, the primary group first."""
        self.kv_format, self.device, self.page_size = kv_format, torch.device(device), page_size
        self.states: StateCache | None = None
        """Recurrent states of layers that cache no keys; None in models without recurrent layers."""
        self.group_pages = tuple(group.num_pages for group in groups)
        """Number of pages of each group, which is also the index of the group's dummy page."""
        self._groups: list[list[_LayerPool]] = []
        self._places: dict[CacheEntry, _Place] = {}
        for index, group in enumerate(groups):
            pools = []
            for layout in dict.fromkeys(group.layouts.values()):
                entries = [entry for entry, own in group.layouts.items() if own == layout]
                pool = _LayerPool(layout, len(entries), group.num_pages, page_size, kv_format, self.device)
                self._places |= {entry: _Place(index, pool, number) for number, entry in enumerate(entries)}
                pools.append(pool)
            self._groups.append(pools)
        self._pools = [pool for pools in self._groups for pool in pools]

    @property
    def layers(self) -> tuple[int, ...]:
        """Layers that cache keys and values."""
        return tuple(entry for entry in self._places if isinstance(entry, int))

    def group_of(self, entry: CacheEntry) -> int:
        """Return the index of the group of ``entry``, whose page tables locate the entry's keys and values."""
        return self._places[entry].group

    def layout(self, entry: CacheEntry) -> CacheLayout:
        """Return the layout of the values that ``entry`` caches per position."""
        return self._places[entry].pool.layout

    def gathered_bytes(self, entry: CacheEntry) -> int:
        """Return the number of bytes of one position of ``entry``, decoded to the compute dtype."""
        layout = self.layout(entry)
        return layout.kv_heads * (layout.key_dim + layout.value_dim) * self.kv_format.computed.itemsize

    @property
    def is_scaled(self) -> bool:
        """Whether any scale differs from 1."""
        return any(pool.keys.is_scaled or pool.values.is_scaled for pool in self._pools)

    def pools(self, entry: CacheEntry) -> tuple[Tensor, Tensor] | None:
        """Return the stored keys and values of ``entry`` by page; None if some key features are stored separately."""
        pool, place = self._place(entry)
        return None if pool.exact is not None else (pool.keys.layers[place], pool.values.layers[place])

    def tensors(self) -> list[Tensor]:
        """Return the tensors of all pools, and of the recurrent states."""
        states = [] if self.states is None else [self.states.windows, self.states.matrices]
        return [*(part.tensor for pool in self._pools for part in pool.parts), *states]

    @property
    def is_split(self) -> bool:
        """Whether some key features are stored separately."""
        return any(pool.exact is not None for pool in self._pools)

    def scales(self, entry: CacheEntry) -> tuple[float, float]:
        """Return the scales of the keys and of the values of ``entry``."""
        pool, place = self._place(entry)
        return pool.keys.scale(place), pool.values.scale(place)

    def set_scales(self, entry: CacheEntry, key: float | None, value: float | None) -> None:
        """Set the scales of ``entry``; None keeps a scale. Positions cached by earlier steps become invalid."""
        pool, place = self._place(entry)
        for part, scale in ((pool.keys, key), (pool.values, value)):
            if scale is not None:
                part.set_scale(place, scale)

    def pages(self, entry: CacheEntry, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Gather pages of keys and values, [pages * page_size, kv_heads, dim] each; valid until the next gather."""
        pool, place = self._place(entry)
        keys, values = pool.keys.pages(place, numbers), pool.values.pages(place, numbers)
        if pool.exact is not None:
            keys = torch.cat((keys, pool.exact.pages(place, numbers)), dim=-1)
        return keys, values

    def positions(self, entry: CacheEntry, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Gather keys and values at ``slots`` [n], [n, kv_heads, dim] each; valid until the next gather."""
        pool, place = self._place(entry)
        keys, values = pool.keys.positions(place, slots), pool.values.positions(place, slots)
        if pool.exact is not None:
            keys = torch.cat((keys, pool.exact.positions(place, slots)), dim=-1)
        return keys, values

    def write(self, entry: CacheEntry, slots: Tensor, key: Tensor, value: Tensor) -> None:
        """Store ``key`` and ``value`` [n, kv_heads, dim] at ``slots`` [n]."""
        pool, place = self._place(entry)
        if pool.exact is not None:
            exact_dim = pool.layout.exact_dim
            pool.exact.write(place, slots, key[..., -exact_dim:])
            key = key[..., :-exact_dim]
        pool.keys.write(place, slots, key)
        pool.values.write(place, slots, value)

    def move(self, group: int, sources: Tensor, targets: Tensor) -> None:
        """Copy the values of every entry of ``group`` from slots ``sources`` [n] to slots ``targets`` [n]."""
        for pool in self._groups[group]:
            for part in pool.parts:
                part.move(sources, targets)

    def _place(self, entry: CacheEntry) -> tuple[_LayerPool, int]:
        place = self._places[entry]
        return place.pool, place.number
