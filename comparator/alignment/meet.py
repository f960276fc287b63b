"""Meet: which rows of two sides have the same key."""

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def matching_keys(one: Array, two: Array) -> tuple[Array, Array]:
    """(indices into ``one``, into ``two``) of the keys that both hold, by key; of a key that comes twice the first.

    Both are int64. Two runs of one batch have equal keys in order, for which nothing has to be sorted.
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
    """(index of the first of each key, the keys), by key. There may be millions: numpy's own ``intersect1d`` takes
    twice the memory."""
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    new = np.concatenate([np.ones(min(len(keys), 1), bool), keys[1:] != keys[:-1]])
    return (order, keys) if new.all() else (order[new], keys[new])
