"""Token ids of one request by position, stored in little more than 8 bytes each."""

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

_UNKNOWN = np.iinfo(np.int64).min
"""Marks an unknown id; smaller than any token id, see docs/reference/run-format.md."""
_PAGE = 64
_EMPTY = array("q", [_UNKNOWN]) * _PAGE


class TokenIds:
    """Map from position to token id; positions may have gaps."""

    __slots__ = ("_pages",)

    def __init__(self) -> None:
        self._pages: dict[int, array[int]] = {}
        """Page number -> ids of that page of positions."""

    def __len__(self) -> int:
        """Return the number of known ids."""
        return sum(_PAGE - page.count(_UNKNOWN) for page in self._pages.values())

    def __bool__(self) -> bool:
        return any(page != _EMPTY for page in self._pages.values())

    def __getitem__(self, position: int) -> int | None:
        """Return the id at a position; None if unknown."""
        number, at = divmod(position, _PAGE)
        page = self._pages.get(number)
        return None if page is None or page[at] == _UNKNOWN else page[at]

    def __setitem__(self, position: int, token: int) -> None:
        number, at = divmod(position, _PAGE)
        page = self._pages.get(number)
        if page is None:
            page = self._pages[number] = _EMPTY[:]
        page[at] = token

    def put(self, start: int, tokens: Sequence[int]) -> None:
        """Set the ids from position ``start`` on, replacing known ids."""
        done = 0
        while done < len(tokens):
            number, at = divmod(start + done, _PAGE)
            here = array("q", tokens[done : done + _PAGE - at])
            page = self._pages.setdefault(number, _EMPTY[:])
            page[at : at + len(here)] = here
            done += len(here)

    def changed(self, start: int, tokens: Sequence[int]) -> int | None:
        """Return the first position at which ``tokens``, placed at ``start``, contradict a known id; None if they
        agree."""
        for position, token in enumerate(tokens, start):
            known = self[position]
            if known is not None and known != token:
                return position
        return None

    def cut(self, position: int) -> None:
        """Drop the ids from ``position`` on."""
        first, at = divmod(position, _PAGE)
        for number in [number for number in self._pages if number >= first]:
            if number > first or not at:
                del self._pages[number]
            else:
                self._pages[number][at:] = _EMPTY[at:]

    def columns(self) -> tuple[Array, Array]:
        """Return (positions, ids) of all known ids as int64 arrays, by ascending position."""
        numbers = sorted(self._pages)
        ids = np.concatenate([np.empty(0, np.int64), *(np.frombuffer(self._pages[n], np.int64) for n in numbers)])
        positions = (np.array(numbers, np.int64)[:, None] * _PAGE + np.arange(_PAGE)).reshape(-1)
        known = ids != _UNKNOWN
        return positions[known], ids[known]

    def update(self, other: "TokenIds") -> None:
        """Copy all ids of ``other``, replacing known ids."""
        for number, page in other._pages.items():
            for at, token in enumerate(page):
                if token != _UNKNOWN:
                    self[number * _PAGE + at] = token

    def is_within(self, other: "TokenIds") -> bool:
        """Return whether ``other`` has all ids of this object, with equal values."""
        for number, page in self._pages.items():
            theirs = other._pages.get(number, _EMPTY)
            if page != theirs and any(a not in (_UNKNOWN, b) for a, b in zip(page, theirs, strict=True)):
                return False
        return True

    def shared(self, other: "TokenIds", shift: int = 0) -> tuple[Array, Array, Array]:
        """Return (positions known to both, own ids, ids of ``other``), by ascending position.

        Positions of ``other`` are ``shift`` higher than own positions.
        """
        (mine, left), (theirs, right) = self.columns(), other.columns()
        at = np.searchsorted(theirs, mine + shift)
        both = np.zeros(len(mine), bool)
        inside = at < len(theirs)
        both[inside] = theirs[at[inside]] == mine[inside] + shift
        return mine[both], left[both], right[at[both]]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TokenIds) and self._known_pages() == other._known_pages()

    __hash__ = None  # type: ignore[assignment]

    def _known_pages(self) -> dict[int, "array[int]"]:
        return {number: page for number, page in self._pages.items() if page != _EMPTY}
