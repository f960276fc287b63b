"""KeptRows: the rows of an accepted branch of a draft tree, which every rank moves to their positions."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class KeptRows:
    """Rows that one request keeps of a step that verified a tree of its drafts."""

    request: str
    row: int
    """Row of the page table."""
    position: int
    """Position of the first row of the step."""
    rows: Sequence[int]
    """The kept ones among the request's rows of the step, in order of position."""
    slots: Sequence[Sequence[Sequence[int]]]
    """For each cache group: (slot in the pool, slot to move it to) of each kept row that is stored elsewhere."""

    def plain(self) -> list[Any]:
        """As message values; the inverse of calling the class with them."""
        return list(astuple(self))
