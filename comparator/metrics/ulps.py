"""ULP: how many representable numbers two values are apart."""

from typing import Any

import numpy as np

from tapscope.core import dtypes

Array = np.ndarray[Any, Any]

_WORDS = {1: (np.uint8, 0x80), 2: (np.uint16, 0x8000), 4: (np.uint32, 1 << 31), 8: (np.uint64, 1 << 63)}


def common_dtype(baseline: str, target: str) -> str | None:
    """The coarser of two floating types, in which both values are looked at; None where one is no such type, or has no
    sign."""
    names = [dtypes.COMPLEX.get(name, name) for name in (baseline, target)]
    if not all(map(dtypes.is_float, names)) or "float8_e8m0fnu" in names:
        return None
    return max(names, key=dtypes.epsilon)


def distances(baseline: Array, target: Array, dtype: str) -> Array:
    """[...] float64: steps from the one to the other through the numbers of ``dtype``, 0 between the two zeros.

    Both are rounded to ``dtype`` first. Places where either is not finite then give nothing: the result is flat and
    has the others only.
    """
    kind = dtypes.numpy_dtype(dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        one, two = (side.astype(kind, copy=False).reshape(-1) for side in (baseline, target))
        sound = np.isfinite(one) & np.isfinite(two)
    first, second = (_order(side[sound]) for side in (one, two))
    return np.asarray(np.abs(first - second))


def _order(values: Array) -> Array:
    """The numbers counted from zero. In float64: exact below 2^53, beyond that nobody looks at the last step."""
    word, sign = _WORDS[values.dtype.itemsize]
    bits = np.ascontiguousarray(values).view(word)
    size = (bits & word(sign - 1)).astype(np.float64)
    return np.asarray(np.where(bits >= word(sign), -size, size))
