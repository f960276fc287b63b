"""Rows of attention weights ``[batch, heads, queries, keys]``, whose columns are tokens as well.

Rows are matched like any other rows, without padding. Columns match where the keys have the same positions: in the
step's own grid (as far as both runs have it and the rest is padding), or in caches filled by the same steps.
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
"""Tensor axis of the keys."""


class AttentionPlan(Struct, frozen=True):
    """A join plan, and both sides' firings cut to their common keys."""

    plan: JoinPlan
    left: tuple[AssembledTensor, ...]
    right: tuple[AssembledTensor, ...]


def with_common_keys(
    plan: JoinPlan, left: Sequence[AssembledTensor], right: Sequence[AssembledTensor], rows: RowMap, steps: StepMatcher
) -> AttentionPlan:
    """Keep the joins whose keys match, and cut the firings to the keys that both runs have."""
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
    """Number of leading keys that are the same tokens, if they are those of the step's own grid; 0 if anything but
    padding remains."""
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
    """[batch, keys] row pair of each key; None if there are keys of earlier steps."""
    batch = grid.grid[0] if len(grid.grid) == 2 else 1
    table = grid.pairs.reshape(batch, -1)
    return table if table.shape[1] == whole.shape[KEYS] else None


def _aligned(join: RowJoin, one: AssembledTensor, two: AssembledTensor) -> RowJoin:
    """Equal bytes mean equal rows only if nothing is cut."""
    return join if one.shape == two.shape else structs.replace(join, aligned=False)


def _cut(whole: AssembledTensor, count: int) -> AssembledTensor:
    if whole.piece is None or whole.shape[KEYS] == count:
        return whole
    return structs.replace(whole, piece=Sliced(KEYS, 0, count, whole.piece))


def _step(whole: AssembledTensor) -> int:
    return whole.records[0].key.step
