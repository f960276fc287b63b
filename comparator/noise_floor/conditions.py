"""Conditions: by how much a module may enlarge the error of its inputs, learned from its likes in other layers."""

import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from tapscope.comparator.metrics.columns import hypot

Array = np.ndarray[Any, Any]

CONDITION = 4.0
"""k where no likes are known."""
CONDITION_TWIN = 2.5
"""k at most where inputs are equal bit for bit and so are the dtypes: there is nothing to amplify but summands."""
PRODUCTS = 2.0
"""k is this times larger of a function nobody saw that has parameters of its own (:meth:`.Graph.is_of_many`) where
errors are all in a few rows: a state space model multiplies what it adds, its step, decay and both gates, all made of
one row, where attention multiplies two."""
CONDITION_RANGE = (2.5, 6.0)
"""k is kept within this whatever the likes say."""
LIKES = 2.5
"""k is this times the median of what the likes show."""

_LAYER = re.compile(r"(?<=\.)\d+(?=[.:])")


def kind_of(site: str) -> str:
    """The same for one site of all layers."""
    return _LAYER.sub("*", site, count=1)


def observed_conditions(errors: Array, given: Array, base: Array) -> Array:
    """By how much the typical ``errors`` of modules exceed those of what they were ``given``."""
    found: Array = errors / hypot(given, base)
    return found


def learned_conditions(likes: Sequence[float]) -> list[float]:
    """k of each module of some that are conditioned alike in other layers, from the median of what the others show."""
    if len(likes) < 3:
        return [CONDITION] * len(likes)
    low, high = CONDITION_RANGE
    order = sorted(range(len(likes)), key=likes.__getitem__)
    middle = (len(likes) - 1) // 2
    upper = likes[order[middle + 1]], likes[order[middle]]  # without one below the middle, and without one above
    found = [CONDITION] * len(likes)
    for rank, index in enumerate(order):
        found[index] = min(max(LIKES * upper[rank > middle], low), high)
    return found
