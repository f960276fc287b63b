"""Aligner: for one matched site, pair the token rows of the baseline's firings with the target's rows."""

import math
from collections.abc import Iterable, Sequence

import numpy as np
from msgspec import Struct, structs

from tapscope.comparator.alignment.layout import Layout, is_mask, slots_of
from tapscope.comparator.alignment.row_join import (
    KeyedRows,
    RowJoin,
    compact,
    counts_of,
    indices,
    join_rows,
    row_numbers,
)
from tapscope.comparator.alignment.row_map import FORKED, PADDING, UNALIGNED, RowMap
from tapscope.comparator.alignment.steps import StepMatcher
from tapscope.comparator.assembly.assemble import AssembledTensor
from tapscope.comparator.assembly.blocks import Rows
from tapscope.comparator.facts import RowCounts
from tapscope.comparator.runs.grids import SideRows, StepRows
from tapscope.core.site import compact_ranges, is_parameter


class JoinPlan(Struct, frozen=True):
    """Row joins of one site, and the rows and firings left unmatched."""

    joins: tuple[RowJoin, ...] = ()
    counts: RowCounts = RowCounts()
    """Counts of token rows; all 0 when the tensors are compared whole."""
    num_missing: tuple[int, int] = (0, 0)
    """Number of firings that (baseline, target) lacks: the other run has the firing, both runs computed its rows, and
    no known cause explains the gap."""
    problem: str = ""
    """Why the site cannot be compared; empty if it can."""
    exclusion_reason: str = ""
    """Why no rows match although nothing is wrong; the pair is then excluded from the findings."""
    note: str = ""
    """Assumptions behind the plan."""


class Aligner:
    """Plans the joins of sites; sites whose firings have the same keys, layouts and row subsets share one plan."""

    def __init__(self, row_map: RowMap, shift_steps: int = 0) -> None:
        self.rows = row_map
        self.steps = StepMatcher(row_map, shift_steps)
        self._plans: dict[tuple[object, ...], JoinPlan] = {}

    def plan(
        self, baseline: Sequence[AssembledTensor], target: Sequence[AssembledTensor], layouts: tuple[Layout, Layout]
    ) -> JoinPlan:
        """Return the join plan for the firings of one site. Neither layout may have a problem."""
        left, right = layouts
        if left.by_rows != right.by_rows:
            side, other = ("baseline", "target") if left.by_rows else ("target", "baseline")
            shape = (target if left.by_rows else baseline)[0].shape
            return JoinPlan(
                problem=f"only the {side} has token rows; the {other}'s shape {tuple(shape)} does not show its token "
                "axis: annotate dims, e.g. 'b s h'"
            )
        if not left.by_rows:
            return self._plan_whole(baseline, target)
        signed = (
            _signature(whole, layout)
            for side, layout in zip((baseline, target), layouts, strict=True)
            for whole in side
        )
        key = (left, right, *signed, len(baseline))
        if key not in self._plans:
            self._plans[key] = self._plan_rows(baseline, target, layouts)
        return self._plans[key]

    def _plan_rows(
        self, baseline: Sequence[AssembledTensor], target: Sequence[AssembledTensor], layouts: tuple[Layout, Layout]
    ) -> JoinPlan:
        left = _side(baseline, layouts[0], self.rows.baseline, self.rows.num_pairs)
        right = _side(target, layouts[1], self.rows.target, self.rows.num_pairs)
        joins = join_rows(left, right, self.rows.num_pairs)
        subset = any(w.records[0].rows is not None for side in (baseline, target) for w in side)
        lacking = (
            len(set(right.firing.tolist()) - {join.target for join in joins}),
            len(set(left.firing.tolist()) - {join.baseline for join in joins}),
        )
        note = _cached_note(zip((baseline, target), layouts, (left, right), strict=True))
        counts = counts_of(left, right, joins)
        return JoinPlan(tuple(joins), counts, (0, 0) if subset else lacking, note=note)

    def _plan_whole(self, baseline: Sequence[AssembledTensor], target: Sequence[AssembledTensor]) -> JoinPlan:
        site = baseline[0].records[0].key.site
        mask = self.rows.known and is_mask(site)
        numbers = [_place(whole)[0] for whole in baseline], [_place(whole)[0] for whole in target]
        if self.rows.known and not is_parameter(site):
            partners = self.steps.by_rows(max(sum(n != 1 for n in w.shape) for w in (*baseline, *target)), *numbers)
        else:
            partners = self.steps.by_number(*numbers)
        places = {_place(whole): i for i, whole in enumerate(baseline)}
        joins = []
        for i, whole in enumerate(target):
            step, turn = _place(whole)
            index = places.get((partners.baseline_of[step], turn)) if step in partners.baseline_of else None
            if index is not None and (not mask or whole.shape == baseline[index].shape):
                rows = self._token_rows(baseline[index], whole)
                joins.append(RowJoin(index, i, rows, rows))
        if mask and not joins:
            return JoinPlan(exclusion_reason="an attention mask of the whole batch, and the runs batch differently")
        if partners.is_by_rows and not joins:
            return JoinPlan(exclusion_reason="no token axis, and no two steps of the runs hold the same rows")
        if not joins:
            have = " against ".join(compact_ranges(sorted(set(steps))) for steps in numbers)
            return JoinPlan(problem=f"no step in common here: {have}; see --shift-steps")
        lacking = len(target) - len(joins), len(baseline) - len(joins)
        return JoinPlan(tuple(joins), num_missing=(0, 0) if self.rows.known else lacking, note=partners.note)

    def _token_rows(self, one: AssembledTensor, two: AssembledTensor) -> Rows:
        """Return the row indices to compare when two tensors are compared whole.

        Normally all rows. If the first axis holds several copies of the token grid (copy-major or token-major), rows
        that are padding under either order are excluded.
        """
        grids = self.rows.baseline.of(one.records[0]), self.rows.target.of(two.records[0])
        num = one.shape[0] if len(one.shape) == 2 and one.shape == two.shape else 0
        if not num or is_parameter(one.records[0].key.site) or any(grid is None for grid in grids):
            return slice(None)
        tokens = np.ones(num, bool)
        for grid in filter(None, grids):
            copies, rest = divmod(num, grid.num_slots) if grid.num_slots else (0, 0)
            if copies < 2 or rest:
                return slice(None)
            is_token = grid.pairs != PADDING
            tokens &= np.tile(is_token, copies) & np.repeat(is_token, copies)
        return slice(None) if tokens.all() or not tokens.any() else np.flatnonzero(tokens)


def _side(wholes: Sequence[AssembledTensor], layout: Layout, steps: SideRows, num_pairs: int) -> KeyedRows:
    keys, firing, rows = [np.empty(0, np.int64)], [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    valid: dict[int, int] = {}
    num_slots: dict[int, int] = {}
    forked = unaligned = 0
    for i, whole in enumerate(wholes):
        grid = steps.of(whole.records[0])
        if grid is None:
            continue
        slots, local = slots_of(whole, layout, grid)
        pairs = grid.pairs[slots]
        use = pairs >= 0
        turn = _turn(whole, grid)
        keys.append(pairs[use] + turn * num_pairs)
        rows.append(local[use])
        firing.append(np.full(int(use.sum()), i, np.int64))
        here = int((pairs == FORKED).sum()), int((pairs == UNALIGNED).sum())
        forked, unaligned = forked + here[0], unaligned + here[1]
        valid[i], num_slots[i] = int(use.sum()) + sum(here), len(slots)
    one, two, three = map(np.concatenate, (keys, firing, rows))
    return KeyedRows(one, two, three, valid, forked, unaligned, num_slots)


def without_rows(plan: JoinPlan, left_out: frozenset[int], left: Sequence[AssembledTensor]) -> JoinPlan:
    """Return the plan without the row pairs in ``left_out``.

    For tensors compared whole, ``left_out`` contains :func:`.row_numbers` instead of row pairs.
    """
    joins, count, wanted = [], 0, np.array(sorted(left_out), np.int64)
    for join in plan.joins:
        pairs = join.pairs
        if pairs is None:
            pairs = row_numbers(join.baseline, 0, math.prod(left[join.baseline].shape[:-1]))
        keep = ~np.isin(pairs, wanted)
        if keep.all():
            joins.append(join)
        elif join.pairs is None:
            rows: Rows = np.flatnonzero(keep)
            if keep.any():
                joins.append(RowJoin(join.baseline, join.target, rows, rows, aligned=False))
        else:
            count += int((~keep).sum())
            if keep.any():
                one, two = (compact(indices(some)[keep]) for some in (join.baseline_rows, join.target_rows))
                joins.append(RowJoin(join.baseline, join.target, one, two, join.pairs[keep], aligned=False))
    counts = structs.replace(plan.counts, num_compared=plan.counts.num_compared - count)
    return structs.replace(plan, joins=tuple(joins), counts=counts)


def _place(whole: AssembledTensor) -> tuple[int, tuple[int, int]]:
    key = whole.records[0].key
    return key.step, (key.micro, key.occurrence)


def _turn(whole: AssembledTensor, grid: StepRows) -> int:
    """Return the key of a call within one grid: the occurrence, with the microbatch in the upper bits if the grid
    covers the whole step."""
    key = whole.records[0].key
    return key.occurrence + (key.micro << 20 if grid.whole_step else 0)


def _signature(whole: AssembledTensor, layout: Layout) -> tuple[object, ...]:
    held = whole.shape[layout.axes[1]] if layout.has_cached_rows else 0
    return (*_place(whole), whole.records[0].key.rank, whole.records[0].rows, held)


def _cached_note(sides: Iterable[tuple[Sequence[AssembledTensor], Layout, KeyedRows]]) -> str:
    """Return a note about layouts that repeat all cached positions in every step; empty if neither side has one."""
    for name, (wholes, layout, side) in zip(("baseline", "target"), sides, strict=True):
        if layout.has_cached_rows:
            slots = sum(math.prod(w.shape[axis] for axis in layout.axes) for w in wholes)
            earlier = slots - sum(side.slots.values())
            return (
                f"the {name} holds all positions of the cache here, the step's own last: its {earlier:,} rows of "
                "earlier steps (padding included) were not compared again"
            )
    return ""
