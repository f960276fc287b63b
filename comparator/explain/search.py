"""Search: minimize a function of one number by grid search."""

from collections.abc import Callable

import numpy as np

_FIRST_GRID_SIZE = 49
"""Number of points of the first grid."""


def searched(off: Callable[[float], float], low: float, high: float) -> tuple[float, float]:
    """Return (argument in low..high with the smallest error, that error), by repeated geometric grids; ``low`` must be
    positive."""
    first = (low, high)
    best, error = low, float("inf")
    for _ in range(8):
        tried = np.geomspace(low, high, _FIRST_GRID_SIZE if (low, high) == first else 9)
        errors = [off(float(number)) for number in tried]
        at = int(np.argmin(errors))
        best, error = float(tried[at]), errors[at]
        low, high = float(tried[max(at - 1, 0)]), float(tried[min(at + 1, len(tried) - 1)])
    return best, error
