"""Alignment of attention weights ``[batch, heads, queries, keys]``, whose columns are tokens as well.

Query rows are matched like the rows of any other tensor, without padding. Key columns match if they hold the same
positions: the keys are the step's own tokens (with nothing but padding after the common ones), or come from caches
filled by the same steps.
"""

from collections.abc import Sequence

import numpy as np
from msgspec import Struct, structs

from tapscope.comparator.alignment.align import JoinPlan
from tapscope.comparator.alignment.row_join import RowJoin
from tapscope.comparator.alignment.row_map import PADDING, RowMap
from tapscope.comparator.alignment.steps import StepMatcher
from tapscope.comparator.assembly.assemble import AssembledTensor
from tapscope.comparator.assembly.pieces import Sliced
from tapscope.comparator.runs.grids import SideRows, StepRows

KEYS = 3
"""Index of the key axis."""


class AttentionPlan(Struct, frozen=True):
    """A join plan with the firings of both sides cut to their common keys."""

    plan: JoinPlan
    left: tuple[AssembledTensor, ...]
    right: tuple[AssembledTensor, ...]


def with_common_keys(
    plan: JoinPlan, left: Sequence[AssembledTensor], right: Sequence[AssembledTensor], rows: RowMap, steps: StepMatcher
) -> AttentionPlan:
    """Keep only the joins whose key columns match, and cut both firings of each join to the common keys."""
    if left[0].records[0].key.site.endswith(".grad") and _has_padding(left, rows.baseline):
        return AttentionPlan(structs.replace(plan, joins=(), exclusion_reason=_PADDED), tuple(left), tuple(right))
    like = steps.by_rows(2).baseline_of
    sides, kept = (list(left), list(right)), []
    for join in plan.joins:
        one, two = left[join.baseline], right[join.target]
        count = _num_common(one, two, rows)
        if not count and like.get(_step(two)) == _step(one) and one.shape[KEYS] == two.shape[KEYS]:
            count = one.shape[KEYS]
        if count:
            kept.append(_aligned(join, one, two))
            sides[0][join.baseline], sides[1][join.target] = _cut(one, count), _cut(two, count)
    if plan.joins and not kept:
        return AttentionPlan(structs.replace(plan, joins=(), exclusion_reason=_ELSEWHERE), tuple(left), tuple(right))
    compared = sum(len(join.pairs) for join in kept if join.pairs is not None)
    counts = structs.replace(plan.counts, num_compared=compared)
    return AttentionPlan(structs.replace(plan, joins=tuple(kept), counts=counts), tuple(sides[0]), tuple(sides[1]))


_ELSEWHERE = "attention weights with keys at other positions: the runs batch or pad differently"


_PADDED = "the gradient of attention weights, which includes padding: its values are undefined"


def _has_padding(wholes: Sequence[AssembledTensor], steps: SideRows) -> bool:
    grids = (steps.of(whole.records[0]) for whole in wholes)
    return any(grid is not None and bool((grid.pairs == PADDING).any()) for grid in grids)


def _num_common(one: AssembledTensor, two: AssembledTensor, rows: RowMap) -> int:
    """Return the number of leading key columns that are the same tokens in both firings.

    0 if the keys are not exactly the step's own grid, or if columns after the common ones hold anything but padding.
    """
    grids = rows.baseline.of(one.records[0]), rows.target.of(two.records[0])
    if grids[0] is None or grids[1] is None:
        return 0
    tables = [_keys(grid, whole) for grid, whole in zip(grids, (one, two), strict=True) if grid is not None]
    if any(table is None for table in tables):
        return 0
    mine, other = (table for table in tables if table is not None)
    count = min(mine.shape[1], other.shape[1])
    rest = np.concatenate([mine[:, count:].ravel(), other[:, count:].ravel()])
    same = mine.shape[0] == other.shape[0] and np.array_equal(mine[:, :count], other[:, :count])
    return count if same and bool((rest == PADDING).all()) else 0


def _keys(grid: StepRows, whole: AssembledTensor) -> "np.ndarray[tuple[int, int], np.dtype[np.int64]] | None":
    """Return the row pair of each key as ``[batch, keys]``; None if some keys are from earlier steps."""
    batch = grid.grid[0] if len(grid.grid) == 2 else 1
    table = grid.pairs.reshape(batch, -1)
    return table if table.shape[1] == whole.shape[KEYS] else None


def _aligned(join: RowJoin, one: AssembledTensor, two: AssembledTensor) -> RowJoin:
    """Clear ``join.aligned`` if the key axes differ in length: equal bytes then no longer imply equal rows."""
    return join if one.shape == two.shape else structs.replace(join, aligned=False)


def _cut(whole: AssembledTensor, count: int) -> AssembledTensor:
    if whole.piece is None or whole.shape[KEYS] == count:
        return whole
    return structs.replace(whole, piece=Sliced(KEYS, 0, count, whole.piece))


def _step(whole: AssembledTensor) -> int:
    return whole.records[0].key.step
