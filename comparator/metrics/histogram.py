"""Histogram of magnitudes on a logarithmic scale; two of them merge by adding their counts."""

import math
from typing import Any

import numpy as np
from msgspec import Struct, field

Array = np.ndarray[Any, Any]

_FRACTION_BITS = 4
"""Mantissa bits: sixteen bins per octave, so percentiles are accurate to 3 %, and integers up to 31 are exact."""
_SHIFT = 52 - _FRACTION_BITS
_NUM_BINS = 0x7FF << _FRACTION_BITS


class Histogram(Struct):
    """Counts of finite non-negative values by the leading bits of their float64 representation."""

    bins: Array = field(default_factory=lambda: np.zeros(_NUM_BINS, np.int64))
    largest: float = 0.0

    def add(self, values: Array) -> None:
        """Count ``values``, finite and non-negative, of any shape."""
        wide = np.ascontiguousarray(values, np.float64).reshape(-1)
        if wide.size:
            self.bins += np.bincount(wide.view(np.int64) >> _SHIFT, minlength=_NUM_BINS)
            self.largest = max(self.largest, float(wide.max()))

    def merge(self, other: "Histogram") -> None:
        """Add the counts of ``other``."""
        self.bins += other.bins
        self.largest = max(self.largest, other.largest)

    @property
    def count(self) -> int:
        """Number of values counted."""
        return int(self.bins.sum())

    def percentile(self, share: float) -> float:
        """The value that a fraction ``share`` (0 to 1) of all do not exceed, to the middle of its bin; 0 if nothing was
        counted."""
        total = np.cumsum(self.bins)
        if not total[-1]:
            return 0.0
        index = int(np.searchsorted(total, max(1, math.ceil(share * int(total[-1])))))
        low, high = (float(np.array([i << _SHIFT], np.int64).view(np.float64)[0]) for i in (index, index + 1))
        if index == 0:
            return 0.0
        middle = low if low == int(low) and low < 32 else (low + high) / 2
        return min(middle, self.largest)

    def octaves(self) -> tuple[tuple[int | None, int], ...]:
        """(exponent e, number of values in [2^e, 2^(e+1))), ascending; zeros and subnormals have None."""
        counts = self.bins.reshape(-1, 1 << _FRACTION_BITS).sum(1)
        found = np.flatnonzero(counts).tolist()
        return tuple((i - 1023 if i else None, int(counts[i])) for i in found)
