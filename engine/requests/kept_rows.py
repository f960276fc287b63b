"""KeptRows: rows of the accepted branch of a draft tree, which every rank moves to their final cache slots."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class KeptRows:
    """The accepted rows of one request after a step that verified a tree of drafts."""

    request: str
    row: int
    """The request's row in the page table."""
    position: int
    """Position of the request's first row in the step."""
    rows: Sequence[int]
    """Indices of the accepted rows among the request's rows of the step, in order of position."""
    slots: Sequence[Sequence[Sequence[int]]]
    """For each cache group, (source slot, destination slot) in the pool for each accepted row that must move."""

    def plain(self) -> list[Any]:
        """Return the fields as message values, in the order of the constructor's arguments."""
        return list(astuple(self))
