"""Element-wise arithmetic on both sides of a value table: float64 conversion, differences, magnitudes."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def is_integer(values: Array) -> bool:
    """Return whether the dtype is bool or integer, including int4; such values are subtracted and displayed exactly."""
    return values.dtype.kind in "iub" or "int" in values.dtype.name


def as_float64(values: Array) -> Array:
    """Convert any dtype to float64; complex numbers to their magnitudes."""
    if values.dtype.kind == "c":
        values = np.abs(values)
    return np.asarray(values.astype(np.float64))


def difference(left: Array, right: Array) -> Array:
    """Return right - left: exact for integers, 0 where the sides are equal or both nan."""
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
    """Return |right - left| of a pair, or |right| of a single run, as float64."""
    with np.errstate(all="ignore"):
        return np.abs(as_float64(difference(left, right) if is_pair else right))
