"""Ranges: sets of integers stored as spans, such as ``0-3,7`` or ``100-``."""

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

_SPAN = re.compile(r"\s*(\d{1,18})\s*(?:(-)\s*(\d{1,18})?\s*)?")
_END = sys.maxsize


@dataclass(frozen=True, slots=True)
class Ranges:
    """A set of integers: sorted, inclusive, non-adjacent (first, last) spans."""

    spans: tuple[tuple[int, int], ...]

    @classmethod
    def parse(cls, items: Iterable[Any]) -> "Ranges":
        """Parse items such as ``5``, ``"0-3"`` or ``"100-"`` (open-ended); raises ValueError for anything else."""
        spans = []
        for item in items:
            if isinstance(item, bool) or not isinstance(item, int | str):
                raise ValueError(f"{item!r} is not a number or range")
            match = _SPAN.fullmatch(str(item))
            if match is None:
                raise ValueError(f"{str(item)!r} is not a number or range such as 0-3, 7 or 100-")
            first = int(match[1])
            last = first if match[2] is None else _END if match[3] is None else int(match[3])
            if last < first:
                raise ValueError(f"range {item} ends before it begins")
            spans.append((first, last))
        return cls(_merged(spans))

    def __contains__(self, number: object) -> bool:
        return isinstance(number, int) and any(first <= number <= last for first, last in self.spans)

    def __str__(self) -> str:
        return ",".join(self.expressions())

    def expressions(self) -> list[str]:
        """Return the text of each span."""
        return [str(a) if a == b else f"{a}-" if b == _END else f"{a}-{b}" for a, b in self.spans]


def _merged(spans: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    if not spans:
        raise ValueError("expected at least one number")
    merged: list[tuple[int, int]] = []
    for first, last in sorted(spans):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(merged[-1][1], last))
        else:
            merged.append((first, last))
    return tuple(merged)
