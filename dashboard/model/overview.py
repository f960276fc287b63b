"""Overview of a table's values: histograms, profiles by channel and row, and metrics."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tapscope.comparator.metrics.detail import Histogram as StepHistogram
from tapscope.comparator.metrics.detail import distances
from tapscope.core import dtypes
from tapscope.core.formatting import number
from tapscope.dashboard.model.elementwise import as_float64, magnitudes
from tapscope.dashboard.model.number import MISSING, Number, fixed, magnitude
from tapscope.dashboard.model.spans import even_spans
from tapscope.dashboard.model.value_table import ValueTable

Array = np.ndarray[Any, Any]

BINS = 40
"""Maximum number of bins in the histogram of values."""
PROFILE_CELLS = 1000
"""Maximum number of cells in a profile; adjacent channels or rows share a cell if there are more."""


@dataclass(frozen=True, slots=True)
class SharedBin:
    """Histogram bin with the counts of both sides and of their difference."""

    low: float
    high: float
    baseline: int
    target: int
    difference: int
    text: str


@dataclass(frozen=True, slots=True)
class ProfileCell:
    """Cell of a profile: a channel or row, or the worst of several adjacent ones."""

    share: float | None
    """Value ÷ the largest value of the profile, from 0 to 1; None for a non-finite value."""
    text: str
    at: int
    """Index of the channel or row with that value."""


@dataclass(frozen=True, slots=True)
class Overview:
    """Histograms, profiles and metrics of a value table."""

    what: str
    """Measure of the profiles: ``max |Δ|`` of a pair, ``max |x|`` of a single run."""
    values: tuple[SharedBin, ...]
    """Histogram of both sides with bins of equal width, a power of two; differences are not counted."""
    magnitudes: tuple[SharedBin, ...]
    """Histogram of |baseline|, |target| and |difference|, one bin per power of two; zeros are left out."""
    channels: tuple[ProfileCell, ...]
    rows: tuple[ProfileCell, ...]
    cosine: Number
    rel_l2: Number
    max_abs: Number
    rms: Number
    equal: Number
    """Percentage of equal elements."""
    ulp_dtype: str
    ulp_median: Number
    ulp_p99: Number
    ulp_max: Number
    num_nonfinite: int
    """Number of elements that are non-finite on either side."""


def overview(table: ValueTable) -> Overview:
    """Compute the overview of a table in one pass over its values."""
    collected = _Accumulator(table)
    for row, left, right in table.chunks():
        collected.add(row, left, right)
    return collected.result()


class EqualBins:
    """Histogram of two sides with at most :data:`BINS` bins of equal width, a power of two.

    The width doubles and adjacent bins are summed when new values do not fit. The counts are therefore exact and do not
    depend on the order of the values or the chunk boundaries.
    """

    def __init__(self) -> None:
        self._low, self._high = math.inf, -math.inf
        self._exponent = -1022
        """log2 of the bin width; bin i starts at i · 2^exponent."""
        self._first = 0
        self._counts = np.zeros((2, 0), np.int64)

    def add(self, side: int, values: Array) -> None:
        """Count finite float64 values of side 0 (baseline) or 1 (target)."""
        if not values.size:
            return
        self._fit(min(self._low, float(values.min())), max(self._high, float(values.max())))
        at = _indices(values, self._exponent) - self._first
        self._counts[side] += np.bincount(at.ravel(), minlength=self._counts.shape[1])

    def bins(self) -> Iterator[tuple[float, float, int, int]]:
        """Yield lower edge, upper edge, and the counts of both sides per bin."""
        largest = np.finfo(np.float64).max
        with np.errstate(over="ignore"):
            edges = np.ldexp(np.arange(self._counts.shape[1] + 1) + float(self._first), self._exponent)
        edges = edges.clip(-largest, largest).tolist()
        for low, high, (left, right) in zip(edges, edges[1:], self._counts.T.tolist(), strict=False):
            yield low, high, left, right

    def _fit(self, low: float, high: float) -> None:
        if (low, high) == (self._low, self._high):
            return
        largest = max(abs(low), abs(high))
        exponent = max(self._exponent, math.frexp(largest)[1] - 53) if largest else self._exponent
        first, last = _indices(np.array([low, high]), exponent).tolist()
        while last - first >= BINS:
            exponent, first, last = exponent + 1, first >> 1, last >> 1
        counts = np.zeros((2, last - first + 1), np.int64)
        old = (np.arange(self._counts.shape[1]) + self._first) >> min(exponent - self._exponent, 63)
        for side in range(2):
            np.add.at(counts[side], old - first, self._counts[side])
        self._low, self._high, self._exponent, self._first, self._counts = low, high, exponent, first, counts


def _indices(values: Array, exponent: int) -> Array:
    """Return floor(value ÷ 2^exponent) as int64; a negative quotient that underflows yields -1."""
    indices = np.floor(np.ldexp(values, -exponent)).astype(np.int64)
    indices[(values < 0) & (indices >= 0)] = -1
    return indices


class _Accumulator:
    """Accumulates an :class:`Overview` in float64, chunk by chunk."""

    def __init__(self, table: ValueTable) -> None:
        self._table = table
        self._channels = np.zeros(table.num_columns)
        self._channel_bad = np.zeros(table.num_columns, np.bool_)
        self._rows, self._row_bad = np.zeros(table.num_rows), np.zeros(table.num_rows, np.bool_)
        self._octaves: tuple[dict[int, int], ...] = ({}, {}, {})
        self._bins, self._peak = EqualBins(), 0.0
        self._dot = self._left = self._right = self._delta = 0.0
        self._num = self._equal = self._bad = self._odd = 0
        self._steps = StepHistogram()

    def add(self, row: int, left: Array, right: Array) -> None:
        """Accumulate a chunk whose first row is ``row``: [rows, columns] of baseline and target."""
        table = self._table
        with np.errstate(all="ignore"):
            b = as_float64(right)
            a = as_float64(left) if table.is_pair else b
        finite = np.isfinite(a) & np.isfinite(b)
        sizes = np.where(finite, magnitudes(left, right, is_pair=table.is_pair), 0.0)
        end = row + len(b)
        channels = self._channels[: sizes.shape[1]]
        np.maximum(channels, sizes.max(0, initial=0.0), out=channels)
        self._rows[row:end] = sizes.max(1, initial=0.0)
        equal = (left == right) | (np.isnan(a) & np.isnan(b))
        bad = ~finite & ~equal if table.is_pair else ~finite
        self._channel_bad[: bad.shape[1]] |= bad.any(0)
        self._row_bad[row:end] = bad.any(1)
        for at, side in enumerate((a, b) if table.is_pair else (b,), start=0 if table.is_pair else 1):
            self._bins.add(at, side[np.isfinite(side)])
        a, b = np.where(finite, a, 0.0), np.where(finite, b, 0.0)
        self._num, self._bad = self._num + finite.size, self._bad + int((~finite).sum())
        self._equal += int(equal.sum())
        self._odd += int(bad.sum())
        with np.errstate(over="ignore"):
            self._dot, self._left = self._dot + float((a * b).sum()), self._left + float((a * a).sum())
            self._right, self._delta = self._right + float((b * b).sum()), self._delta + float((sizes * sizes).sum())
        self._peak = max(self._peak, float(sizes.max(initial=0.0)))
        for counts, values in zip(self._octaves, (a, b, sizes) if table.is_pair else ((), b, ()), strict=True):
            each = np.abs(np.asarray(values, np.float64))
            exponents, amounts = np.unique(np.frexp(each[each > 0])[1], return_counts=True)
            for exponent, amount in zip((exponents - 1).tolist(), amounts.tolist(), strict=True):
                counts[exponent] = counts.get(exponent, 0) + amount
        if table.ulp_dtype is not None:
            self._steps.add(distances(left, right, table.ulp_dtype))

    def result(self) -> Overview:
        table, pair = self._table, self._table.is_pair
        norm = math.sqrt(self._left) * math.sqrt(self._right)
        odd, ulps = pair and self._odd > 0, table.ulp_dtype  # the difference of a non-finite value is nan
        steps = (self._steps.percentile(0.5), self._steps.percentile(0.99), self._steps.largest)
        return Overview(
            what="max |Δ|" if pair else "max |x|",
            values=tuple(self._value_bins()),
            magnitudes=tuple(self._octave_bins()),
            channels=_profile(self._channels, self._channel_bad, lambda i: f"channel {i}"),
            rows=_profile(self._rows, self._row_bad, table.label),
            cosine=fixed(math.nan if odd else self._dot / norm) if pair and norm else MISSING,
            rel_l2=magnitude(math.nan if odd else math.sqrt(self._delta / self._left))
            if pair and self._left
            else MISSING,
            max_abs=magnitude(math.nan if odd else self._peak),
            rms=magnitude(math.sqrt(self._right / max(self._num - self._bad, 1))),
            equal=Number(100 * self._equal / self._num, f"{100 * self._equal / self._num:.1f} %")
            if pair and self._num
            else MISSING,
            ulp_dtype=dtypes.short(ulps) if ulps else "",
            ulp_median=_ulps(steps[0]) if ulps else MISSING,
            ulp_p99=_ulps(steps[1]) if ulps else MISSING,
            ulp_max=_ulps(steps[2]) if ulps else MISSING,
            num_nonfinite=self._bad,
        )

    def _value_bins(self) -> Iterator[SharedBin]:
        for low, high, left, right in self._bins.bins():
            yield _bin(low, high, left, right, 0, pair=self._table.is_pair)

    def _octave_bins(self) -> Iterator[SharedBin]:
        known = sorted({exponent for counts in self._octaves for exponent in counts})
        for exponent in range(known[0], known[-1] + 1) if known else ():
            amounts = [counts.get(exponent, 0) for counts in self._octaves]
            low, high = math.ldexp(1.0, exponent), math.ldexp(1.0, exponent + 1) if exponent < 1023 else math.inf
            yield _bin(low, high, *amounts, pair=self._table.is_pair)


def _bin(low: float, high: float, baseline: int, target: int, difference: int, *, pair: bool) -> SharedBin:
    text = f"{low:.2e} … {high:.2e}: "
    text += f"baseline {baseline:,}, target {target:,}" if pair else f"{target:,}"
    text += f", Δ {difference:,}" if difference else ""
    return SharedBin(low, high, baseline, target, difference, text)


def _profile(values: Array, bad: Array, label: Callable[[int], str]) -> tuple[ProfileCell, ...]:
    sizes = np.where(bad, np.inf, values)
    top = float(values.max(initial=0.0))
    cells = []
    for a, b in even_spans(len(values), PROFILE_CELLS):
        at = a + int(np.argmax(sizes[a:b]))
        text = "not finite" if bad[at] else number(float(values[at]))
        share = None if bad[at] else float(values[at]) / top if top else 0.0
        cells.append(ProfileCell(share, f"{label(at)}: {text}", at))
    return tuple(cells)


def _ulps(value: float) -> Number:
    return Number(value, f"{value:,.0f}")
