"""KV cache: a pool of pages on the device, the allocator that hands them out, and one step's view of the pool."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


class PageAllocator:
    """Hands out page numbers; only rank 0 has one. A page belongs to one request at a time."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # popped from the end: low numbers first

    @property
    def num_free(self) -> int:
        """Pages nobody owns."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages owned by running requests."""
        return self.num_pages - len(self._free)

    def take(self, count: int) -> list[int]:
        """``count`` pages, which the caller must have seen to be free."""
        assert count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: Sequence[int]) -> None:
        """Return pages taken before."""
        self._free.extend(reversed(pages))


class KVCache:
    """Keys and values of every layer on this rank: [layers, pages, page_size, kv_heads, head_dim], twice."""

    def __init__(
        self, num_layers: int, num_pages: int, page_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> None:
        shape = (num_layers, num_pages, page_size, kv_heads, head_dim)
        self.keys = torch.empty(shape, dtype=dtype)
        self.values = torch.empty(shape, dtype=dtype)
        self.page_size = page_size


@dataclass(frozen=True, slots=True)
class Segment:
    """One request's rows of a step, and where its cache lies."""

    slot: int
    """First row in the packed batch."""
    count: int
    """Rows in this step."""
    position: int
    """Position of the first row: how many tokens were cached before."""
    pages: Tensor
    """[pages] int64: the request's pages in order of position."""

    @property
    def length(self) -> int:
        """Positions to attend to, this step's included."""
        return self.position + self.count


class StepCache:
    """What attention needs of one step; passed down the model as `past_key_values`.

    No dataclass and no tuple on purpose: a tap that flattens containers must not find the whole pool in it.
    """

    def __init__(self, cache: KVCache, segments: Sequence[Segment]) -> None:
        self.segments = segments
        self._cache = cache
        self._slots = torch.cat([_cache_slots(segment, cache.page_size) for segment in segments])

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store [tokens, kv_heads, head_dim] of this step's rows."""
        self._cache.keys[layer].flatten(0, 1)[self._slots] = key
        self._cache.values[layer].flatten(0, 1)[self._slots] = value

    def read(self, layer: int, segment: Segment) -> tuple[Tensor, Tensor]:
        """Keys and values of every position of a request so far, [length, kv_heads, head_dim] each."""
        used = segment.pages[: -(-segment.length // self._cache.page_size)]
        keys, values = self._cache.keys[layer][used], self._cache.values[layer][used]
        return keys.flatten(0, 1)[: segment.length], values.flatten(0, 1)[: segment.length]


def _cache_slots(segment: Segment, page_size: int) -> Tensor:
    """[count] int64: index of each row's position in the pool with its page axes flattened."""
    positions = torch.arange(segment.position, segment.length)
    return segment.pages[positions // page_size] * page_size + positions % page_size
