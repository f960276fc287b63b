"""ULPs: the number of representable values between two values."""

from typing import Any

import numpy as np

from tapscope.core import dtypes

Array = np.ndarray[Any, Any]

_WORDS = {1: (np.uint8, 0x80), 2: (np.uint16, 0x8000), 4: (np.uint32, 1 << 31), 8: (np.uint64, 1 << 63)}


def common_dtype(baseline: str, target: str) -> str | None:
    """The coarser of two floating-point dtypes, in which both values are compared; None if one is not floating point,
    or unsigned."""
    names = [dtypes.COMPLEX.get(name, name) for name in (baseline, target)]
    if not all(map(dtypes.is_float, names)) or "float8_e8m0fnu" in names:
        return None
    return max(names, key=dtypes.epsilon)


def distances(baseline: Array, target: Array, dtype: str) -> Array:
    """[...] float64: steps between the two values in ``dtype``, 0 between the two zeros.

    Both are rounded to ``dtype`` first. Positions where either is not finite are dropped, and the result is then flat.
    """
    kind = dtypes.numpy_dtype(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        one, two = (side.astype(kind, copy=False).reshape(-1) for side in (baseline, target))
        sound = np.isfinite(one) & np.isfinite(two)
    first, second = (_order(side[sound]) for side in (one, two))
    return np.asarray(np.abs(first - second))


def _order(values: Array) -> Array:
    """Ordinal of each number, counted from zero. In float64: exact below 2^53, which suffices."""
    word, sign = _WORDS[values.dtype.itemsize]
    bits = np.ascontiguousarray(values).view(word)
    size = (bits & word(sign - 1)).astype(np.float64)
    return np.asarray(np.where(bits >= word(sign), -size, size))
