"""PageTable: the pages of one request in one group of layers."""

from dataclasses import dataclass, field
from typing import Any


def max_request_pages(num_positions: int, page_size: int, window: int | None) -> int:
    """Pages that a request of ``num_positions`` needs at most at one time, if layers look back ``window`` positions.

    A window may start and end within a page; one more page takes the next rows. None: they look back at all positions.
    """
    whole = -(-num_positions // page_size)
    return whole if window is None else min(whole, -(-window // page_size) + 2)


@dataclass(slots=True, eq=False)
class PageTable:
    """State of one request in a :class:`~tapscope.engine.scheduling.page_group.PageGroup`, which sets all fields."""

    pages: list[int] = field(default_factory=list)
    """Page numbers in order of position."""
    num_shared_pages: int = 0
    """Leading pages that the prefix cache owns."""
    num_freed_pages: int = 0
    """Leading pages freed because they are out of the window."""
    num_sent_pages: int = 0
    """Leading pages that the ranks have in their page tables."""
    prefix_node: Any = None
    """The :class:`.RadixNode` at which the shared pages end; None while there are none."""

    @property
    def is_empty(self) -> bool:
        """Whether it holds no page."""
        return not self.pages and self.prefix_node is None
