"""Deviation between two sides, reduced to the few numbers that decide whether rounding explains it."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tapscope.kernels.native import library
from tapscope.kernels.native.aggregate import quantiles, row_errors
from tapscope.kernels.native.compare import compare_strips
from tapscope.kernels.native.measure import RowMeasures
from tapscope.kernels.native.row_blocks import Strip, native_sides

Array = np.ndarray[Any, Any]


class Deviation(NamedTuple):
    """Deviation over all rows of a comparison. Without rows, every field is 0."""

    typical: float
    """Median row error, see :func:`.row_errors`, rounded up to an element. NaN if a row error is NaN."""
    worst: float
    """Largest row error; a value that is finite on one side only does not count."""
    power: float
    """Sum of the squares of the baseline."""
    dot: float
    """Sum of baseline * target."""
    num_elements: int
    width: int
    """Elements of the widest row."""
    num_unequal: int
    """Elements that differ."""
    num_mismatched: int
    """Elements where the sides are not both finite, both NaN, or the same infinity."""


def deviation(strips: Sequence[Strip], num_rows: int, share: float | None = None) -> Deviation:
    """Compare ``num_rows`` rows as :func:`.compare_strips` does, in one native call that reuses its buffers.

    With ``share``, :attr:`~Deviation.typical` is that quantile of the row errors, interpolated as in numpy, and
    ``power`` and ``dot`` are sums over the rows whose error is not larger. Raises ValueError and IndexError for invalid
    strips.
    """
    if sum({strip.row: strip.num_rows for strip in strips}.values()) != num_rows:
        raise ValueError(f"the strips do not fill {num_rows} rows")
    functions = library.functions()
    if functions is None:
        return deviation_reference(compare_strips(strips, num_rows).rows, share)
    given = [(*native_sides(strip), strip.row, strip.column) for strip in strips]
    return Deviation(*functions.deviation(given, num_rows, -1.0 if share is None else share))


@np.errstate(all="ignore")
def deviation_reference(rows: RowMeasures, share: float | None = None) -> Deviation:
    """Compute :func:`deviation` in numpy, from row measures."""
    if not len(rows):
        return Deviation(0.0, 0.0, 0.0, 0.0, 0, 0, 0, 0)
    errors = row_errors(rows)
    (median, worst) = quantiles(errors, (0.5, 1.0))
    typical = median if share is None or math.isnan(worst) else between(errors, share)
    kept = slice(None) if share is None else errors <= typical
    sums = float(rows.sum_sq_baseline[kept].sum()), float(rows.dot[kept].sum())
    counts = rows.width.sum(), rows.width.max(), (rows.width - rows.equal).sum(), rows.nonfinite_mismatch.sum()
    return Deviation(typical, worst, *sums, *map(int, counts))


def between(values: Array, share: float) -> float:
    """Return a quantile of an array without NaN, interpolated as in numpy; between equal infinities, that infinity."""
    place = share * (len(values) - 1)
    low = int(place)
    lower, upper = np.sort(values)[[low, math.ceil(place)]].tolist()
    value: float = lower if lower == upper else lower + (upper - lower) * (place - low)
    return value
