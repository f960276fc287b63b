"""LevelScale: magnitudes as characters, on the log scale of a heat map."""

from bisect import bisect_right
from dataclasses import dataclass
from typing import Any, Self

import numpy as np

Array = np.ndarray[Any, Any]

LEVELS = 9


@dataclass(frozen=True, slots=True)
class LevelScale:
    """Levels ``1`` to ``9``, evenly spaced between the logarithms of the smallest and the largest magnitude."""

    edges: tuple[float, ...] = ()
    """Smallest magnitude of level 2, 3, …; empty where all are of one size."""

    @classmethod
    def of(cls, magnitudes: Array) -> Self:
        """The scale of the finite ones above 0."""
        positive = magnitudes[np.isfinite(magnitudes) & (magnitudes > 0)]
        if not positive.size or positive.min() == positive.max():
            return cls()
        low, high = np.log10(positive.min()), np.log10(positive.max())
        return cls(tuple((10.0 ** (low + (high - low) * np.arange(1, LEVELS) / LEVELS)).tolist()))

    def glyph(self, top: float, *, bad: bool, zero: str) -> str:
        """A magnitude as one character: ``%`` where it is ``bad``, ``zero`` for 0, ``·`` for nan."""
        if bad or top != top:
            return "%" if bad else "·"
        return zero if top == 0.0 else str(1 + bisect_right(self.edges, top))

    def glyphs(self, tops: Array, bad: Array, zero: str) -> list[str]:
        """[lines, columns] as one string a line, each character as :meth:`glyph`."""
        glyphs = np.array(list("123456789"))[np.minimum(np.searchsorted(self.edges, tops, side="right"), LEVELS - 1)]
        for where, character in ((tops == 0.0, zero), (np.isnan(tops), "·"), (bad, "%")):
            glyphs[where] = character
        return list(map("".join, glyphs.tolist()))
