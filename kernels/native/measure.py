"""How far two tensors are apart: per row, and in total. Both kinds merge, so blocks can be compared one by one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]

FLOATS = ("max_abs", "sum_abs", "sum_sq_diff", "sum_sq_baseline", "sum_sq_target", "dot")
INTEGERS = ("argmax", "equal", "over", "finite", "nonfinite_baseline", "nonfinite_target", "nonfinite_mismatch")


@dataclass(frozen=True, slots=True, kw_only=True)
class Measure:
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


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RowMeasures:
    """Two matrices compared row by row: one float64 or int64 array a field, one element a row.

    Differences and sums are over positions where both sides are finite; see :class:`Measure` for the counts.
    """

    max_abs: Array
    """Largest abs(difference); 0 where nothing is finite on both sides."""
    argmax: Array
    """Its first column; -1 where nothing is finite on both sides."""
    sum_abs: Array
    sum_sq_diff: Array
    sum_sq_baseline: Array
    sum_sq_target: Array
    dot: Array
    """Sum of baseline * target."""
    equal: Array
    over: Array
    finite: Array
    nonfinite_baseline: Array
    nonfinite_target: Array
    nonfinite_mismatch: Array
    width: Array
    """Elements of the row."""

    def __len__(self) -> int:
        return len(self.width)

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
        sums = {name: getattr(self, name) + getattr(other, name) for name in _ADDED}
        return RowMeasures(
            max_abs=np.where(better, other.max_abs, self.max_abs),
            argmax=np.where(better, column, self.argmax),
            **sums,
        )

    @staticmethod
    def concat(parts: "Sequence[RowMeasures]") -> "RowMeasures":
        """The rows of all parts, one below the other; no parts give no rows."""
        if len(parts) < 2:
            return parts[0] if parts else empty(0, 0)
        return RowMeasures(**{f.name: np.concatenate([getattr(p, f.name) for p in parts]) for f in fields(RowMeasures)})

    def total(self) -> Measure:
        """All rows as one."""
        count, finite = _sum(self.width), _sum(self.finite)
        distances = np.where(self.argmax >= 0, self.max_abs, -1.0)
        row = int(distances.argmax()) if len(distances) else -1
        row = row if row >= 0 and distances[row] >= 0.0 else -1
        diff, base, target, dot = map(_sum, (self.sum_sq_diff, self.sum_sq_baseline, self.sum_sq_target, self.dot))
        return Measure(
            max_abs=float(self.max_abs[row]) if row >= 0 else 0.0,
            worst_row=row,
            worst_col=int(self.argmax[row]) if row >= 0 else -1,
            mean_abs=_sum(self.sum_abs) / finite if finite else 0.0,
            rel_l2=relative_l2(diff, base),
            rel=_share(diff, base, target),
            cosine=_cosine(dot, base, target),
            count=count,
            finite=finite,
            **{name: _sum(getattr(self, name)) for name in _COUNTS},
        )


_COUNTS = ("equal", "over", "nonfinite_baseline", "nonfinite_target", "nonfinite_mismatch")
_ADDED = tuple(f.name for f in fields(RowMeasures) if f.name not in ("max_abs", "argmax"))


def empty(rows: int, width: int) -> RowMeasures:
    """Measures of ``rows`` rows before any column of their ``width`` was looked at."""
    floats = {name: np.zeros(rows, np.float64) for name in FLOATS}
    integers = {name: np.full(rows, -1 if name == "argmax" else 0, np.int64) for name in INTEGERS}
    return RowMeasures(**floats, **integers, width=np.full(rows, width, np.int64))


def _sum(values: Array) -> Any:
    """The sum as a Python number; a few are added faster without numpy."""
    return sum(values.tolist()) if len(values) <= 64 else values.sum().item()


def relative_l2(diff: float, base: float) -> float:
    """See :attr:`Measure.rel_l2`; both are sums of squares."""
    if base == 0.0 or math.isinf(diff):
        return 0.0 if diff == 0.0 else math.inf
    return math.sqrt(diff / base)


def _share(diff: float, base: float, target: float) -> float:
    whole = base + target
    if math.isinf(whole) or math.isinf(diff):
        return math.inf
    return diff / whole if whole else 0.0


def _cosine(dot: float, base: float, target: float) -> float:
    if base == 0.0 or target == 0.0:
        return 1.0 if base == target else 0.0
    if math.isinf(base) or math.isinf(target) or not math.isfinite(dot):
        return 0.0
    # Two roots: the product of the squares may leave float64 where neither does.
    return max(-1.0, min(1.0, dot / (math.sqrt(base) * math.sqrt(target))))
