"""PageTable: the KV cache pages of one request in one group of layers."""

from dataclasses import dataclass, field
from typing import Any


def max_request_pages(num_positions: int, page_size: int, window: int | None) -> int:
    """Return the maximum number of pages that a request holds at one time.

    The request has ``num_positions`` positions and attends to the last ``window`` positions; None: to all. A window
    may start and end within a page, and one more page takes the next rows.
    """
    whole = -(-num_positions // page_size)
    return whole if window is None else min(whole, -(-window // page_size) + 2)


@dataclass(slots=True, eq=False)
class PageTable:
    """Pages of one request in a :class:`~tapscope.engine.scheduling.page_group.PageGroup`, which sets all fields."""

    pages: list[int] = field(default_factory=list)
    """Page numbers in order of position."""
    num_shared_pages: int = 0
    """Number of leading pages that the prefix cache owns."""
    num_freed_pages: int = 0
    """Number of leading pages freed because they are outside the attention window."""
    num_sent_pages: int = 0
    """Number of leading pages already sent to the ranks' page tables."""
    prefix_node: Any = None
    """The :class:`.RadixNode` at which the shared pages end; None without shared pages."""

    @property
    def is_empty(self) -> bool:
        """Whether the table holds no pages and no prefix node."""
        return not self.pages and self.prefix_node is None
