"""Hypothesis test: the prediction of a hypothesis, and the share of the error that it explains."""

from typing import Any, NamedTuple

import numpy as np

from tapscope.comparator.explain.error_region import ErrorRegion

Array = np.ndarray[Any, Any]

MIN_VALUES = 16
"""With fewer values, agreement may be chance unless it is close: see :data:`MIN_BITS`."""
MIN_VALUES_OF_ANY = 2
"""Minimum number of values for any hypothesis."""
MIN_BITS = 32.0
"""Evidence required from fewer than :data:`MIN_VALUES` values: bits by which the error shrinks, summed over values."""
MIN_INTEGERS = 6
"""Minimum number of integers, which agree exactly or not at all."""
MIN_CLOSER = 0.75
"""Minimum fraction of affected values whose error must shrink, so that a few large values do not decide."""
MIN_ENERGY = 4.0
"""Minimum energy of the error relative to rounding; any hypothesis explains a smaller error."""


class Hypothesis(NamedTuple):
    """One hypothesis with its fitted numbers and its prediction."""

    name: str
    """Name of the family; members of one family do not compete."""
    sentence: str
    values: Array
    """[rows, columns] predicted target values in the error region; NaN where nothing is predicted."""
    freedom: int = 0
    """0: nothing is fitted; 1: one number; 2: one number per channel or token; 3: any order of the values."""
    discount: float = 1.0
    """Factor on the explained share if the prediction only shows that the kind of error is right."""


def explained_share(region: ErrorRegion, values: Array) -> float:
    """Return 1 - |t - h|^2 / |t - b|^2, with rows divided by their norms and the energy of rounding subtracted; 0 to 1.

    If the target is small relative to the error, the residual must be small relative to the target: otherwise any
    prediction near 0 would explain a lost value.
    """
    predicted = np.isfinite(values) & np.isfinite(region.after) & np.isfinite(region.before)
    enough = MIN_INTEGERS if region.sample.is_integer else MIN_VALUES_OF_ANY
    if predicted.sum() < enough or 4 * predicted.any(axis=1).sum() < len(predicted):
        return 0.0
    before, after, candidate = (
        np.where(predicted, v, 0.0) * region.weight for v in (region.before, region.after, values)
    )
    floor = region.noise**2 * float((before**2).sum())
    old, new = np.abs(after - before), np.abs(after - candidate)
    total, rest = float((old**2).sum()), float((new**2).sum())
    if not np.isfinite(total + rest) or total <= MIN_ENERGY * floor or total == 0.0:
        return 0.0
    visible = old > 2.0 * region.noise * np.abs(before)
    if not visible.any() or float((new < old)[visible].mean()) < MIN_CLOSER:
        return 0.0
    if (
        not region.sample.is_integer
        and predicted.sum() < MIN_VALUES
        and not is_close(int(predicted.sum()), total, max(rest, floor))
    ):
        return 0.0
    if rest <= floor:
        return 1.0
    whole = min(total - floor, float((after**2).sum()))
    return max(1.0 - (rest - floor) / whole, 0.0) if whole > 0.0 else 0.0


def is_close(count: int, total: float, rest: float) -> bool:
    """Return whether few values agree too closely for chance.

    ``count`` is the number of values minus the number of fitted ones, ``total`` and ``rest`` are the energies of error
    and residual.
    """
    return rest == 0.0 or 0.5 * float(np.log2(total / rest)) * count >= MIN_BITS


def residual_ratio(region: ErrorRegion, values: Array) -> float:
    """Return the norm of the residual relative to that of rounding, with equally weighted rows."""
    predicted = np.isfinite(values) & np.isfinite(region.after) & np.isfinite(region.before)
    before, after, candidate = (
        np.where(predicted, v, 0.0) * region.weight for v in (region.before, region.after, values)
    )
    floor = region.noise * float(np.sqrt((before**2).sum()))
    rest = float(np.sqrt(((after - candidate) ** 2).sum()))
    return rest / floor if floor > 0.0 else (0.0 if rest == 0.0 else float("inf"))
