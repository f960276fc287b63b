"""Detail: metrics measured on demand, by reading the values of a pair again in chunks."""

import math
import re
from typing import Any

import numpy as np
from msgspec import Struct, field

from tapscope.comparator.alignment.prepare import PreparedPair
from tapscope.comparator.metrics import chunks
from tapscope.comparator.metrics.ranking import LogitsAgreement, RouterAgreement, agreement_of, choice_of
from tapscope.core import dtypes

Array = np.ndarray[Any, Any]

_WORDS = {1: (np.uint8, 0x80), 2: (np.uint16, 0x8000), 4: (np.uint32, 1 << 31), 8: (np.uint64, 1 << 63)}


_FRACTION_BITS = 4
"""Mantissa bits of a bin: with sixteen bins per octave, percentiles are accurate to 3 %, and integers up to 31 are
exact."""
_SHIFT = 52 - _FRACTION_BITS
_NUM_BINS = 0x7FF << _FRACTION_BITS


PERCENTILES = (0.01, 0.05, 0.5, 0.95, 0.99)
NUM_CHANNELS = 5
"""Number of listed channels, the worst first."""
_MAX_COLUMNS = 1 << 20
"""Number of columns above which they are elements of a flat tensor rather than channels."""
_LOGITS = re.compile(r"(?:(?:^|\.)(?:lm_head|output_layer):out(?:\[0\])?|:out\[logits\])$")
_ROUTER = re.compile(r"\.(?:router|gate|wg)(?:\.[a-z_]*linear|\.layer)?:out(?:\[(?:0|router_logits)\])?$")


class ChannelError(Struct, frozen=True):
    """Error of one channel."""

    index: int
    max_abs: float
    rel_l2: float
    """Norm of the channel's differences / norm of its baseline; inf if only the baseline is zero."""


class Detail(Struct, frozen=True):
    """Detailed metrics; differences cover positions that are finite on both sides, in float64."""

    percentiles: tuple[tuple[float, float], ...]
    """(fraction, value that this fraction of the absolute differences does not exceed, to 3 %)."""
    histogram: tuple[tuple[int | None, int], ...]
    """(e, number of differences in [2^e, 2^(e+1))); e is None for equal elements."""
    ulp_dtype: str | None = None
    """The coarser dtype, in which ULPs are counted; None for values that are not floating-point."""
    ulp_max: float | None = None
    ulp_p99: float | None = None
    channels: tuple[ChannelError, ...] = ()
    """The worst channels; empty for a single row or column."""
    logits: LogitsAgreement | None = None
    router: RouterAgreement | None = None


def is_logits(site: str) -> bool:
    """Return whether the site's name is that of logits."""
    return _LOGITS.search(site) is not None


def is_router(site: str) -> bool:
    """Return whether the site's name is that of a router's scores."""
    return _ROUTER.search(site) is not None


def detail_of(ready: PreparedPair, site: str, k: int | None = None) -> Detail:
    """Compute the detailed metrics of a pair with values on both sides.

    ``k`` is the number of experts per token, if known. Raises RunCorruptError if bytes are missing.
    """
    dtype = common_dtype(ready.left[0].dtype or "", ready.right[0].dtype or "")
    differences, steps, channels = Histogram(), Histogram(), _Channels()
    for chunk in chunks.columns(ready):
        with np.errstate(invalid="ignore"):
            a, b = chunk.baseline.astype(np.float64), chunk.target.astype(np.float64)
        sound = np.isfinite(a) & np.isfinite(b)
        a, b = np.where(sound, a, 0.0), np.where(sound, b, 0.0)
        difference = np.abs(b - a)
        differences.add(difference[sound])
        channels.add(chunk.column, difference, a)
        if dtype is not None:
            steps.add(distances(chunk.baseline, chunk.target, dtype))
    return Detail(
        percentiles=tuple((share, differences.percentile(share)) for share in PERCENTILES),
        histogram=differences.octaves(),
        ulp_dtype=dtype,
        ulp_max=None if dtype is None else steps.largest,
        ulp_p99=None if dtype is None else steps.percentile(0.99),
        channels=channels.worst(),
        logits=agreement_of(ready) if dtype is not None and is_logits(site) else None,
        router=choice_of(ready, k) if dtype is not None and k and is_router(site) else None,
    )


class _Channels:
    """Maximum difference, and sums of squares of differences and baseline, for each column."""

    def __init__(self) -> None:
        self._sums = np.zeros((3, 0))
        self._rows = 0

    def add(self, column: int, difference: Array, baseline: Array) -> None:
        """Add rows of the columns that start at ``column``."""
        end = column + difference.shape[1]
        if end > _MAX_COLUMNS or not len(difference):
            return
        if end > self._sums.shape[1]:
            self._sums = np.pad(self._sums, ((0, 0), (0, end - self._sums.shape[1])))
        part = self._sums[:, column:end]
        np.maximum(part[0], difference.max(0), out=part[0])
        part[1] += (difference * difference).sum(0)
        part[2] += (baseline * baseline).sum(0)
        self._rows += len(difference) if column == 0 else 0

    def worst(self) -> tuple[ChannelError, ...]:
        """Return the channels with the largest relative error; among equal ones, the first."""
        largest, diff, base = self._sums
        if self._rows < 2 or len(largest) < 2:
            return ()
        errors = np.sqrt(np.divide(diff, base, out=np.where(diff > 0, np.inf, 0.0), where=base > 0))
        order = np.argsort(-errors, kind="stable")[:NUM_CHANNELS]
        return tuple(ChannelError(int(i), float(largest[i]), float(errors[i])) for i in order if errors[i] > 0)


class Histogram(Struct):
    """Counts of finite non-negative values by the leading bits of their float64 representation."""

    bins: Array = field(default_factory=lambda: np.zeros(_NUM_BINS, np.int64))
    largest: float = 0.0

    def add(self, values: Array) -> None:
        """Count ``values``, which must be finite and non-negative, of any shape."""
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
        """Number of counted values."""
        return int(self.bins.sum())

    def percentile(self, share: float) -> float:
        """Return the value that a fraction ``share`` (0 to 1) of all values does not exceed, to the middle of its bin.

        Returns 0 if no value was counted.
        """
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
        """Return (exponent e, number of values in [2^e, 2^(e+1))), ascending; e is None for zeros and subnormals."""
        counts = self.bins.reshape(-1, 1 << _FRACTION_BITS).sum(1)
        filled = np.flatnonzero(counts).tolist()
        return tuple((i - 1023 if i else None, int(counts[i])) for i in filled)


def common_dtype(baseline: str, target: str) -> str | None:
    """Return the coarser of two floating-point dtypes, in which both values are compared.

    Returns None if one of the dtypes is not floating-point, or unsigned.
    """
    names = [dtypes.COMPLEX.get(name, name) for name in (baseline, target)]
    if not all(map(dtypes.is_float, names)) or "float8_e8m0fnu" in names:
        return None
    return max(names, key=dtypes.epsilon)


def distances(baseline: Array, target: Array, dtype: str) -> Array:
    """Return the number of ULPs between the two values in ``dtype``, float64; the two zeros have distance 0.

    Both values are first rounded to ``dtype``. The result is flat, without positions where either value is nonfinite.
    """
    kind = dtypes.numpy_dtype(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        one, two = (side.astype(kind, copy=False).reshape(-1) for side in (baseline, target))
        sound = np.isfinite(one) & np.isfinite(two)
    first, second = (_order(side[sound]) for side in (one, two))
    return np.asarray(np.abs(first - second))


def _order(values: Array) -> Array:
    """Return the ordinal of each number, counted from zero, in float64: exact below 2^53, which suffices."""
    word, sign = _WORDS[values.dtype.itemsize]
    bits = np.ascontiguousarray(values).view(word)
    size = (bits & word(sign - 1)).astype(np.float64)
    return np.asarray(np.where(bits >= word(sign), -size, size))
