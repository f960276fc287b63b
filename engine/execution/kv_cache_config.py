"""KVCacheConfig: dtype, layer groups, pages and state slots of each rank's KV cache."""

import bisect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from tapscope.core.errors import ConfigError
from tapscope.engine.kv_cache.cache_layout import CacheEntry, CacheGroup, CacheLayout
from tapscope.engine.kv_cache.kv_cache import KVCache
from tapscope.engine.kv_cache.kv_format import KV_DTYPES, KVFormat
from tapscope.engine.kv_cache.kv_scales import resolve_kv_dtype
from tapscope.engine.kv_cache.layer_group import LayerGroup, layer_groups
from tapscope.engine.kv_cache.state_cache import StateCache, slot_bytes
from tapscope.engine.models.decoder import CausalLM
from tapscope.engine.params.engine_config import EngineConfig
from tapscope.engine.requests.page_table import max_request_pages
from tapscope.engine.requests.state_table import SLOTS_PER_REQUEST

_log = logging.getLogger(__name__)
_EMPTY_PAGES = 1 << 16
"""Number of pages for a model that caches no keys; each takes a list entry, but no device memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheConfig:
    """KV cache of one rank. Pages and slots are equal on all ranks, byte counts are this rank's."""

    dtype: str
    """Name of the storage dtype, a key of KV_DTYPES."""
    kv_format: KVFormat
    page_size: int
    """Positions per page."""
    groups: tuple[LayerGroup, ...]
    layouts: tuple[Mapping[CacheEntry, CacheLayout], ...]
    """Cache entries and their layouts, for each group."""
    group_pages: tuple[int, ...]
    """Number of pages of each group."""
    num_state_slots: int
    """Number of recurrent state slots; 0 in models without recurrent states."""

    @classmethod
    def resolve(
        cls, config: EngineConfig, model: CausalLM, computed: str, dtype: torch.dtype, step_tokens: int
    ) -> "KVCacheConfig":
        """Derive the cache from the settings, for steps of ``step_tokens`` rows.

        ``computed`` is the name of the compute dtype ``dtype``. Raises CheckpointError, ConfigError.
        """
        name = resolve_kv_dtype(config, computed)
        kv_format = KVFormat(KV_DTYPES[name], dtype)
        num_slots, state_bytes = _state_slots(config, model, dtype)
        config = replace(config, kv_cache_memory_bytes=config.kv_cache_memory_bytes - state_bytes)
        groups = layer_groups(model.config)
        layouts = tuple(
            dict(item for layer in group.layers for item in model.cache_layouts(layer).items()) for group in groups
        )
        sizes = _position_bytes(layouts, kv_format)
        return cls(
            dtype=name,
            kv_format=kv_format,
            page_size=config.page_size,
            groups=groups,
            layouts=layouts,
            group_pages=size_groups(config, groups, sizes, model.config.max_positions, step_tokens),
            num_state_slots=num_slots,
        )

    @property
    def num_pages(self) -> int:
        """Number of pages of the first group, which has the largest window."""
        return self.group_pages[0]

    @property
    def window(self) -> int | None:
        """Largest window of any layer, in positions; None: all."""
        return self.groups[0].window

    @property
    def windowed_pools(self) -> tuple[tuple[int, int], ...]:
        """(pages, window) of each group after the first."""
        groups = zip(self.groups[1:], self.group_pages[1:], strict=True)
        return tuple((pages, group.window) for group, pages in groups if group.window is not None)

    @property
    def position_bytes(self) -> int:
        """Bytes of one position in all layers."""
        return sum(_position_bytes(self.layouts, self.kv_format))

    @property
    def group_bytes(self) -> tuple[int, ...]:
        """Bytes of each group."""
        sizes = zip(self.group_pages, _position_bytes(self.layouts, self.kv_format), strict=True)
        return tuple(self.page_size * pages * size for pages, size in sizes)

    def allocate(self, model: CausalLM, device: torch.device) -> KVCache:
        """Allocate the cache, with recurrent states in models that have them."""
        groups = list(map(CacheGroup, self.layouts, self.group_pages))
        cache = KVCache(groups, self.page_size, self.kv_format, device)
        if self.num_state_slots:
            shapes = model.state_shapes(model.state_units().count)
            layers, dtype = model.config.linear_layers, self.kv_format.computed
            cache.states = StateCache(layers, self.num_state_slots, *shapes, dtype, device)
        return cache

    def log(self) -> None:
        """Log the size of each group."""
        for group, pages, size in zip(self.groups, self.group_pages, self.group_bytes, strict=True):
            of_layers = f" of {len(group.layers)} layers with {_described(group)}" if len(self.groups) > 1 else ""
            _log.info(
                "KV cache%s: %d pages of %d positions in %s, %.1f MiB",
                of_layers, pages, self.page_size, self.dtype, size / 2**20,
            )  # fmt: skip


def _position_bytes(layouts: Sequence[Mapping[CacheEntry, CacheLayout]], kv_format: KVFormat) -> list[int]:
    """Return the bytes of one position in the layers of each group."""
    return [sum(layout.position_bytes(kv_format) for layout in entries.values()) for entries in layouts]


def _described(group: LayerGroup) -> str:
    return "full attention" if group.window is None else f"a window of {group.window}"


def _state_slots(config: EngineConfig, model: CausalLM, dtype: torch.dtype) -> tuple[int, int]:
    """Return the number of recurrent state slots and their bytes, equal on all ranks; (0, 0) without recurrent states.

    Raises ConfigError for too few slots, for more than kv_cache_memory_bytes holds, and for a model without states.
    """
    asked = config.num_state_slots
    if not model.config.linear_layers:
        if asked is not None:
            raise ConfigError(f"num_state_slots={asked}: {config.model} has no recurrent state; leave it out")
        return 0, 0
    # Every rank uses the byte count of the rank with the most units, so that all pools are equal.
    shapes = model.state_shapes(-(-model.state_units().total // model.tp.size))
    num_bytes = slot_bytes(len(model.config.linear_layers), *shapes, dtype.itemsize)
    memory = config.kv_cache_memory_bytes
    if config.has_draft_trees:
        raise ConfigError(
            f"speculative_eagle_topk={config.speculative_eagle_topk}: a tree needs a recurrent state for each branch, "
            f"which is not supported ({model.config.architecture}); use 1"
        )
    wanted = (4 + config.num_drafts) * config.max_num_seqs
    slots = min(wanted, memory // 2 // num_bytes) if asked is None else asked
    if slots < SLOTS_PER_REQUEST:
        raise ConfigError(
            f"kv_cache_memory_bytes={memory}: half of it must hold {SLOTS_PER_REQUEST} recurrent states of {num_bytes} "
            "bytes; raise it"
            if asked is None
            else f"num_state_slots={slots}: a request needs {SLOTS_PER_REQUEST}"
        )
    if slots * num_bytes >= memory:
        raise ConfigError(
            f"num_state_slots={slots}: slots of {num_bytes} bytes leave no page of kv_cache_memory_bytes={memory}; "
            f"use at most {(memory - 1) // num_bytes}"
        )
    return slots, slots * num_bytes


def size_groups(
    config: EngineConfig,
    groups: Sequence[LayerGroup],
    position_bytes: Sequence[int],
    max_positions: int,
    step_tokens: int,
) -> tuple[int, ...]:
    """Return the number of pages of each cache group, equal on all ranks.

    ``position_bytes``: bytes of a position in all layers of each group. Windowed groups after the first get pages for
    the windows of ``max_num_seqs`` requests and the rows of a step, or ``swa_full_tokens_ratio`` of the first group's
    pages; never more than the first group. Raises ConfigError if kv_cache_memory_bytes cannot hold a page of each
    group.
    """
    if len(groups) == 1 and config.swa_full_tokens_ratio is not None:
        ratio = f"swa_full_tokens_ratio={config.swa_full_tokens_ratio}"
        raise ConfigError(f"{ratio}: {config.model} does not mix sliding-window and full attention; leave it out")
    page_bytes = [config.page_size * size for size in position_bytes]
    wanted = config.max_num_seqs * -(-max_positions // config.page_size)
    if not any(page_bytes):
        wanted = min(wanted, max(_EMPTY_PAGES, max_request_pages(max_positions, config.page_size, None)))
    if config.num_pages is not None:
        return _pages_of_groups(config, groups, config.num_pages, max_positions, step_tokens)
    if config.kv_cache_memory_bytes < sum(page_bytes):
        raise ConfigError(
            f"kv_cache_memory_bytes={config.kv_cache_memory_bytes}: must hold at least one page of "
            f"{sum(page_bytes)} bytes"
        )

    def fits(first: int) -> bool:
        pages = _pages_of_groups(config, groups, first, max_positions, step_tokens)
        return sum(count * size for count, size in zip(pages, page_bytes, strict=True)) <= config.kv_cache_memory_bytes

    most = bisect.bisect_left(range(1, wanted + 1), True, key=lambda first: not fits(first))
    return _pages_of_groups(config, groups, most or 1, max_positions, step_tokens)


def _pages_of_groups(
    config: EngineConfig, groups: Sequence[LayerGroup], first: int, max_positions: int, step_tokens: int
) -> tuple[int, ...]:
    """Return the pages of each group if the first group has ``first`` pages."""
    pages = [first]
    for group in groups[1:]:
        least = max_request_pages(max_positions, config.page_size, group.window)
        enough = config.max_num_seqs * least + -(-step_tokens // config.page_size)
        if config.swa_full_tokens_ratio is not None:
            enough = int(first * config.swa_full_tokens_ratio)
        pages.append(min(first, max(least, enough)))
    return tuple(pages)
