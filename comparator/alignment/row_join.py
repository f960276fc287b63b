"""Row joins: match the rows of two sides by equal keys."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from msgspec import Struct

from tapscope.comparator.assembly.blocks import Rows
from tapscope.comparator.facts import RowCounts

Array = np.ndarray[Any, Any]


class RowJoin(Struct, frozen=True):
    """Rows of one baseline firing matched with rows of one target firing."""

    baseline: int
    """Index of the baseline firing."""
    target: int
    """Index of the target firing."""
    baseline_rows: Rows = slice(None)
    target_rows: Rows = slice(None)
    pairs: Array | None = None
    """[rows] index of each row pair in the RowMap; None when the tensors are compared whole."""
    aligned: bool = True
    """Whether every valid row matches the row at the same index, so that equal bytes imply equal rows."""


def row_numbers(firing: int, start: int, stop: int) -> Array:
    """Return row numbers for tensors compared whole, used in place of row pairs: -2 and below, distinct for each
    firing."""
    return -2 - (np.int64(firing) << 32) - np.arange(start, stop, dtype=np.int64)


class KeyedRows(Struct):
    """The comparable rows of one side as columns of equal length, and counts of the other rows."""

    keys: Array
    """[rows] matching key."""
    firing: Array
    rows: Array
    """[rows] index within the firing."""
    valid: dict[int, int]
    """Firing -> number of rows that are not padding."""
    num_forked: int
    num_unaligned: int
    slots: dict[int, int]
    """Firing -> number of slots of its step, padding included."""


def join_rows(left: KeyedRows, right: KeyedRows, num_pairs: int) -> list[RowJoin]:
    """Match rows of equal keys, starting a new join where the firing of either side changes.

    A key modulo ``num_pairs`` is a row pair.
    """
    first, second = matching_keys(left.keys, right.keys)
    order = np.lexsort((left.rows[first], left.firing[first], right.firing[second]))
    first, second = first[order], second[order]
    pair_of = np.stack([left.firing[first], right.firing[second]])
    cuts = [0, *(np.flatnonzero(np.any(pair_of[:, 1:] != pair_of[:, :-1], axis=0)) + 1).tolist(), len(first)]
    joins = []
    for start, end in pairwise(cuts):
        if start == end:
            continue
        mine, other = first[start:end], second[start:end]
        b, t = int(pair_of[0, start]), int(pair_of[1, start])
        rows_b, rows_t = left.rows[mine], right.rows[other]
        same = left.valid[b] == right.valid[t] == len(mine) and np.array_equal(rows_b, rows_t)
        joins.append(RowJoin(b, t, compact(rows_b), compact(rows_t), left.keys[mine] % num_pairs, same))
    return joins


def counts_of(left: KeyedRows, right: KeyedRows, joins: Sequence[RowJoin]) -> RowCounts:
    """Return the row counts of the joins: compared, forked, unaligned, and absent from the other side."""
    met = sum(len(join.pairs) for join in joins if join.pairs is not None)
    absent = len(left.keys) + len(right.keys) - 2 * met
    forked, unaligned = max(left.num_forked, right.num_forked), left.num_unaligned + right.num_unaligned
    return RowCounts(met, forked, unaligned, absent)


def compact(rows: Array) -> Rows:
    """Return increasing row indices as a slice if they are contiguous."""
    first, last = int(rows[0]), int(rows[-1])
    neighbours = last - first == len(rows) - 1 and bool(np.all(rows[1:] - rows[:-1] == 1))
    return slice(first, last + 1) if neighbours else rows


def indices(rows: Rows) -> Array:
    """Return the row indices of a slice or an array."""
    return np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows


def matching_keys(one: Array, two: Array) -> tuple[Array, Array]:
    """Return (indices into ``one``, indices into ``two``) of the common keys, sorted by key; a repeated key counts
    once.

    Keys are int64. The first occurrence represents a repeated key. Fast path: two runs of one batch have equal, ordered
    keys, which need no sort.
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
    """Return (index of each key's first occurrence, distinct keys), sorted by key.

    There may be millions of keys: numpy's ``intersect1d`` takes twice the memory.
    """
    order = np.argsort(keys, kind="stable")
    keys = keys[order]
    new = np.concatenate([np.ones(min(len(keys), 1), bool), keys[1:] != keys[:-1]])
    return (order, keys) if new.all() else (order[new], keys[new])
