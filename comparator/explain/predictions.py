"""Predictions: of causes that say what the target computed, the one that gives its values down to rounding."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from tapscope.comparator.explain.error_region import ErrorRegion
from tapscope.comparator.explain.hypothesis_test import MIN_VALUES

Array = np.ndarray[Any, Any]

FITS = 4.0
"""What a cause leaves may be this many times what rounding leaves."""
BEYOND = 3.0
"""The error itself must be this many times what a cause may leave, or it is too small to distinguish causes."""
APART = 4.0
"""Energy that the second best leaves, beside the best one: less is no clear answer."""


class Prediction(NamedTuple):
    """What the target would be if a cause were right."""

    name: str
    sentence: str
    values: Array
    """[affected rows, affected columns]."""
    cost: int
    """How much of it was chosen freely: of several that fit the cheapest is meant."""


class SelectedCause(NamedTuple):
    """The claim that holds."""

    name: str
    sentence: str
    share: float


def select_prediction(region: ErrorRegion, predictions: Iterable[Prediction], noise: float) -> SelectedCause | None:
    """The one claim that gives the target within ``noise``, a relative error; None where none or several do."""
    judged = [
        (_left(region, prediction.values), prediction.cost, number, prediction)
        for number, prediction in enumerate(predictions)
    ]
    total = _left(region, region.before)
    limit = FITS * noise
    if not judged or not total > BEYOND * limit:
        return None
    best = min(left for left, *_ in judged)
    if not best <= limit:
        return None
    good = sorted(one for one in judged if one[0] ** 2 <= max(APART * best**2, noise**2))
    good.sort(key=lambda one: one[1])
    if len(good) > 1 and good[1][1] == good[0][1] and good[1][3].name != good[0][3].name:
        return None
    left, _, _, prediction = good[0]
    return SelectedCause(prediction.name, prediction.sentence, max(1.0 - (left / total) ** 2, 0.0))


def _left(region: ErrorRegion, values: Array) -> float:
    """Root mean square of what is left, each row divided by its size; infinite where little is said."""
    said = np.isfinite(values) & np.isfinite(region.after)
    if said.sum() < MIN_VALUES or said.mean() < 0.9:
        return float("inf")
    off = np.where(said, values - region.after, 0.0) * region.weight
    size = np.where(said, region.after, 0.0) * region.weight
    energy = float((size**2).sum())
    rest = float((off**2).sum())
    return (rest / energy) ** 0.5 if energy > 0.0 else (0.0 if rest == 0.0 else float("inf"))
