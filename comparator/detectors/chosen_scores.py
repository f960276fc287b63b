"""Rows of choices, and of the scores behind these choices, for sites that both runs have."""

from typing import Any

import numpy as np
from msgspec import Struct

from tapscope.comparator.alignment.prepare import PairPreparer
from tapscope.comparator.alignment.row_join import row_numbers
from tapscope.comparator.assembly.read import read
from tapscope.comparator.metrics import chunks
from tapscope.comparator.pair_analysis.pair_result import PairResult

Array = np.ndarray[Any, Any]


class Rows(Struct, frozen=True):
    """Selected rows of a site on both sides."""

    pairs: Array
    """[rows]: row pair of each row, or the row number in a tensor compared as a whole; ascending."""
    baseline: Array
    """[rows, width]: values of the baseline."""
    target: Array


def rows_of(
    preparer: PairPreparer, result: PairResult, wanted: Array | None = None, *, every: bool = False
) -> Rows | None:
    """Read the ``wanted`` rows of a site, or ``every`` row; by default the rows that differ.

    Returns None if there are no such rows, or if a row occurs twice. Rows of tensors compared as a whole are identified
    by row number.
    """
    parts: list[tuple[Array, Array, Array]] = []
    for chunk in chunks.rows(preparer.prepare(result.pair)):
        if chunk.baseline.shape != chunk.target.shape:
            return None
        stop = chunk.row + len(chunk.baseline)
        if chunk.join.pairs is None:
            pairs = row_numbers(chunk.join.baseline, chunk.row, stop)
        else:
            pairs = chunk.join.pairs[chunk.row : stop]
        differ = (chunk.baseline != chunk.target).any(1)
        use = np.ones(len(pairs), bool) if every else differ if wanted is None else np.isin(pairs, wanted)
        left, right = chunk.baseline[use], chunk.target[use]
        if wanted is not None or every:
            left, right = left.astype(np.float64), right.astype(np.float64)
        parts.append((pairs[use], left, right))
    if not parts:
        return None
    pairs, baseline, target = map(np.concatenate, zip(*parts, strict=True))
    order = np.argsort(pairs, kind="stable")
    pairs = pairs[order]
    if not len(pairs) or (pairs[1:] == pairs[:-1]).any():
        return None
    return Rows(pairs, baseline[order], target[order])


def masked(preparer: PairPreparer, result: PairResult) -> Rows | None:
    """Read the expert choices from router scores that are 0 for all experts that were not selected.

    Returns the rows in which the runs selected different experts, as flags [rows, experts]. Returns None for any other
    scores.
    """
    rows = rows_of(preparer, result, every=True)
    if rows is None or not len(rows.pairs):
        return None
    kept = rows.baseline != 0.0, rows.target != 0.0
    counts = np.unique(np.concatenate([side.sum(1) for side in kept]))
    other = (kept[0] != kept[1]).any(1)
    if len(counts) != 1 or not 0 < counts[0] < rows.baseline.shape[1] or not other.any():
        return None
    return Rows(rows.pairs[other], kept[0][other], kept[1][other])


def numbers_of(chosen: Array) -> Array:
    """Return the indices of the choices, [rows, k], from indices or from flags [rows, n]."""
    if chosen.dtype != np.bool_:
        return chosen.astype(np.int64)
    most = int(chosen.sum(1).max(initial=0))
    places = np.argsort(~chosen, axis=1, kind="stable")[:, :most]
    return np.where(np.take_along_axis(chosen, places, 1), places, -1)


def largest(scores: Array, count: int) -> Array:
    """Return the ascending indices of the ``count`` largest scores in each row of [rows, n], as [rows, count]."""
    return np.sort(np.argpartition(scores, -count, axis=1)[:, -count:], axis=1)


def vectors_of(preparer: PairPreparer, holder: PairResult) -> tuple[Array | None, Array | None]:
    """Read the values of a vector in both runs, at its first firing."""
    ready = preparer.prepare(holder.pair)
    one, two = (
        None if whole.piece is None or not whole.has_values else read(whole.piece, whole.run).astype(np.float64).ravel()
        for whole in (ready.left[0], ready.right[0])
    )
    return one, two
