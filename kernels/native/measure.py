"""How far two tensors are apart: per row, and in total. Both kinds merge, so blocks can be compared one by one."""

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
    """Two tensors compared, in global numbers. Differences and sums are over positions where both are finite."""

    max_abs: float
    worst_row: int
    """Row of :attr:`max_abs`, -1 when no position is finite on both sides."""
    worst_col: int
    mean_abs: float
    rel_l2: float
    """sqrt(sum of squared differences / sum of squared baseline); 0 if both are zero, inf if only the baseline is."""
    rel: float
    """1 - 2 a.b / (a.a + b.b), from 0 to 2, as SGLang's comparator and DeepGEMM's ``calc_diff`` have it, but worked out
    as (a - b).(a - b) / (a.a + b.b), which does not cancel; 0 if both sides are zero, 1 if only one is."""
    cosine: float
    """1 if both sides are zero, 0 if only one is, or if squares leave float64 (which makes both ``rel`` infinite)."""
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
        """From the sums of :data:`FLOATS`, whose first is the largest difference, those of :data:`INTEGERS` but the
        first, and where the largest difference is (-1: nowhere)."""
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
    """A row of the matrix that holds it."""
    if name in FLOATS:
        real = FLOATS.index(name)
        return property(lambda self: self.floats[real])
    whole = INTEGERS.index(name)
    return property(lambda self: self.integers[whole])


class RowMeasures(Struct, eq=False):
    """Two matrices compared row by row: one float64 or int64 array a field, one element a row.

    Differences and sums are over positions where both sides are finite; see :class:`Measure` for the counts.
    """

    floats: Array
    """[6, rows] float64, in the order of :data:`FLOATS`."""
    integers: Array
    """[8, rows] int64, in the order of :data:`INTEGERS`."""

    max_abs = _field("max_abs")
    """Largest abs(difference); 0 where nothing is finite on both sides."""
    argmax = _field("argmax")
    """Its first column; -1 where nothing is finite on both sides."""
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
    """Elements of the row."""

    def __len__(self) -> int:
        return int(self.floats.shape[1])

    def __getitem__(self, rows: slice) -> "RowMeasures":
        """Some of the rows."""
        return RowMeasures(self.floats[:, rows], self.integers[:, rows])

    def __add__(self, other: "RowMeasures") -> "RowMeasures":
        """The columns of ``other`` to the right of ours, for the same rows."""
        if not isinstance(other, RowMeasures):
            return NotImplemented
        return self.merge_columns(other, self.width)

    def merge_columns(self, other: "RowMeasures", offset: "int | Array") -> "RowMeasures":
        """Both blocks of the same rows as one; column 0 of ``other`` is column ``offset`` of the whole.

        Blocks may come in any order. Raises ValueError when the numbers of rows differ.
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
        """The rows of all parts, one below the other; no parts give no rows."""
        if len(parts) < 2:
            return parts[0] if parts else empty(0, 0)
        floats, integers = [part.floats for part in parts], [part.integers for part in parts]
        return RowMeasures(np.concatenate(floats, axis=1), np.concatenate(integers, axis=1))

    def sums(self) -> tuple[list[float], list[int], int, int]:
        """The sums that :meth:`Measure.of` is computed from."""
        distances = np.where(self.argmax >= 0, self.max_abs, -1.0)
        row = int(distances.argmax()) if len(distances) else -1
        row = row if row >= 0 and distances[row] >= 0.0 else -1
        most, column = (float(self.max_abs[row]), int(self.argmax[row])) if row >= 0 else (0.0, -1)
        return [most, *map(_sum, self.floats[1:])], [*map(_sum, self.integers[1:])], row, column

    def total(self) -> Measure:
        """All rows as one."""
        return Measure.of(*self.sums())


def empty(rows: int, width: int) -> RowMeasures:
    """Measures of ``rows`` rows before any column of their ``width`` was looked at."""
    integers = np.zeros((len(INTEGERS), rows), np.int64)
    integers[0], integers[-1] = -1, width
    return RowMeasures(np.zeros((len(FLOATS), rows)), integers)


def _sum(values: Array) -> Any:
    """The sum as a Python number; a few are added faster without numpy."""
    return sum(values.tolist()) if len(values) <= 64 else values.sum().item()


def mean_abs(sum_abs: Array, finite: Array) -> Array:
    """See :attr:`Measure.mean_abs`; of several pairs, as what follows."""
    return np.divide(sum_abs, finite, out=np.zeros(len(finite)), where=finite > 0)


@np.errstate(all="ignore")
def relative(diff: Array, base: Array, target: Array, dot: Array) -> tuple[Array, Array, Array]:
    """(``rel_l2``, ``rel``, ``cosine``) of :class:`Measure`, from sums of squares and of products."""
    return relative_l2(diff, base), _share(diff, base, target), _cosine(dot, base, target)


@np.errstate(all="ignore")
def relative_l2(diff: Array, base: Array) -> Array:
    """See :attr:`Measure.rel_l2`; both are sums of squares."""
    odd = np.where(diff == 0.0, 0.0, math.inf)
    return np.where((base == 0.0) | np.isinf(diff), odd, np.sqrt(diff / base))


def _share(diff: Array, base: Array, target: Array) -> Array:
    whole = base + target
    share = np.where(whole == 0.0, 0.0, diff / whole)
    return np.where(np.isinf(whole) | np.isinf(diff), math.inf, share)


def _cosine(dot: Array, base: Array, target: Array) -> Array:
    # Two roots: the product of the squares may leave float64 where neither does.
    cosine = np.clip(dot / (np.sqrt(base) * np.sqrt(target)), -1.0, 1.0)
    cosine = np.where(np.isinf(base) | np.isinf(target) | ~np.isfinite(dot), 0.0, cosine)
    return np.where((base == 0.0) | (target == 0.0), np.where(base == target, 1.0, 0.0), cosine)
