"""KV cache: a pool of pages on the device, and one step's view of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheLayout:
    """What a model caches of one position on this rank, in each of its layers; all layers are alike."""

    num_layers: int
    kv_heads: int
    key_dim: int
    value_dim: int
    """0 where values are made from what is cached as keys (:attr:`AttentionSpec.value_dim`)."""

    @property
    def position_width(self) -> int:
        """Elements of one position in all layers."""
        return self.num_layers * self.kv_heads * (self.key_dim + self.value_dim)


class KVCache:
    """Keys and values of every layer on this rank, each [layers, pages + 1, page_size, kv_heads, dim].

    The page after the last is the *dummy*: padding rows write there, and gathers that are longer than a request read
    there. The pool starts as zeros, so nothing read before it was written is NaN.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        shape = (layout.num_layers, num_pages + 1, page_size, layout.kv_heads)
        self.keys = torch.zeros(*shape, layout.key_dim, dtype=dtype, device=device)
        self.values = torch.zeros(*shape, layout.value_dim, dtype=dtype, device=device)
        self.num_pages = num_pages
        self.page_size = page_size

    @property
    def device(self) -> torch.device:
        """Where the pool lies."""
        return self.keys.device


@dataclass(frozen=True, slots=True)
class Segment:
    """One request's rows of a step, and where its cache lies; numbers are the host's, no kernel needs them."""

    slot: int
    """First row in the packed batch."""
    count: int
    """Rows in this step."""
    position: int
    """Position of the first row: how many tokens were cached before."""
    pages: Tensor
    """[pages] int32 on the device: the request's page table, in order of position."""

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
        self.cache.keys[layer].flatten(0, 1).index_copy_(0, self.slots, key)
        self.cache.values[layer].flatten(0, 1).index_copy_(0, self.slots, value)

    def read(self, layer: int, segment: Segment, start: int = 0) -> tuple[Tensor, Tensor]:
        """Keys and values of a request's positions from ``start`` on, [length - start, kv_heads, dim] each."""
        size = self.cache.page_size
        first = start // size
        used = segment.pages[first : -(-segment.length // size)]
        keep = slice(start - first * size, segment.length - first * size)
        keys, values = self.cache.keys[layer][used], self.cache.values[layer][used]
        return keys.flatten(0, 1)[keep], values.flatten(0, 1)[keep]
