"""StepCache: one step's view of the KV cache."""

import functools
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tapscope.engine.kv_cache.cache_layout import CacheEntry
from tapscope.engine.kv_cache.draft_tree import branch, depths
from tapscope.engine.kv_cache.kv_cache import KVCache
from tapscope.engine.kv_cache.state_cache import StepStates

_BATCH_BYTES = 3 << 20


MAX_ELEMENTS = 1 << 26
"""Maximum number of elements of one mask, and of all cached masks together."""


class StepMasks:
    """Cache of masks, up to :data:`MAX_ELEMENTS` elements in total; layers rebuild the masks that do not fit."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Tensor] = {}
        self._num_elements = 0

    def get(self, key: Hashable) -> Tensor | None:
        """Return the cached mask for ``key``, if any."""
        return self._known.get(key)

    def add(self, key: Hashable, mask: Tensor) -> None:
        """Cache ``mask``, unless the limit would be exceeded."""
        if self._num_elements + mask.numel() <= MAX_ELEMENTS:
            self._known[key] = mask
            self._num_elements += mask.numel()


@dataclass(frozen=True, slots=True)
class Segment:
    """One request's rows in a step and its cached length, as host integers that no kernel reads."""

    index: int
    """Index of the request in the step, and its row in the page table."""
    slot: int
    """Index of the first row in the packed batch."""
    count: int
    """Number of rows in this step."""
    position: int
    """Position of the first row: the number of tokens cached by earlier steps."""
    tree: tuple[int, ...] = ()
    """Parents of the rows of a draft tree, see :attr:`.ScheduledRequest.tree`; empty without a tree."""

    @property
    def length(self) -> int:
        """Number of positions to attend to, this step's included."""
        return self.position + self.count

    @property
    def base(self) -> int:
        """Number of cached positions before the step's first row or, with a tree, before the tree's first row."""
        return self.length - len(self.tree) if self.tree else self.position

    def first_seen(self, window: int | None) -> int:
        """Return the first position visible to any row with a window of ``window`` positions; None: no window."""
        return 0 if window is None else max(0, self.base - window + 1)

    def branches(self) -> list[tuple[list[int], list[int]]]:
        """Split the tree into chains; return for each branch (all its rows, its rows that are in no earlier branch).

        Rows are numbered from :attr:`base`. The second list contains rows of this step only, the last rows of the
        branch.
        """
        first, branches, done = len(self.tree) - self.count, [], set[int]()
        parents = set(self.tree)
        for row in range(first, len(self.tree)):
            if row not in parents:
                whole = branch(self.tree, row)
                own = [each for each in whole if each >= first and each not in done]
                done.update(own)
                branches.append((whole, own))
        return branches


class StepCache:
    """Attention inputs of one step, built once and read by every layer; the model's `past_key_values`.

    All inputs of kernels are tensors on the pool's device. The class is deliberately neither a dataclass nor a tuple: a
    tap that flattens containers must not capture the whole pool.
    """

    def __init__(
        self,
        cache: KVCache,
        segments: Sequence[Segment],
        *,
        slots: Tensor,
        page_table: Tensor,
        lengths: Tensor,
        starts: Tensor,
        row_lengths: Tensor,
        windowed: Sequence[tuple[Tensor, Tensor]] = (),
        states: StepStates | None = None,
    ) -> None:
        """``windowed``: slots and page table of each cache group after the primary one."""
        self.cache = cache
        self.segments = tuple(segments)
        """Requests of the step, in row order."""
        several = (i for i, segment in enumerate(segments) if segment.count > 1 or segment.tree)
        self.num_single = next(several, len(segments))
        """Number of leading requests that have exactly one row and no draft tree."""
        self.is_padded = False
        """Whether requests may have no rows, as in a CUDA graph: the first :attr:`num_single` have one row or none."""
        self.most_rows = 1
        """Maximum number of adjacent single rows that belong to one request, at consecutive positions, as in a CUDA
        graph."""
        self.has_trees = any(segment.tree for segment in segments)
        """Whether any request has rows of a draft tree."""
        self.longest_single = max((segment.length for segment in segments[: self.num_single]), default=0)
        """Maximum length of the first :attr:`num_single` requests; in a CUDA graph an upper bound."""
        self._batches: dict[tuple[int, int | None], tuple[Tensor, Tensor | None]] = {}
        self._biases: dict[tuple[int | None, torch.dtype], Tensor | None] = {}
        self.masks = StepMasks()
        """Masks of requests with several rows."""
        self.slots = slots
        """[tokens] int64: slot of each row's key and value in the primary group's pool, with page axes flattened."""
        self.page_table = page_table
        """[requests, max pages] int32: pages of the primary group in order of position; entries after a request's last
        page are invalid."""
        self._windowed = tuple(windowed)
        self.states = states
        """Recurrent states; None in models without recurrent layers."""
        self.chosen_keys: Any = None
        """Keys selected by the last indexer: :class:`tapscope.engine.layers.indexer.Chosen`."""
        self.lengths = lengths
        """[requests] int32: number of positions to attend to, this step's included."""
        self.starts = starts
        """[requests + 1] int32: first row of each request, then the number of rows."""
        self.row_lengths = row_lengths
        """[tokens] int64: max(prompt length, position + 1), which does not depend on the rest of the batch."""

    @functools.cached_property
    def prompt_starts(self) -> Tensor:
        """[requests with several rows + 1] int32: :attr:`starts` of these requests, relative to their first row."""
        return self.starts[self.num_single :] - self.num_single

    @property
    def max_request_rows(self) -> int:
        """Maximum number of rows of a request; 1 in a decode step."""
        return max(segment.count for segment in self.segments)

    def slots_of(self, entry: CacheEntry) -> Tensor:
        """Return :attr:`slots` for the cache group of ``entry``."""
        group = self.cache.group_of(entry)
        return self._windowed[group - 1][0] if group else self.slots

    def page_table_of(self, entry: CacheEntry) -> Tensor:
        """Return :attr:`page_table` of the cache group of ``entry``."""
        group = self.cache.group_of(entry)
        return self._windowed[group - 1][1] if group else self.page_table

    def write(self, entry: CacheEntry, key: Tensor, value: Tensor) -> None:
        """Store ``key`` and ``value`` [tokens, kv_heads, dim] of this step's rows."""
        self.cache.write(entry, self.slots_of(entry), key, value)

    @property
    def is_rounded(self) -> bool:
        """Whether attention reads rounded values: the storage dtype differs from the compute dtype."""
        return not self.cache.kv_format.is_plain

    def written(self, layer: int) -> tuple[Tensor, Tensor]:
        """Read back keys and values of this step's rows, as attention reads them; valid until the next read."""
        return self.cache.positions(layer, self.slots_of(layer))

    def pools(self, entry: CacheEntry) -> tuple[Tensor, Tensor] | None:
        """Return stored keys and values, [pages, page_size, kv_heads, dim]; None if some are stored separately."""
        return self.cache.pools(entry)

    def scales(self, layer: int) -> tuple[float, float]:
        """Return the scales of the stored keys and values of ``layer``."""
        return self.cache.scales(layer)

    def read(self, entry: CacheEntry, segment: Segment, start: int = 0) -> tuple[Tensor, Tensor]:
        """Read a request's keys and values from position ``start`` on, [length - start, kv_heads, dim] each.

        Valid until the next read.
        """
        size = self.cache.page_size
        first = start // size
        used = self.page_table_of(entry)[segment.index, first : -(-segment.length // size)]
        keep = slice(start - first * size, segment.length - first * size)
        keys, values = self.cache.pages(entry, used)
        return keys[keep], values[keep]

    def read_at(self, entry: CacheEntry, segment: Segment, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Read a request's keys and values at ``positions`` [n], [n, kv_heads, dim] each; valid until the next read."""
        size = self.cache.page_size
        pages = self.page_table_of(entry)[segment.index, positions // size].to(positions.dtype)
        return self.cache.positions(entry, pages * size + positions % size)

    def tree_mask(self, segment: Segment, window: int | None) -> Tensor:
        """Return the visible positions of each row of a draft tree: bool [count, length], cached for all layers.

        A row sees the cached positions and its own branch, within ``window`` positions.
        """
        key = "tree", segment.index, window
        mask = self.masks.get(key)
        if mask is None:
            mask = _tree_mask(segment, window).to(self.lengths.device)
            self.masks.add(key, mask)
        return mask

    def num_batched(self, layer: int, window: int | None) -> int:
        """Return the number of requests for :meth:`read_batch`: all with one row, or 0 if one at a time is faster.

        On a CPU a batch is used only while the gathered values fit the processor's caches.
        """
        count = self.num_single
        size = count * self._batch_width(window) * self.cache.gathered_bytes(layer)
        return 0 if self.cache.device.type == "cpu" and size > _BATCH_BYTES else count

    def read_batch(self, layer: int, window: int | None) -> tuple[Tensor, Tensor]:
        """Read the keys and values visible to the first :meth:`num_batched` requests, padded to the longest request.

        [requests, width, kv_heads, dim] each, valid until the next read.
        """
        slots = self._batch_of(layer, window)[0]
        keys, values = self.cache.positions(layer, slots)
        shape = (self.num_single, self._batch_width(window))
        return keys.view(*shape, *keys.shape[1:]), values.view(*shape, *values.shape[1:])

    def batch_bias(self, layer: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """Return the additive mask for :meth:`read_batch`: -inf at padding, 0 elsewhere; None without padding.

        The mask is [requests, 1, 1, width] and built once per step for all layers. Rows are aligned to 16 elements for
        vectorized kernels.
        """
        cache_key = window, dtype
        if cache_key not in self._biases:
            self._biases[cache_key] = _bias(self._batch_of(layer, window)[1], dtype)
        return self._biases[cache_key]

    def _batch_of(self, layer: int, window: int | None) -> tuple[Tensor, Tensor | None]:
        key = self.cache.group_of(layer), window
        if key not in self._batches:
            self._batches[key] = self._batch(layer, window)
        return self._batches[key]

    def _batch(self, layer: int, window: int | None) -> tuple[Tensor, Tensor | None]:
        """Return slots [requests * width] in the pool, padded with the dummy page, and the mask of valid slots.

        The mask is None if all slots are valid.
        """
        count, width, size = self.num_single, self._batch_width(window), self.cache.page_size
        page_table, dummy = self.page_table_of(layer), self.cache.group_pages[self.cache.group_of(layer)]
        lengths = self.lengths[:count, None].to(torch.int64)
        positions = (lengths - width).clamp_(min=0) + torch.arange(width, device=lengths.device)
        valid = positions < lengths
        columns = (positions // size).clamp_(max=page_table.shape[1] - 1)
        pages = page_table[:count].gather(1, columns)
        slots = torch.where(valid, pages * size + positions % size, dummy * size)
        full = all(segment.length >= width for segment in self.segments[:count])
        return slots.flatten(), None if full else valid

    def _batch_width(self, window: int | None) -> int:
        return self.longest_single if window is None else min(self.longest_single, window)


def _tree_mask(segment: Segment, window: int | None) -> Tensor:
    depth, first = torch.tensor(depths(segment.tree)), len(segment.tree) - segment.count
    mask = torch.ones(segment.count, segment.length, dtype=torch.bool)
    mask[:, segment.base :] = False
    for row in range(first, len(segment.tree)):
        mask[row - first, [segment.base + each for each in branch(segment.tree, row)]] = True
    if window is not None:
        positions = torch.cat((torch.arange(segment.base), segment.base + depth))
        mask &= positions > positions[segment.position :, None] - window
    return mask


def _bias(valid: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """Return [requests, 1, 1, width]: 0 where ``valid`` [requests, width] is True, otherwise -inf."""
    if valid is None:
        return None
    width = valid.shape[1]
    bias = torch.zeros(len(valid), -(-width // 16) * 16, dtype=dtype, device=valid.device)[:, :width]
    return bias.masked_fill_(~valid, -torch.inf)[:, None, None]
