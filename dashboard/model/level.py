"""Magnitudes as digits, on the log scale of a heat map."""

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

Array = np.ndarray[Any, Any]

LEVELS = 9


@dataclass(frozen=True, slots=True)
class LevelScale:
    """Log scale with levels ``1`` to ``9``, evenly spaced from the smallest to the largest magnitude."""

    edges: tuple[float, ...] = ()
    """Smallest magnitudes of levels 2, 3, …; empty if all magnitudes are equal."""

    @classmethod
    def of(cls, magnitudes: Array) -> Self:
        """Build the scale of the finite positive magnitudes."""
        positive = magnitudes[np.isfinite(magnitudes) & (magnitudes > 0)]
        if not positive.size or positive.min() == positive.max():
            return cls()
        low, high = np.log10(positive.min()), np.log10(positive.max())
        return cls(tuple((10.0 ** (low + (high - low) * np.arange(1, LEVELS) / LEVELS)).tolist()))

    def glyph(self, top: float, *, bad: bool, zero: str) -> str:
        """Return one character: the level, ``%`` if ``bad``, ``zero`` for 0, ``·`` for nan."""
        if bad or top != top:
            return "%" if bad else "·"
        return zero if top == 0.0 else str(1 + bisect_right(self.edges, top))

    def glyphs(self, tops: Array, bad: Array, zero: str) -> list[str]:
        """Return one string per line of [lines, columns], with characters as of :meth:`glyph`."""
        glyphs = np.array(list("123456789"))[np.minimum(np.searchsorted(self.edges, tops, side="right"), LEVELS - 1)]
        for where, character in ((tops == 0.0, zero), (np.isnan(tops), "·"), (bad, "%")):
            glyphs[where] = character
        return list(map("".join, glyphs.tolist()))
