"""Overview: histograms, profiles by channel and row, and metrics of all values of a table."""

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
from tapscope.dashboard.model.number import MISSING, Number, magnitude
from tapscope.dashboard.model.spans import even_spans
from tapscope.dashboard.model.value_table import ValueTable

Array = np.ndarray[Any, Any]

BINS = 40
"""Of the histogram of values."""
PROFILE_CELLS = 1000
"""Most cells of a profile; beyond, neighbouring channels or rows share one."""


@dataclass(frozen=True, slots=True)
class SharedBin:
    """A bin of several histograms with the same edges."""

    low: float
    high: float
    baseline: int
    target: int
    difference: int
    text: str


@dataclass(frozen=True, slots=True)
class ProfileCell:
    """A channel or a row, or several neighbouring ones, of which it shows the worst."""

    share: float | None
    """Its value ÷ the largest, from 0 to 1; null where a value is not finite."""
    text: str
    at: int
    """The channel or row with that value."""


@dataclass(frozen=True, slots=True)
class Overview:
    """Histograms, profiles and metrics of a table."""

    what: str
    """Of the profiles: ``max |Δ|`` of a pair, ``max |x|`` of one run."""
    values: tuple[SharedBin, ...]
    """Values of both sides on the same bins of equal width; their differences are not in it."""
    magnitudes: tuple[SharedBin, ...]
    """|baseline|, |target| and |difference| by powers of two, on the same bins; zeros are left out."""
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
    """Elements that are not finite, on either side."""


def overview(table: ValueTable) -> Overview:
    """Reads all values, and again for their histogram, whose range is known only then."""
    collected = _Accumulator(table)
    for row, left, right in table.chunks():
        collected.add(row, left, right)
    return collected.result()


class _Accumulator:
    """Collects an :class:`Overview` chunk by chunk, in float64."""

    def __init__(self, table: ValueTable) -> None:
        self._table = table
        self._channels = np.zeros(table.num_columns)
        self._channel_bad = np.zeros(table.num_columns, np.bool_)
        self._rows, self._row_bad = np.zeros(table.num_rows), np.zeros(table.num_rows, np.bool_)
        self._octaves: tuple[dict[int, int], ...] = ({}, {}, {})
        self._low, self._high, self._peak = math.inf, -math.inf, 0.0
        self._dot = self._left = self._right = self._delta = 0.0
        self._num = self._equal = self._bad = 0
        self._steps = StepHistogram()

    def add(self, row: int, left: Array, right: Array) -> None:
        """Add the rows from ``row`` on: [rows, columns] of baseline and target."""
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
        a, b = np.where(finite, a, 0.0), np.where(finite, b, 0.0)
        self._num, self._bad = self._num + finite.size, self._bad + int((~finite).sum())
        self._equal += int(equal.sum())
        for side in (a, b) if table.is_pair else (b,):
            self._low = min(self._low, float(side.min(initial=math.inf, where=finite)))
            self._high = max(self._high, float(side.max(initial=-math.inf, where=finite)))
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
        ulps = table.ulp_dtype
        steps = (self._steps.percentile(0.5), self._steps.percentile(0.99), self._steps.largest)
        return Overview(
            what="max |Δ|" if pair else "max |x|",
            values=tuple(self._value_bins()),
            magnitudes=tuple(self._octave_bins()),
            channels=_profile(self._channels, self._channel_bad, lambda i: f"channel {i}"),
            rows=_profile(self._rows, self._row_bad, table.label),
            cosine=_fixed(self._dot / norm) if pair and norm else MISSING,
            rel_l2=magnitude(math.sqrt(self._delta / self._left)) if pair and self._left else MISSING,
            max_abs=magnitude(self._peak),
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
        low, high = self._low, self._high
        if low > high:
            return
        bins = 1 if low == high else BINS
        counts = np.zeros((2, bins), np.int64)
        span = high / 4 - low / 4
        for _, left, right in self._table.chunks():
            for side, values in enumerate((left, right)):
                if side or self._table.is_pair:
                    kept = as_float64(values)
                    kept = kept[np.isfinite(kept)]
                    place = (kept / 4 - low / 4) / span * bins if span else np.zeros(len(kept))
                    at = np.clip(place, 0, bins - 1).astype(np.int64)
                    counts[side] += np.bincount(at, minlength=bins)
        for i in range(bins):
            a, b = (low * (1 - j / bins) + high * (j / bins) for j in (i, i + 1))
            yield _bin(a, b, int(counts[0, i]), int(counts[1, i]), 0, pair=self._table.is_pair)

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
    found = []
    for a, b in even_spans(len(values), PROFILE_CELLS):
        at = a + int(np.argmax(sizes[a:b]))
        text = "not finite" if bad[at] else number(float(values[at]))
        share = None if bad[at] else float(values[at]) / top if top else 0.0
        found.append(ProfileCell(share, f"{label(at)}: {text}", at))
    return tuple(found)


def _fixed(value: float) -> Number:
    return Number(value, f"{value:.6f}")


def _ulps(value: float) -> Number:
    return Number(value, f"{value:,.0f}")
