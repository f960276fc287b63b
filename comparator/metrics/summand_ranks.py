"""Faulty ranks: find the only rank with an error, in its columns (shards) or in its partial sum."""

from typing import Any

import numpy as np

from tapscope.comparator.alignment.layout import Layout
from tapscope.comparator.alignment.prepare import PreparedPair
from tapscope.comparator.assembly.assemble import AssembledTensor
from tapscope.comparator.assembly.blocks import Rows, blocks
from tapscope.comparator.assembly.pieces import Summed, leaves
from tapscope.comparator.metrics.joined_rows import part_at
from tapscope.comparator.metrics.measure import MeasuredPair

Array = np.ndarray[Any, Any]

MAX_OTHERS_SHARE = 0.1
"""Maximum share of the squared error of all other ranks together, which is their rounding."""


def faulty_rank(measured: MeasuredPair, row: int, ready: PreparedPair) -> int | None:
    """Return the rank that alone has the error of a measured row of sums.

    Returns None if several ranks have the error, or the runs are sharded differently.
    """
    part = part_at(measured.parts, row)
    join, at = part.join, row - part.first
    left = _summands(ready.left[join.baseline], ready.layouts[0], _row(join.baseline_rows, at))
    right = _summands(ready.right[join.target], ready.layouts[1], _row(join.target_rows, at))
    if len(right) < 2 or left.keys() != right.keys() or any(left[r].shape != right[r].shape for r in right):
        return None
    errors = {rank: float(np.square(right[rank] - left[rank]).sum()) for rank in right}
    worst = max(errors, key=lambda rank: errors[rank])
    others = sum(error for rank, error in errors.items() if rank != worst)
    return worst if others <= MAX_OTHERS_SHARE * errors[worst] < np.inf and errors[worst] > 0.0 else None


def is_only_faulty_rank(measured: MeasuredPair, row: int, ready: PreparedPair, rank: int, floor: float) -> bool:
    """Return whether the columns of all other ranks in a measured row are correct.

    Their error must be at most ``floor`` relative to themselves, or a small share of the error of ``rank``. True for a
    row on a single rank.
    """
    part = part_at(measured.parts, row)
    join, at = part.join, row - part.first
    sides = (ready.left[join.baseline], join.baseline_rows), (ready.right[join.target], join.target_rows)
    left, right = (
        [(b.rank, np.asarray(b.rows(_row(rows, at))[0], np.float64)) for b in blocks(whole.piece, whole.run, axes)]
        if whole.piece is not None
        else []
        for (whole, rows), axes in zip(sides, (layout.axes for layout in ready.layouts), strict=True)
    )
    values = np.concatenate([part for _, part in left]) if left else np.zeros(0)
    if len(values) != sum(len(part) for _, part in right) or any(holder is None for holder, _ in right):
        return True
    sums: dict[int, Array] = {}
    first = 0
    for holder, part_ in right:
        mine = values[first : first + len(part_)]
        first += len(part_)
        assert holder is not None
        sums[holder] = sums.get(holder, np.zeros(2)) + np.array([np.square(part_ - mine).sum(), np.square(mine).sum()])
    errors = {holder: float(np.sqrt(off / max(size, 1e-300))) for holder, (off, size) in sums.items()}
    limit = max(floor, MAX_OTHERS_SHARE * errors.get(rank, 0.0))
    return all(error <= limit for holder, error in errors.items() if holder != rank)


def _row(rows: Rows, at: int) -> Array:
    return np.array([(rows.start or 0) + at if isinstance(rows, slice) else int(rows[at])])


def _summands(whole: AssembledTensor, layout: Layout, row: Array) -> dict[int, Array]:
    """Return rank -> its partial sum of the row; empty if ranks do not hold partial sums, or several records form
    one."""
    parts = whole.piece.parts if isinstance(whole.piece, Summed) else ()
    by_rank: dict[int, Array] = {}
    for piece in parts:
        records = list(leaves(piece))
        if len(records) != 1:
            return {}
        values = [np.asarray(b.rows(row)[0]) for b in blocks(piece, whole.run, layout.axes)]
        by_rank[records[0].key.rank] = np.concatenate(values).astype(np.float64)
    return by_rank
