"""Difference measures of two tensors, per row and in total. Both kinds merge, so tensors can be compared block by
block."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct

Array = np.ndarray[Any, Any]

FLOATS = ("max_abs", "sum_abs", "sum_sq_diff", "sum_sq_baseline", "sum_sq_target", "dot")
INTEGERS = (
    "argmax",
    "equal",
    "over",
    "finite",
    "nonfinite_baseline",
    "nonfinite_target",
    "nonfinite_mismatch",
    "width",
)


class Measure(Struct, frozen=True, gc=False):
    """Difference measures of two tensors. Differences and sums cover the positions where both sides are finite."""

    max_abs: float
    worst_row: int
    """Row of :attr:`max_abs`; -1 if no position is finite on both sides."""
    worst_col: int
    mean_abs: float
    rel_l2: float
    """sqrt(sum of squared differences / sum of squared baseline); 0 if both are zero, inf if only the baseline is."""
    rel: float
    """1 - 2 a.b / (a.a + b.b), from 0 to 2, as in SGLang's comparator and DeepGEMM's ``calc_diff``, but computed as (a
    - b).(a - b) / (a.a + b.b), which avoids cancellation; 0 if both sides are zero, 1 if only one is."""
    cosine: float
    """Cosine similarity; 1 if both sides are zero, 0 if only one is or if squares overflow float64 (``rel`` and
    ``rel_l2`` are then infinite)."""
    equal: int
    """Positions with the same value; NaN equals NaN and an infinity equals itself."""
    count: int
    over: int
    """Positions with abs(difference) > atol + rtol * abs(baseline), and every non-finite mismatch."""
    finite: int
    """Positions finite on both sides."""
    nonfinite_baseline: int
    nonfinite_target: int
    nonfinite_mismatch: int
    """Positions where the sides are not both finite, both NaN, or the same infinity."""

    @classmethod
    def of(cls, sums: "Sequence[float]", counts: "Sequence[int]", row: int, column: int) -> "Measure":
        """Build a measure from totals over all rows.

        ``sums`` is in the order of :data:`FLOATS`, with the largest difference first; ``counts`` is in the order of
        :data:`INTEGERS` without ``argmax``. ``row`` and ``column`` locate the largest difference (-1 if there is none).
        """
        equal, over, finite, nonfinite_baseline, nonfinite_target, mismatch, count = counts
        (mean,) = mean_abs(np.array([sums[1]]), np.array([finite])).tolist()
        (rel_l2,), (rel,), (cosine,) = (values.tolist() for values in relative(*np.array(sums[2:]).reshape(-1, 1)))
        return cls(
            sums[0],
            row,
            column,
            mean,
            rel_l2,
            rel,
            cosine,
            equal,
            count,
            over,
            finite,
            nonfinite_baseline,
            nonfinite_target,
            mismatch,
        )


def _field(name: str) -> Any:
    """Return a property that reads the named field from ``floats`` or ``integers``."""
    if name in FLOATS:
        real = FLOATS.index(name)
        return property(lambda self: self.floats[real])
    whole = INTEGERS.index(name)
    return property(lambda self: self.integers[whole])


class RowMeasures(Struct, eq=False):
    """Difference measures of two matrices, row by row: one float64 or int64 array per field, one element per row.

    Differences and sums cover the positions where both sides are finite; see :class:`Measure` for the counts.
    """

    floats: Array
    """[6, rows] float64, in the order of :data:`FLOATS`."""
    integers: Array
    """[8, rows] int64, in the order of :data:`INTEGERS`."""

    max_abs = _field("max_abs")
    """Largest abs(difference); 0 if no position is finite on both sides."""
    argmax = _field("argmax")
    """First column with :attr:`max_abs`; -1 if no position is finite on both sides."""
    sum_abs = _field("sum_abs")
    sum_sq_diff = _field("sum_sq_diff")
    sum_sq_baseline = _field("sum_sq_baseline")
    sum_sq_target = _field("sum_sq_target")
    dot = _field("dot")
    """Sum of baseline * target."""
    equal = _field("equal")
    over = _field("over")
    finite = _field("finite")
    nonfinite_baseline = _field("nonfinite_baseline")
    nonfinite_target = _field("nonfinite_target")
    nonfinite_mismatch = _field("nonfinite_mismatch")
    width = _field("width")
    """Elements per row."""

    def __len__(self) -> int:
        return int(self.floats.shape[1])

    def __getitem__(self, rows: slice) -> "RowMeasures":
        """Return the measures of a range of rows."""
        return RowMeasures(self.floats[:, rows], self.integers[:, rows])

    def __add__(self, other: "RowMeasures") -> "RowMeasures":
        """Append the columns of ``other`` on the right, for the same rows."""
        if not isinstance(other, RowMeasures):
            return NotImplemented
        return self.merge_columns(other, self.width)

    def merge_columns(self, other: "RowMeasures", offset: "int | Array") -> "RowMeasures":
        """Merge two column blocks of the same rows; column 0 of ``other`` is column ``offset`` of the result.

        Blocks may be merged in any order. Raises ValueError when the numbers of rows differ.
        """
        if len(self) != len(other):
            raise ValueError(f"column blocks must have the same rows, not {len(self)} and {len(other)}")
        column = np.where(other.argmax >= 0, other.argmax + offset, -1)
        earlier = (other.max_abs == self.max_abs) & (column < self.argmax)
        better = (column >= 0) & ((self.argmax < 0) | (other.max_abs > self.max_abs) | earlier)
        floats, integers = self.floats + other.floats, self.integers + other.integers
        floats[0] = np.where(better, other.max_abs, self.max_abs)
        integers[0] = np.where(better, column, self.argmax)
        return RowMeasures(floats, integers)

    @staticmethod
    def concat(parts: "Sequence[RowMeasures]") -> "RowMeasures":
        """Concatenate the rows of all parts; without parts, return no rows."""
        if len(parts) < 2:
            return parts[0] if parts else empty(0, 0)
        floats, integers = [part.floats for part in parts], [part.integers for part in parts]
        return RowMeasures(np.concatenate(floats, axis=1), np.concatenate(integers, axis=1))

    def sums(self) -> tuple[list[float], list[int], int, int]:
        """Return the arguments of :meth:`Measure.of`, reduced over all rows."""
        distances = np.where(self.argmax >= 0, self.max_abs, -1.0)
        row = int(distances.argmax()) if len(distances) else -1
        row = row if row >= 0 and distances[row] >= 0.0 else -1
        most, column = (float(self.max_abs[row]), int(self.argmax[row])) if row >= 0 else (0.0, -1)
        return [most, *map(_sum, self.floats[1:])], [*map(_sum, self.integers[1:])], row, column

    def total(self) -> Measure:
        """Return the measure over all rows."""
        return Measure.of(*self.sums())


def empty(rows: int, width: int) -> RowMeasures:
    """Return initial measures for ``rows`` rows of ``width`` columns, with no column compared yet."""
    integers = np.zeros((len(INTEGERS), rows), np.int64)
    integers[0], integers[-1] = -1, width
    return RowMeasures(np.zeros((len(FLOATS), rows)), integers)


def _sum(values: Array) -> Any:
    """Return the sum as a Python number; for few values this is faster without numpy."""
    return sum(values.tolist()) if len(values) <= 64 else values.sum().item()


def mean_abs(sum_abs: Array, finite: Array) -> Array:
    """Compute :attr:`Measure.mean_abs` for several pairs of tensors, given one sum and count per pair."""
    return np.divide(sum_abs, finite, out=np.zeros(len(finite)), where=finite > 0)


@np.errstate(all="ignore")
def relative(diff: Array, base: Array, target: Array, dot: Array) -> tuple[Array, Array, Array]:
    """Compute (``rel_l2``, ``rel``, ``cosine``) of :class:`Measure` from sums of squares and products, one element per
    pair."""
    return relative_l2(diff, base), _share(diff, base, target), _cosine(dot, base, target)


@np.errstate(all="ignore")
def relative_l2(diff: Array, base: Array) -> Array:
    """Compute :attr:`Measure.rel_l2` from sums of squares."""
    odd = np.where(diff == 0.0, 0.0, math.inf)
    return np.where((base == 0.0) | np.isinf(diff), odd, np.sqrt(diff / base))


def _share(diff: Array, base: Array, target: Array) -> Array:
    whole = base + target
    share = np.where(whole == 0.0, 0.0, diff / whole)
    return np.where(np.isinf(whole) | np.isinf(diff), math.inf, share)


def _cosine(dot: Array, base: Array, target: Array) -> Array:
    # Two square roots: the product of the squares may overflow float64 where neither square does.
    cosine = np.clip(dot / (np.sqrt(base) * np.sqrt(target)), -1.0, 1.0)
    cosine = np.where(np.isinf(base) | np.isinf(target) | ~np.isfinite(dot), 0.0, cosine)
    return np.where((base == 0.0) | (target == 0.0), np.where(base == target, 1.0, 0.0), cosine)
