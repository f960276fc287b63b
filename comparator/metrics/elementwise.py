"""Elementwise arithmetic on the columns of many sites, bit-identical to Python's arithmetic on single values."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def hypot(*values: Array) -> Array:
    """Apply :func:`math.hypot` elementwise, exact to the last bit; NumPy uses the platform's function, which may not
    be."""
    shape = np.broadcast_shapes(*(each.shape for each in values))
    lists = [np.broadcast_to(each, shape).ravel().tolist() for each in values]
    return np.fromiter(map(math.hypot, *lists), np.float64, math.prod(shape)).reshape(shape)


def larger(one: Array | float, *others: Array | float) -> Array:
    """Return the elementwise maximum like ``max``: the first value unless another is larger, so a NaN counts only in
    ``one``."""
    largest = np.asarray(one)
    for other in others:
        largest = np.where(other > largest, other, largest)
    return largest


def smaller(one: Array | float, other: Array | float) -> Array:
    """Return the elementwise minimum like ``min``; see :func:`larger`."""
    return np.where(other < one, other, one)


def largest_in(values: Array, places: Sequence[Sequence[int]]) -> Array:
    """Return the maximum of each row of ``values`` over the ``places`` of each site, like ``max``, as [kinds, sites].

    A site without places gets 0.
    """
    largest = np.zeros((len(values), len(places)))
    lengths = np.fromiter(map(len, places), np.int64, len(places))
    at = np.fromiter((i for each in places for i in each), np.int64, int(lengths.sum()))
    some = lengths > 0
    if not some.any():
        return largest
    first = (np.cumsum(lengths) - lengths)[some]
    for row, kind in zip(values, largest, strict=True):
        given = row[at]
        most = np.fmax.reduceat(given, first)
        kind[some] = np.where(np.isnan(given[first]), np.nan, most)
    return largest
