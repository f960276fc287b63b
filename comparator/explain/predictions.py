"""Predictions: among several causes, select the cause that reproduces the target's values up to rounding."""

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np

from tapscope.comparator.explain.error_region import ErrorRegion
from tapscope.comparator.explain.hypothesis_test import MIN_VALUES, MIN_VALUES_OF_ANY, is_close
from tapscope.comparator.verdict.explanation import Tested

Array = np.ndarray[Any, Any]

MAX_ROUNDING_RATIO = 4.0
"""Maximum residual of a cause, relative to the rounding error."""
MIN_ERROR_RATIO = 3.0
"""Minimum error relative to the accepted residual; a smaller error does not distinguish causes."""
MIN_ENERGY_RATIO = 4.0
"""Minimum residual energy of the second best cause, relative to that of the best."""


class Prediction(NamedTuple):
    """The target values that a cause predicts."""

    name: str
    sentence: str
    values: Array
    """[affected rows, affected columns] predicted values."""
    cost: int
    """Number of fitted parameters; the cheapest of several causes that fit wins."""


def select_prediction(region: ErrorRegion, predictions: Iterable[Prediction], noise: float) -> Tested | None:
    """Return the only cause that reproduces the target within the relative error ``noise``; None if none or several
    do."""
    judged = [
        (_residual_norm(region, prediction.values), prediction.cost, number, prediction)
        for number, prediction in enumerate(predictions)
    ]
    total = _residual_norm(region, region.before)
    limit = MAX_ROUNDING_RATIO * noise
    if not judged or not total > MIN_ERROR_RATIO * limit:
        return None
    best = min(left for left, *_ in judged)
    if not best <= limit:
        return None
    good = sorted(one for one in judged if one[0] ** 2 <= max(MIN_ENERGY_RATIO * best**2, noise**2))
    good.sort(key=lambda one: one[1])
    if len(good) > 1 and good[1][1] == good[0][1] and good[1][3].name != good[0][3].name:
        return None
    left, _, _, prediction = good[0]
    count = int((np.isfinite(prediction.values) & np.isfinite(region.after)).sum())
    if count < MIN_VALUES and not is_close(count - prediction.cost, total**2, max(left, noise) ** 2):
        return None
    return Tested(prediction.name, prediction.sentence, max(1.0 - (left / total) ** 2, 0.0))


def _residual_norm(region: ErrorRegion, values: Array) -> float:
    """Return the relative norm of the residual, with rows divided by their norms; inf if too few values are
    predicted."""
    predicted = np.isfinite(values) & np.isfinite(region.after)
    if predicted.sum() < MIN_VALUES_OF_ANY or predicted.mean() < 0.9:
        return float("inf")
    off = np.where(predicted, values - region.after, 0.0) * region.weight
    size = np.where(predicted, region.after, 0.0) * region.weight
    energy = float((size**2).sum())
    rest = float((off**2).sum())
    return (rest / energy) ** 0.5 if energy > 0.0 else (0.0 if rest == 0.0 else float("inf"))
