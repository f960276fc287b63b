"""StepCache: one step's view of the KV cache."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tapscope.engine.kv_cache.attention_masks import StepMasks
from tapscope.engine.kv_cache.kv_cache import KVCache

_BATCH_BYTES = 3 << 20


@dataclass(frozen=True, slots=True)
class Segment:
    """One request's rows of a step, and where its cache lies; numbers are the host's, no kernel needs them."""

    index: int
    """Which request of the step: its row in the step's page table."""
    slot: int
    """First row in the packed batch."""
    count: int
    """Rows in this step."""
    position: int
    """Position of the first row: how many tokens were cached before."""

    @property
    def length(self) -> int:
        """Positions to attend to, this step's included."""
        return self.position + self.count


class StepCache:
    """What attention needs of one step, built once and read by every layer; the model's `past_key_values`.

    Everything a kernel needs is a tensor on the pool's device. No dataclass and no tuple on purpose: a tap that
    flattens containers must not find the whole pool in it.
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
    ) -> None:
        self.cache = cache
        self.segments = tuple(segments)
        """Requests of the step in order of rows."""
        self.num_single = next((i for i, segment in enumerate(segments) if segment.count > 1), len(segments))
        """How many requests, the first ones, have one row."""
        self._longest_single = max((segment.length for segment in segments[: self.num_single]), default=0)
        self._batches: dict[int | None, tuple[Tensor, Tensor | None]] = {}
        self._biases: dict[tuple[int | None, torch.dtype], Tensor | None] = {}
        self.masks = StepMasks()
        """Of requests with several rows."""
        self.slots = slots
        """[tokens] int64: where each row's key and value go, in the pool with its page axes flattened."""
        self.page_table = page_table
        """[requests, most pages] int32: pages in order of position; what lies past a request's last page is no page."""
        self.lengths = lengths
        """[requests] int32: positions to attend to, this step's included."""
        self.starts = starts
        """[requests + 1] int32: first row of each request, then the number of rows."""
        self.row_lengths = row_lengths
        """[tokens] int64: max(prompt length, position + 1), what a row's request counts whatever else runs."""

    @functools.cached_property
    def prompt_starts(self) -> Tensor:
        """[requests of several rows + 1] int32: as :attr:`starts`, counted from the first row of the first of them."""
        return self.starts[self.num_single :] - self.num_single

    @property
    def max_count(self) -> int:
        """Most rows of one request; 1 in a step that only decodes."""
        return max(segment.count for segment in self.segments)

    @property
    def max_length(self) -> int:
        """Most positions of one request."""
        return max(segment.length for segment in self.segments)

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store [tokens, kv_heads, dim] of this step's rows."""
        self.cache.write(layer, self.slots, key, value)

    @property
    def is_rounded(self) -> bool:
        """Whether attention reads other values than were written."""
        return not self.cache.kv_format.is_plain

    def written(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of this step's rows as attention reads them; valid until the next read."""
        return self.cache.positions(layer, self.slots)

    def pools(self, layer: int) -> tuple[Tensor, Tensor] | None:
        """[pages, page_size, kv_heads, dim] of keys and values as stored; None where some features lie elsewhere."""
        return self.cache.pools(layer)

    def scales(self, layer: int) -> tuple[float, float]:
        """What a stored 1 means, of keys and of values."""
        return self.cache.scales(layer)

    def read(self, layer: int, segment: Segment, start: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and values of a request's positions from ``start`` on, [length - start, kv_heads, dim] each.

        Valid until the next read.
        """
        size = self.cache.page_size
        first = start // size
        used = self.page_table[segment.index, first : -(-segment.length // size)]
        keep = slice(start - first * size, segment.length - first * size)
        keys, values = self.cache.pages(layer, used)
        return keys[keep], values[keep]

    def num_batched(self, window: int | None) -> int:
        """How many requests, the first ones, :meth:`read_batch` reads: those of one row, where that is the faster way.

        On a CPU only as long as what is gathered stays in the caches.
        """
        count = self.num_single
        size = count * self._batch_width(window) * self.cache.gathered_bytes
        return 0 if self.cache.device.type == "cpu" and size > _BATCH_BYTES else count

    def read_batch(self, layer: int, window: int | None) -> tuple[Tensor, Tensor]:
        """Keys and values that the rows of the first :meth:`num_batched` requests see, padded to the longest.

        [requests, width, kv_heads, dim] each, valid until the next read.
        """
        slots = self._batch_of(window)[0]
        keys, values = self.cache.positions(layer, slots)
        shape = (self.num_single, self._batch_width(window))
        return keys.view(*shape, *keys.shape[1:]), values.view(*shape, *values.shape[1:])

    def batch_bias(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """What scores against :meth:`read_batch`'s keys are raised by: -inf at padding, 0 elsewhere; None without any.

        [requests, 1, 1, width]; made once a step, so that no layer need turn a mask into it. Rows begin at multiples
        of 16 elements, which kernels want that read them as vectors.
        """
        place = window, dtype
        if place not in self._biases:
            self._biases[place] = _bias(self._batch_of(window)[1], dtype)
        return self._biases[place]

    def _batch_of(self, window: int | None) -> tuple[Tensor, Tensor | None]:
        if window not in self._batches:
            self._batches[window] = self._batch(window)
        return self._batches[window]

    def _batch(self, window: int | None) -> tuple[Tensor, Tensor | None]:
        """Slots [requests * width] in the pool, the dummy's where a request has no more, and the mask."""
        count, width, size = self.num_single, self._batch_width(window), self.cache.page_size
        lengths = self.lengths[:count, None].to(torch.int64)
        positions = (lengths - width).clamp_(min=0) + torch.arange(width, device=lengths.device)
        valid = positions < lengths
        places = (positions // size).clamp_(max=self.page_table.shape[1] - 1)
        pages = self.page_table[:count].gather(1, places)
        slots = torch.where(valid, pages * size + positions % size, self.cache.num_pages * size)
        full = all(segment.length >= width for segment in self.segments[:count])
        return slots.flatten(), None if full else valid

    def _batch_width(self, window: int | None) -> int:
        return self._longest_single if window is None else min(self._longest_single, window)


def _bias(valid: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    """0 where ``valid`` [requests, width], else -inf: [requests, 1, 1, width]."""
    if valid is None:
        return None
    width = valid.shape[1]
    bias = torch.zeros(len(valid), -(-width // 16) * 16, dtype=dtype, device=valid.device)[:, :width]
    return bias.masked_fill_(~valid, -torch.inf)[:, None, None]
