"""Quantiles of small arrays: numpy prepares its own for 20 to 40 microseconds, and every site needs several."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def median(values: Array) -> float:
    """The median of a one-dimensional array that is not empty; NaN where a value is."""
    ordered = np.sort(values)
    if ordered[-1] != ordered[-1]:  # NaN is sorted to the end
        return math.nan
    low, high = float(ordered[(len(ordered) - 1) // 2]), float(ordered[len(ordered) // 2])
    return low if low == high else low + (high - low) / 2.0


def quantiles(values: Array, shares: Sequence[float]) -> tuple[float, ...]:
    """The smallest values that are not below each share of an array that is not empty; NaN where a value is."""
    ordered = np.sort(values)
    if ordered[-1] != ordered[-1]:
        return (math.nan,) * len(shares)
    last = len(ordered) - 1
    return tuple(float(ordered[math.ceil(share * last)]) for share in shares)
