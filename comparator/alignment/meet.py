"""Sorted intersection of the row keys of two sides."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def matching_keys(one: Array, two: Array) -> tuple[Array, Array]:
    """(indices into ``one``, indices into ``two``) of the common keys, sorted by key; of a repeated key the first.

    Both are int64. Two runs of one batch have equal keys in order, which needs no sort.
    """
    if np.array_equal(one, two) and bool((one[1:] > one[:-1]).all()):
        return np.arange(len(one)), np.arange(len(two))
    first, keys = _first_of_each(one)
    second, others = _first_of_each(two)
    if not len(keys):
        return first, second[:0]
    at = np.searchsorted(keys, others)
    at[at == len(keys)] = 0
    both = keys[at] == others
    return first[at[both]], second[both]


def _first_of_each(keys: Array) -> tuple[Array, Array]:
    """(index of the first occurrence of each key, the keys), sorted. There may be millions: numpy's ``intersect1d``
    takes twice the memory."""
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    new = np.concatenate([np.ones(min(len(keys), 1), bool), keys[1:] != keys[:-1]])
    return (order, keys) if new.all() else (order[new], keys[new])
