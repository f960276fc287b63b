"""Hypothesis test: what a hypothesis predicts, and how much of the error that removes."""

from typing import Any, NamedTuple

import numpy as np

from tapscope.comparator.explain.error_region import ErrorRegion

Array = np.ndarray[Any, Any]

MIN_VALUES = 16
"""Values below which agreement may be chance, unless it is close, see :data:`MIN_BITS`."""
FEWEST = 2
"""Values below which nothing is said."""
MIN_BITS = 32.0
"""Of fewer than :data:`MIN_VALUES` values: each counts the bits by which the hypothesis comes closer."""
MIN_INTEGERS = 6
"""The same for integers: they agree exactly or not at all."""
MIN_CLOSER = 0.75
"""Share of the affected values that must come closer: a few large ones must not speak for all."""
ABOVE = 4.0
"""An error whose energy is not this many times that of rounding cannot be explained: nothing would be left over."""


class Hypothesis(NamedTuple):
    """One hypothesis with its numbers filled in."""

    name: str
    """Family; members of one family are no rivals."""
    sentence: str
    values: Array
    """[rows, columns] what the target would be at the error region; NaN where the hypothesis has nothing to say."""
    freedom: int = 0
    """0: nothing is fitted; 1: one number; 2: a number for each channel or token; 3: any order of the values."""
    discount: float = 1.0
    """Factor on the share, where the values agree in kind only."""


def explained_share(region: ErrorRegion, values: Array) -> float:
    """1 - |t - h|^2 / |t - b|^2, every row divided by its size, less the energy that rounding leaves; 0 to 1.

    Where the target is small beside the error, what is left over must be small beside the target: anything near 0
    removes the error of a value that was lost, and says nothing about where it went.
    """
    said = np.isfinite(values) & np.isfinite(region.after) & np.isfinite(region.before)
    enough = MIN_INTEGERS if region.sample.is_integer else FEWEST
    if said.sum() < enough or 4 * said.any(axis=1).sum() < len(said):
        return 0.0
    before, after, candidate = (np.where(said, v, 0.0) * region.weight for v in (region.before, region.after, values))
    floor = region.noise**2 * float((before**2).sum())
    old, new = np.abs(after - before), np.abs(after - candidate)
    total, rest = float((old**2).sum()), float((new**2).sum())
    if not np.isfinite(total + rest) or total <= ABOVE * floor or total == 0.0:
        return 0.0
    visible = old > 2.0 * region.noise * np.abs(before)
    if not visible.any() or float((new < old)[visible].mean()) < MIN_CLOSER:
        return 0.0
    if not region.sample.is_integer and said.sum() < MIN_VALUES and not _is_close(said, total, max(rest, floor)):
        return 0.0
    if rest <= floor:
        return 1.0
    whole = min(total - floor, float((after**2).sum()))
    return max(1.0 - (rest - floor) / whole, 0.0) if whole > 0.0 else 0.0


def _is_close(said: Array, total: float, rest: float) -> bool:
    """Whether few values agree so closely that it is no chance; energies of the error before and behind."""
    return rest == 0.0 or 0.5 * float(np.log2(total / rest)) * int(said.sum()) >= MIN_BITS


def residual_ratio(region: ErrorRegion, values: Array) -> float:
    """What is left of the error beside what rounding leaves, as root mean squares over all rows alike."""
    said = np.isfinite(values) & np.isfinite(region.after) & np.isfinite(region.before)
    before, after, candidate = (np.where(said, v, 0.0) * region.weight for v in (region.before, region.after, values))
    floor = region.noise * float(np.sqrt((before**2).sum()))
    rest = float(np.sqrt(((after - candidate) ** 2).sum()))
    return rest / floor if floor > 0.0 else (0.0 if rest == 0.0 else float("inf"))
