"""Strips: pairs of matrices whose rows are compared, in the form that the native kernels take."""

from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct

from tapscope.core import dtypes
from tapscope.kernels.native import library

Array = np.ndarray[Any, Any]


class Summands(Struct, frozen=True, eq=False):
    """A side that is the sum of several matrices, computed row by row as (a + b) + c …, in ``dtype``."""

    dtype: np.dtype[Any]
    """float32, float64 or int64."""
    parts: tuple[Array, ...]
    """Summands of one shape and dtype, each with the layout of :attr:`Strip.baseline`."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of each summand."""
        shape: tuple[int, ...] = self.parts[0].shape
        return shape

    def __len__(self) -> int:
        return len(self.parts[0])

    def select(self, rows: Any) -> "Summands":
        """Return the summands restricted to some rows or columns."""
        return Summands(self.dtype, tuple([part[rows] for part in self.parts]))

    def total(self) -> Array:
        """Compute the sum in numpy."""
        total = self.parts[0].astype(self.dtype)
        for part in self.parts[1:]:
            np.add(total, part, out=total, dtype=self.dtype, casting="unsafe")
        return total


class Strip(NamedTuple):
    """A block of rows and columns of a comparison: row i of ``baseline`` is compared with row i of ``target``, or
    ``baseline_rows[i]`` with ``target_rows[i]``."""

    baseline: Any
    """[rows, width] with unit stride along the last axis and any stride between rows; :func:`.compare_strips` also
    accepts :class:`Summands`."""
    target: Any
    baseline_rows: Array | None = None
    """[pairs] int64."""
    target_rows: Array | None = None
    row: int = 0
    """Index of the strip's first row among all compared rows."""
    column: int = 0
    """Index of the strip's first column in the full width."""

    @property
    def num_rows(self) -> int:
        """Number of row pairs."""
        return len(self.baseline if self.baseline_rows is None else self.baseline_rows)


def native_sides(strip: Strip) -> tuple[Any, ...]:
    """Return both sides of a strip as the leading arguments of native functions."""
    (one, left), (two, right) = _native_side(strip.baseline), _native_side(strip.target)
    return one, two, left, right, strip.baseline_rows, strip.target_rows


def _native_side(side: Array | Summands) -> tuple[Any, int]:
    """Return (the argument for native code, dtype code of the matrix or of each summand)."""
    codes = library.CODES_BY_TYPE
    if isinstance(side, Summands):
        return (codes[side.dtype], *side.parts), codes[side.parts[0].dtype]
    return side, codes[side.dtype]


def checked(baseline: Array, target: Array, baseline_rows: Array | None, target_rows: Array | None) -> Strip:
    """Validate the arguments and return a strip; a complex element becomes two adjacent columns.

    Raises ValueError for invalid shapes, dtypes or strides, IndexError for a row that does not exist.
    """
    baseline, target = _matrix("baseline", baseline), _matrix("target", target)
    if baseline.shape[1] != target.shape[1]:
        raise ValueError(f"rows must have one width, not {baseline.shape[1]} (baseline) and {target.shape[1]} (target)")
    left = _row_index("baseline_rows", baseline_rows, len(baseline))
    right = _row_index("target_rows", target_rows, len(target))
    pairs = len(baseline) if left is None else len(left)
    others = len(target) if right is None else len(right)
    if pairs != others:
        raise ValueError(f"rows must pair up: {pairs} on the baseline side, {others} on the target side")
    return Strip(baseline, target, left, right)


def _matrix(name: str, array: Array) -> Array:
    if array.ndim != 2:
        raise ValueError(f"{name} must have shape [rows, width], not {array.shape}; reshape it first")
    if not array.dtype.isnative or (array.size and array.shape[1] > 1 and array.strides[1] != array.itemsize):
        raise ValueError(f"{name} must be native and have unit stride along its last axis; copy it first")
    if array.dtype.kind == "c":
        array = array.view(array.real.dtype)
    if array.dtype not in library.CODES_BY_TYPE:
        raise ValueError(f"{name} has dtype {array.dtype.name}; known: {', '.join(dtypes.NAMES)}")
    return array


def _row_index(name: str, rows: Array | None, limit: int) -> Array | None:
    if rows is None:
        return None
    rows = np.asarray(rows)
    if rows.dtype.kind not in "iu" and rows.size:
        raise ValueError(f"{name} must hold integers, not {rows.dtype.name}")
    rows = np.ascontiguousarray(rows, np.int64)
    if rows.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, not of shape {rows.shape}")
    if rows.size and not (rows.min() >= 0 and rows.max() < limit):
        raise IndexError(f"{name} holds {rows.min()}..{rows.max()}; rows run 0..{limit - 1}")
    return rows
