"""Summand ranks: which rank's summand is off, where both runs hold what their ranks added up."""

from typing import Any

import numpy as np

from tapscope.comparator.alignment.layout import Layout
from tapscope.comparator.alignment.prepare import Prepared
from tapscope.comparator.assembly.assemble import Whole
from tapscope.comparator.assembly.blocks import Rows, blocks
from tapscope.comparator.assembly.pieces import Summed, leaves
from tapscope.comparator.measures.joined_rows import part_at
from tapscope.comparator.measures.measure import Measured

Array = np.ndarray[Any, Any]

OTHERS = 0.1
"""All other ranks together may have this share of the squared error: their rounding."""


def odd_rank(measured: Measured, row: int, ready: Prepared) -> int | None:
    """The rank that alone has the error of a measured row of sums; None where that is not one, or the runs were not
    split in the same way."""
    part = part_at(measured.parts, row)
    join, at = part.join, row - part.first
    left = _summands(ready.left[join.baseline], ready.layouts[0], _row(join.baseline_rows, at))
    right = _summands(ready.right[join.target], ready.layouts[1], _row(join.target_rows, at))
    if len(right) < 2 or left.keys() != right.keys() or any(left[r].shape != right[r].shape for r in right):
        return None
    errors = {rank: float(np.square(right[rank] - left[rank]).sum()) for rank in right}
    worst = max(errors, key=lambda rank: errors[rank])
    others = sum(error for rank, error in errors.items() if rank != worst)
    return worst if others <= OTHERS * errors[worst] < np.inf and errors[worst] > 0.0 else None


def _row(rows: Rows, at: int) -> Array:
    return np.array([(rows.start or 0) + at if isinstance(rows, slice) else int(rows[at])])


def _summands(whole: Whole, layout: Layout, row: Array) -> dict[int, Array]:
    """Rank -> the row as it holds it; empty where ranks hold no summands, or several records make up one."""
    parts = whole.piece.parts if isinstance(whole.piece, Summed) else ()
    found: dict[int, Array] = {}
    for piece in parts:
        records = list(leaves(piece))
        if len(records) != 1:
            return {}
        values = [np.asarray(b.rows(row)[0]) for b in blocks(piece, whole.run, layout.axes)]
        found[records[0].key.rank] = np.concatenate(values).astype(np.float64)
    return found
