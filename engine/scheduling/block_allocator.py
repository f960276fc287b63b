"""PageAllocator: hands out the page numbers of the KV cache. Knows numbers only; rank 0 alone has one."""

from collections.abc import Iterable


class PageAllocator:
    """A free list. Who holds a page that is not free is the scheduler's and the prefix cache's business."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # popped from the end: low numbers first

    @property
    def num_free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages held by requests or by the prefix cache."""
        return self.num_pages - len(self._free)

    @property
    def free(self) -> tuple[int, ...]:
        """The free page numbers, for checks."""
        return tuple(self._free)

    def take(self, count: int) -> list[int]:
        """``count`` pages, which the caller must have seen to be free."""
        assert count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        return [self._free.pop() for _ in range(count)]

    def trim_heap(self, pages: Iterable[int]) -> None:
        """Return pages taken before."""
        self._free.extend(reversed(list(pages)))
