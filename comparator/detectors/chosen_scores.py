"""Chosen: what was chosen, and scores beside it, as rows of a site that both runs have."""

from typing import Any

import numpy as np
from msgspec import Struct

from tapscope.comparator.alignment.prepare import PairPreparer
from tapscope.comparator.assembly.read import read
from tapscope.comparator.metrics import chunks
from tapscope.comparator.pair_analysis.pair_result import PairResult

Array = np.ndarray[Any, Any]


class Rows(Struct, frozen=True):
    """Some rows of a site on both sides."""

    pairs: Array
    """[rows] row pair of each, ascending."""
    baseline: Array
    """[rows, width]"""
    target: Array


def rows_of(preparer: PairPreparer, one: PairResult, wanted: Array | None = None) -> Rows | None:
    """The wanted rows of a site, or those that are not equal; None where a row comes twice, or none does."""
    found: list[tuple[Array, Array, Array]] = []
    for chunk in chunks.rows(preparer.prepare(one.pair)):
        if chunk.join.pairs is None or chunk.baseline.shape != chunk.target.shape:
            return None
        pairs = chunk.join.pairs[chunk.row : chunk.row + len(chunk.baseline)]
        use = (chunk.baseline != chunk.target).any(1) if wanted is None else np.isin(pairs, wanted)
        left, right = chunk.baseline[use], chunk.target[use]
        if wanted is not None:
            left, right = left.astype(np.float64), right.astype(np.float64)
        found.append((pairs[use], left, right))
    if not found:
        return None
    pairs, baseline, target = map(np.concatenate, zip(*found, strict=True))
    order = np.argsort(pairs, kind="stable")
    pairs = pairs[order]
    if not len(pairs) or (pairs[1:] == pairs[:-1]).any():
        return None
    return Rows(pairs, baseline[order], target[order])


def masked(preparer: PairPreparer, one: PairResult) -> Rows | None:
    """The rows of a router's scores, zero but for the chosen, in which others were chosen, with the places of these,
    [rows, k]; None where they are no such scores."""
    found = rows_of(preparer, one, np.arange(preparer.row_map.num_pairs))
    if found is None or not len(found.pairs):
        return None
    kept = found.baseline != 0.0, found.target != 0.0
    counts = np.unique(np.concatenate([side.sum(1) for side in kept]))
    other = (kept[0] != kept[1]).any(1)
    if len(counts) != 1 or not 0 < counts[0] < found.baseline.shape[1] or not other.any():
        return None
    return Rows(found.pairs[other], kept[0][other], kept[1][other])


def numbers_of(chosen: Array) -> Array:
    """[rows, k] what was chosen: the numbers themselves, or the places of flags, [rows, n] bool."""
    if chosen.dtype != np.bool_:
        return chosen.astype(np.int64)
    most = int(chosen.sum(1).max(initial=0))
    places = np.argsort(~chosen, axis=1, kind="stable")[:, :most]
    return np.where(np.take_along_axis(chosen, places, 1), places, -1)


def vectors_of(preparer: PairPreparer, holder: PairResult) -> tuple[Array | None, Array | None]:
    """A vector's values on both sides, as they were first."""
    ready = preparer.prepare(holder.pair)
    one, two = (
        None if whole.piece is None or not whole.has_values else read(whole.piece, whole.run).astype(np.float64).ravel()
        for whole in (ready.left[0], ready.right[0])
    )
    return one, two
