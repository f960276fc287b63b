"""Element-wise arithmetic on both sides of a table: float64, differences, magnitudes."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def is_integer(values: Array) -> bool:
    """Whether these are integers or bools, which are subtracted and shown exactly; true of int4 too."""
    return values.dtype.kind in "iub" or "int" in values.dtype.name


def as_float64(values: Array) -> Array:
    """float64 of any dtype; of complex numbers their magnitudes."""
    if values.dtype.kind == "c":
        values = np.abs(values)
    return np.asarray(values.astype(np.float64))


def difference(left: Array, right: Array) -> Array:
    """right - left; integers exactly, 0 where both are equal or both are nan."""
    if is_integer(left) and is_integer(right):
        if np.uint64 in (left.dtype.type, right.dtype.type):
            exact = [[int(b) - int(a) for a, b in zip(*pair, strict=True)] for pair in zip(left, right, strict=True)]
            return np.array(exact, object).reshape(left.shape)
        return np.asarray(right.astype(np.int64) - left.astype(np.int64))
    if left.dtype.kind == "c" or right.dtype.kind == "c":
        return np.asarray(right.astype(np.complex128) - left.astype(np.complex128))
    a, b = left.astype(np.float64), right.astype(np.float64)
    return np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, b - a)


def magnitudes(left: Array, right: Array, *, is_pair: bool) -> Array:
    """float64: |right - left| of a pair, |right| of one run."""
    with np.errstate(all="ignore"):
        return np.abs(as_float64(difference(left, right) if is_pair else right))
