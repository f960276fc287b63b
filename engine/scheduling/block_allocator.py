"""BlockAllocator: free list of the KV cache's page numbers, on rank 0 only."""

from collections.abc import Iterable


class BlockAllocator:
    """A free list. The scheduler and the prefix cache track who holds the other pages."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(range(num_pages - 1, -1, -1))  # popped from the end: low numbers first

    @property
    def num_free(self) -> int:
        """Free pages."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Pages held by requests or by the prefix cache."""
        return self.num_pages - len(self._free)

    @property
    def free(self) -> tuple[int, ...]:
        """The free page numbers, for checks."""
        return tuple(self._free)

    def allocate_pages(self, count: int) -> list[int]:
        """Take ``count`` pages off the free list; the caller has checked that there are as many."""
        assert count <= len(self._free), f"{count} pages wanted, {len(self._free)} free"
        return [self._free.pop() for _ in range(count)]

    def free_pages(self, pages: Iterable[int]) -> None:
        """Return pages taken before."""
        self._free.extend(reversed(list(pages)))
