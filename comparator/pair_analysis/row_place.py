"""Row places: per-step results, and the place of a measured row."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tapscope.comparator.alignment.layout import Layout
from tapscope.comparator.alignment.prepare import PreparedPair
from tapscope.comparator.alignment.row_map import RowMap
from tapscope.comparator.assembly.assemble import AssembledTensor
from tapscope.comparator.assembly.blocks import row_axes
from tapscope.comparator.assembly.pieces import Concatenated, Leaf, Piece, Summed, leaves, records_at
from tapscope.comparator.facts import Place, StepResult
from tapscope.comparator.metrics.joined_rows import ReadJoin, part_at
from tapscope.comparator.metrics.measure import MeasuredPair
from tapscope.core.dtypes import COMPLEX
from tapscope.kernels.native import relative_l2

Array = np.ndarray[Any, Any]


def recorded_norm(ready: PreparedPair) -> float:
    """Return the norm of the baseline, from its statistics."""
    stats = [record.stats for whole in ready.left for record in whole.records]
    return math.sqrt(sum(s.count * s.rms**2 for s in stats if s is not None and s.rms is not None))


def summand_ratio(ready: PreparedPair, measured: MeasuredPair) -> float:
    """Return the norm of all partial sums of a side together / norm of their total, for the side where it is larger.

    The norm of the parts is taken from their statistics. 0 without partial sums.
    """
    parts = max((_summand_energy(side[0].piece) for side in (ready.left, ready.right) if side), default=0.0)
    if parts == 0.0:
        return 0.0
    rows = measured.rows
    size = float(rows.sum_sq_baseline.sum()) / max(float(np.sum(rows.width)), 1.0)
    return math.sqrt(parts / size) if size > 0.0 else 0.0


def _summand_energy(piece: Piece | None) -> float:
    """Return the mean square of the elements of all partial sums together."""
    parts = [list(leaves(part)) for part in piece.parts] if isinstance(piece, Summed) else []
    stats = [[(s.count, s.rms) for record in part if (s := record.stats) is not None] for part in parts]
    each = [[(n, rms) for n, rms in part if n and rms is not None] for part in stats]
    return sum(sum(n * rms**2 for n, rms in part) / sum(n for n, _ in part) for part in each if part)


class RowsByStep(NamedTuple):
    """The rows of a pair, grouped by target step."""

    order: Array
    """[rows] row indices, step by step."""
    starts: Array
    """[steps] index into :attr:`order` of the first row of each step."""
    steps: list[int]
    num_rows: list[int]
    """Number of rows of each step."""


def rows_by_step(parts: Sequence[ReadJoin], right: Sequence[AssembledTensor]) -> RowsByStep | None:
    """Return the rows of the joins grouped by step; None if all firings belong to one step."""
    step_of_part = [right[part.join.target].records[0].key.step for part in parts]
    if len(set(step_of_part)) < 2:
        return None
    step_of = np.repeat(np.array(step_of_part), [part.num_rows for part in parts])
    order = np.argsort(step_of, kind="stable")
    step_of = step_of[order]
    starts = np.flatnonzero(np.concatenate([[True], step_of[1:] != step_of[:-1]]))
    return RowsByStep(order, starts, step_of[starts].tolist(), np.diff(starts, append=len(order)).tolist())


def step_results_of(measured: MeasuredPair, errors: Array, by_step: RowsByStep) -> tuple[StepResult, ...]:
    """Return one result per target step, in order, from the ``errors`` of all rows; steps with equal hashes are not
    included."""
    rows, (order, starts, steps, counts) = measured.rows, by_step
    largest = np.maximum.reduceat(rows.max_abs[order], starts).tolist()
    diff, base = (np.add.reduceat(x[order], starts) for x in (rows.sum_sq_diff, rows.sum_sq_baseline))
    worst = np.maximum.reduceat(errors[order], starts).tolist()
    relative = relative_l2(diff, base).tolist()
    nonfinite = np.add.reduceat(rows.nonfinite_mismatch[order], starts).tolist()
    return tuple(map(StepResult, steps, counts, largest, relative, worst, nonfinite))


def place_of(measured: MeasuredPair, row: int, ready: PreparedPair, rows: RowMap) -> Place:
    """Return the place of a measured row."""
    part = part_at(measured.parts, row)
    # The column of the largest difference; a row with a non-finite mismatch has none.
    column = None if measured.rows.nonfinite_mismatch.item(row) else measured.rows.argmax.item(row)
    return place_in(part, row, column, measured.ranks[measured.row_block.item(row)], ready, rows)


def place_in(
    part: ReadJoin, row: int, column: int | None, rank: int | None, ready: PreparedPair, rows: RowMap
) -> Place:
    """Return the place of a measured row, or of a column in that row.

    ``part`` is the join of the row; ``rank`` is the only rank that holds the column, if known.
    """
    join, at = part.join, row - part.first
    whole = ready.right[join.target]
    step, baseline_step = whole.records[0].key.step, ready.left[join.baseline].records[0].key.step
    rank = rank if _is_alone(whole) else None
    index = () if column is None else (column,)
    picked = join.target_rows
    target_row = (picked.start or 0) + at if isinstance(picked, slice) else int(picked[at])
    if rank is None and index and _is_spread(whole.piece):  # sharded by row, or by column with some columns excluded
        rank = _rank_at(whole, ready.layouts[1], target_row, index[0])
    if join.pairs is None:
        element = () if column is None else element_of(whole, ready.layouts[1], target_row, column)
        return Place(step, baseline_step, index=(target_row, *index), rank=rank, element=element)
    pair = join.pairs.item(at)
    return Place(
        step,
        baseline_step,
        rows.requests[rows.pair_request.item(pair)],
        rows.pair_position.item(pair),
        rows.pair_visit.item(pair),
        index,
        rank,
        branch=rows.pair_branch.item(pair),
    )


def _is_spread(piece: Piece | None) -> bool:
    return piece is not None and not isinstance(piece, Leaf | Summed) and len(list(leaves(piece))) > 1


def _rank_at(whole: AssembledTensor, layout: Layout, row: int, column: int) -> int | None:
    """Return the only rank that holds an element, or None if several do."""
    assert whole.piece is not None
    ranks = {record.key.rank for record, _ in records_at(whole.piece, element_of(whole, layout, row, column))}
    return ranks.pop() if len(ranks) == 1 else None


def index_in_shard(measured: MeasuredPair, row: int, ready: PreparedPair, rank: int) -> tuple[int, ...]:
    """Return the index of a row's largest difference within the record of ``rank``, as used by ``tapscope show
    --slice``.

    Empty if that is not exactly one element, or if there is only one record.
    """
    part = part_at(measured.parts, row)
    whole, picked, at = ready.right[part.join.target], part.join.target_rows, row - part.first
    if len(whole.records) < 2 or whole.piece is None or measured.rows.nonfinite_mismatch.item(row):
        return ()
    target_row = (picked.start or 0) + at if isinstance(picked, slice) else int(picked[at])
    element = element_of(whole, ready.layouts[1], target_row, measured.rows.argmax.item(row))
    indices = [index for record, index in records_at(whole.piece, element) if record.key.rank == rank]
    return indices[0] if len(indices) == 1 else ()


def element_of(whole: AssembledTensor, layout: Layout, row: int, column: int) -> tuple[int, ...]:
    """Return the index along all tensor axes of the element at (row, column); empty for a tensor without a piece."""
    if whole.piece is None:
        return ()
    shape = whole.piece.shape
    axes = layout.axes or row_axes(shape)
    others = [i for i in range(len(shape)) if i not in axes]
    column //= 2 if (whole.dtype or "") in COMPLEX else 1
    at = dict(zip(axes, np.unravel_index(row, [shape[i] for i in axes]), strict=True)) if axes else {}
    if others:
        at |= dict(zip(others, np.unravel_index(column, [shape[i] for i in others]), strict=True))
    return tuple(int(at[i]) for i in range(len(shape)))


def _is_alone(whole: AssembledTensor) -> bool:
    """Return whether each column is held by one rank only: shards, or rows of one of several ranks."""
    return isinstance(whole.piece, Concatenated) or len(whole.records) == 1 < len(whole.run.ranks)
