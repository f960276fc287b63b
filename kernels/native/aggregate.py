"""Aggregation of row measures: totals over all rows, and the distribution of row errors."""

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from msgspec import Struct

from tapscope.kernels.native import library
from tapscope.kernels.native.measure import FLOATS, INTEGERS, Measure, RowMeasures, mean_abs, relative

Array = np.ndarray[Any, Any]

QUANTILES = (0.5, 0.9, 0.98, 1.0)
"""Quantiles of the row errors, from the typical row to the worst."""
SMALL_ROW = 0.25
"""Floor for the size of a row, as a share of the median nonzero row. The error of a smaller row is divided by that
floor, because the direction of such a row is noise."""
MIN_ROW_ELEMENTS = 8
"""Rows of at most this many elements are never measured against less than the median row.

Short rows, such as a router's logits, are small only because their sums cancel; their rounding error is as large as
that of other rows.
"""
_ERROR_FIELDS = ("element", "gain", "gain_sd", "peak")
_LAYOUT = np.dtype(  # struct Overview in aggregate.cpp
    [
        ("sums", "f8", len(FLOATS)),
        ("quantiles", "f8", len(QUANTILES)),
        *((name, "f8") for name in _ERROR_FIELDS),
        ("counts", "i8", len(INTEGERS)),
        ("row", "i8"),
        ("worst", "i8"),
        ("num_unequal", "i8"),
    ]
)


class Overview(Struct, frozen=True):
    """Statistics of one section of rows."""

    total: Measure
    errors: Array
    """[rows] float64: norm of the row's difference / norm of the baseline row; inf where only the target is nonzero."""
    worst: int
    """The first row with the largest error; a mismatch of non-finite values ranks above any error."""
    num_unequal: int
    """Number of rows with at least one unequal element."""
    is_zero: bool
    """Whether the squares of all differences are 0; the fields below are then 0 as well."""
    quantiles: tuple[float, ...]
    """Quantiles of :attr:`errors`, at :data:`QUANTILES`."""
    element: float
    """Median over rows: largest difference in the row / max(baseline at that element, rms of the row)."""
    gain: float
    """Median over rows of (baseline . target) / (baseline . baseline) - 1: a common scale of the target."""
    gain_sd: float
    """Spread of the per-row gain (1.4826 x median absolute deviation)."""
    peak: float
    """Maximum over rows of the ratio whose median is :attr:`element`."""


class Overviews(Struct, frozen=True, eq=False):
    """Statistics of several sections of rows, one array element per section."""

    columns: Array
    """[sections]: the fields of :class:`Overview`, and the sums and counts of its total."""
    errors: Array
    """[rows] float64: row errors of all sections."""
    bounds: Sequence[int]

    def __len__(self) -> int:
        return len(self.columns)

    def __iter__(self) -> Iterator[Overview]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, section: int) -> Overview:
        values = self.columns[section]
        column, *others = values["counts"].tolist()
        sums, row = values["sums"].tolist(), values["row"].item()
        return Overview(
            Measure.of(sums, others, row, column if row >= 0 else -1),
            self.errors_of(section),
            values["worst"].item(),
            values["num_unequal"].item(),
            not sums[2],
            tuple(values["quantiles"].tolist()),
            *(values[name].item() for name in _ERROR_FIELDS),
        )

    def errors_of(self, section: int) -> Array:
        """Return :attr:`Overview.errors` of one section."""
        return self.errors[self.bounds[section] : self.bounds[section + 1]]

    @property
    def is_zero(self) -> Array:
        """[sections] bool, see :attr:`Overview.is_zero`."""
        is_zero: Array = self.columns["sums"][:, 2] == 0.0
        return is_zero

    def means(self) -> tuple[Array, Array, Array, Array]:
        """Return ``mean_abs``, ``rel_l2``, ``rel`` and ``cosine`` of each section's :class:`Measure`."""
        _, sum_abs, *squares = self.columns["sums"].T
        return mean_abs(sum_abs, self.columns["counts"][:, 3]), *relative(*squares)

    def spreads(self) -> tuple[list[tuple[float, ...]], list[float], list[float], list[float], list[float]]:
        """Return ``quantiles``, ``element``, ``gain``, ``gain_sd`` and ``peak`` of each section."""
        element, gain, gain_sd, peak = (self.columns[name].tolist() for name in _ERROR_FIELDS)
        return list(map(tuple, self.columns["quantiles"].tolist())), element, gain, gain_sd, peak


def overview(rows: RowMeasures, at_worst: Array) -> Overview:
    """Compute the statistics of all rows as one section; at least one row is required.

    ``at_worst`` is the baseline value at each row's largest difference, [rows] float64.
    """
    return overviews(rows, at_worst, [0, len(rows)])[0]


def overviews(rows: RowMeasures, at_worst: Array, bounds: Sequence[int]) -> Overviews:
    """Compute the statistics of several sections; section i covers rows ``bounds[i]`` to ``bounds[i + 1]``.

    All statistics of an empty section are 0.
    """
    functions, errors = library.functions(), np.empty(len(rows))
    if functions is None:
        return _overviews_reference(rows, at_worst, bounds)
    floats, integers = np.ascontiguousarray(rows.floats), np.ascontiguousarray(rows.integers)
    at_worst = np.ascontiguousarray(at_worst, np.float64)
    buffer = functions.overviews(floats, integers, at_worst, np.array(bounds, np.int64), errors)
    return Overviews(np.frombuffer(buffer, _LAYOUT), errors, bounds)


# ---- numpy reference, also the fallback where no library was built


def _overviews_reference(rows: RowMeasures, at_worst: Array, bounds: Sequence[int]) -> Overviews:
    columns, errors = np.zeros(len(bounds) - 1, _LAYOUT), np.empty(len(rows))
    for at, (first, stop) in enumerate(pairwise(bounds)):
        one = overview_reference(rows[first:stop], at_worst[first:stop])
        sums, counts, row, column = rows[first:stop].sums()
        spread = (getattr(one, name) for name in _ERROR_FIELDS)
        columns[at] = (sums, one.quantiles, *spread, (column, *counts), row, one.worst, one.num_unequal)
        errors[first:stop] = one.errors
    return Overviews(columns, errors, bounds)


@np.errstate(all="ignore")
def overview_reference(rows: RowMeasures, at_worst: Array) -> Overview:
    """Compute :func:`overview` in numpy."""
    errors = row_errors(rows)
    if not len(rows):
        return Overview(rows.total(), errors, 0, 0, True, (0.0,) * len(QUANTILES), 0.0, 0.0, 0.0, 0.0)
    worst = int(np.argmax(np.where(rows.nonfinite_mismatch > 0, np.inf, errors)))
    unequal = int((rows.equal < rows.width).sum())
    if not rows.sum_sq_diff.any():
        return Overview(rows.total(), errors, worst, unequal, True, (0.0,) * len(QUANTILES), 0.0, 0.0, 0.0, 0.0)
    rms = np.sqrt(rows.sum_sq_baseline / np.maximum(rows.width, 1))
    element = ratio(rows.max_abs, np.maximum(np.abs(at_worst), np.maximum(rms, least_size(rms, rows.width))))
    gains = np.divide(rows.dot, rows.sum_sq_baseline, out=np.ones(len(rows)), where=rows.sum_sq_baseline > 0) - 1
    gain = median(gains)
    return Overview(
        rows.total(),
        errors,
        worst,
        unequal,
        False,
        quantiles(errors, QUANTILES),
        median(element),
        gain,
        1.4826 * median(np.abs(gains - gain)),
        float(element.max()),
    )


def row_errors(rows: RowMeasures) -> Array:
    """Return the relative error of each row, [rows] float64; inf where only the target is nonzero."""
    return ratio(np.sqrt(rows.sum_sq_diff), row_scales(rows))


def row_scales(rows: RowMeasures) -> Array:
    """Return the denominators of :func:`row_errors`, [rows] float64: the norm of the baseline row, at least
    :func:`least_size`."""
    size = np.sqrt(rows.sum_sq_baseline)
    scales: Array = np.maximum(size, least_size(size, rows.width))
    return scales


def least_size(sizes: Array, widths: Array) -> float:
    """Return the lower bound on row sizes: :data:`SMALL_ROW` of the median nonzero row.

    If no row has more than :data:`MIN_ROW_ELEMENTS` elements, the bound is at least the median over all rows. Returns 0
    if all rows are zero, NaN if a size is NaN.

    Zero rows are excluded because they carry no information about the scale of the others: a ReLU may zero more than
    half of the rows of an image, each a few pixels wide. The remaining rows still carry the rounding error of the
    ReLU's inputs.
    """
    nonzero = sizes[sizes != 0.0]
    if not len(nonzero):
        return 0.0
    least = SMALL_ROW * median(nonzero)
    return max(least, median(sizes)) if int(widths.max()) <= MIN_ROW_ELEMENTS else least


def ratio(part: Array, whole: Array) -> Array:
    """Divide elementwise; 0 where both are 0 and inf where only ``whole`` is 0."""
    missing = np.where(part > 0, np.inf, 0.0)
    return np.divide(part, whole, out=missing, where=whole > 0)


def median(values: Array) -> float:
    """Return the median of a non-empty one-dimensional array; NaN if a value is NaN.

    ``np.median`` has a fixed overhead of 20 to 40 microseconds.
    """
    at = (len(values) - 1) // 2, len(values) // 2
    ordered = np.partition(values, (*at, len(values) - 1))
    if ordered[-1] != ordered[-1]:  # NaN comes last
        return math.nan
    low, high = float(ordered[at[0]]), float(ordered[at[1]])
    return low if low == high else low + (high - low) / 2.0


def quantiles(values: Array, shares: Sequence[float]) -> tuple[float, ...]:
    """Return the quantiles of a non-empty array, rounded up to an element; NaN if a value is NaN."""
    ordered = np.sort(values)
    if ordered[-1] != ordered[-1]:
        return (math.nan,) * len(shares)
    last = len(ordered) - 1
    return tuple(float(ordered[math.ceil(share * last)]) for share in shares)
