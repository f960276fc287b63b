"""Align: which rows of which firing of one side meet which of the other, for one matched site."""

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from msgspec import Struct, structs

from tapscope.comparator.assemble import Whole
from tapscope.comparator.blocks import Rows
from tapscope.comparator.finding import RowCounts
from tapscope.comparator.grids import SideRows, StepRows
from tapscope.comparator.layout import Layout, is_mask, is_parameter, slots_of
from tapscope.comparator.meet import meet
from tapscope.comparator.rowmap import FORKED, PADDING, UNALIGNED, RowMap
from tapscope.comparator.steps import StepPartners
from tapscope.site import compact_ranges

Array = np.ndarray[Any, Any]


class Join(Struct, frozen=True):
    """Rows of one firing that meet rows of another."""

    baseline: int
    """Index of the firing."""
    target: int
    baseline_rows: Rows = slice(None)
    target_rows: Rows = slice(None)
    pairs: Array | None = None
    """Their row pairs in the RowMap; None when the tensors are compared whole."""
    aligned: bool = True
    """Whether every valid row meets the row at its own index, so that equal bytes are equal rows."""


class Plan(Struct, frozen=True):
    """What of a site is compared with what, and what is left over."""

    joins: tuple[Join, ...] = ()
    counts: RowCounts = RowCounts()
    """Token rows; all 0 when compared whole."""
    missing: int = 0
    """Firings that lack a partner though the rows were computed on both sides, and nobody said why."""
    problem: str = ""
    apart: str = ""
    """Why nothing of it meets though nothing is wrong."""
    note: str = ""
    """What was assumed."""


class Aligner:
    """Plans joins; sites of one shape of firing share their plan."""

    def __init__(self, row_map: RowMap, shift_steps: int = 0) -> None:
        self.rows = row_map
        self.steps = StepPartners(row_map, shift_steps)
        self._plans: dict[tuple[object, ...], Plan] = {}

    def plan(self, baseline: Sequence[Whole], target: Sequence[Whole], layouts: tuple[Layout, Layout]) -> Plan:
        """Pair the firings of one site. Both layouts must be free of problems."""
        left, right = layouts
        if left.by_rows != right.by_rows:
            side, other = ("baseline", "target") if left.by_rows else ("target", "baseline")
            shape = (target if left.by_rows else baseline)[0].shape
            return Plan(
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

    def _plan_rows(self, baseline: Sequence[Whole], target: Sequence[Whole], layouts: tuple[Layout, Layout]) -> Plan:
        left = _side(baseline, layouts[0], self.rows.baseline, self.rows.num_pairs)
        right = _side(target, layouts[1], self.rows.target, self.rows.num_pairs)
        first, second = meet(left.keys, right.keys)
        order = np.lexsort((left.rows[first], left.firing[first], right.firing[second]))
        first, second = first[order], second[order]
        joins = _joins(left, right, first, second, self.rows.num_pairs)
        absent = len(left.keys) + len(right.keys) - 2 * len(first)
        subset = any(w.records[0].rows is not None for side in (baseline, target) for w in side)
        lone = {(0, int(f)) for f in left.firing} - {(0, join.baseline) for join in joins}
        lone |= {(1, int(f)) for f in right.firing} - {(1, join.target) for join in joins}
        counts = RowCounts(
            len(first), max(left.num_forked, right.num_forked), left.num_unaligned + right.num_unaligned, absent
        )
        note = _cached_note(zip((baseline, target), layouts, (left, right), strict=True))
        return Plan(tuple(joins), counts, 0 if subset else len(lone), note=note)

    def _plan_whole(self, baseline: Sequence[Whole], target: Sequence[Whole]) -> Plan:
        site = baseline[0].records[0].key.site
        mask = self.rows.known and is_mask(site)
        if self.rows.known and not is_parameter(site):
            partners = self.steps.by_rows(max(sum(n != 1 for n in w.shape) for w in (*baseline, *target)))
        else:
            partners = self.steps.by_number(*([_place(whole)[0] for whole in side] for side in (baseline, target)))
        places = {_place(whole): i for i, whole in enumerate(baseline)}
        joins = []
        for i, whole in enumerate(target):
            step, turn = _place(whole)
            index = places.get((partners.of[step], turn)) if step in partners.of else None
            if index is not None and (not mask or whole.shape == baseline[index].shape):
                rows = self._of_tokens(baseline[index], whole)
                joins.append(Join(index, i, rows, rows))
        if mask and not joins:
            return Plan(apart="an attention mask, which goes over the batch as it lies: the runs batch otherwise")
        if partners.is_by_rows and not joins:
            return Plan(apart="no token axis, and no two steps of the runs hold the same rows")
        if not joins:
            numbers = (sorted({_place(whole)[0] for whole in side}) for side in (baseline, target))
            have = " against ".join(compact_ranges(steps) for steps in numbers)
            return Plan(problem=f"no step in common here: {have}; see --shift-steps")
        lone = len(baseline) + len(target) - 2 * len(joins)
        return Plan(tuple(joins), missing=0 if self.rows.known else lone, note=partners.note)

    def _of_tokens(self, one: Whole, two: Whole) -> Rows:
        """All rows; of a copy of the grid for each expert, or of a few rows for each of its places, those that are of
        padding in neither order."""
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


class _Side(Struct):
    """The comparable rows of one side as columns of equal length, and counts of the others."""

    keys: Array
    firing: Array
    rows: Array
    valid: dict[int, int]
    """Firing -> its rows that are no padding."""
    num_forked: int
    num_unaligned: int
    slots: dict[int, int]
    """Firing -> slots of its step, padding included."""


def _side(wholes: Sequence[Whole], layout: Layout, steps: SideRows, num_pairs: int) -> _Side:
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
    return _Side(one, two, three, valid, forked, unaligned, num_slots)


def _joins(left: _Side, right: _Side, first: Array, second: Array, num_pairs: int) -> list[Join]:
    """Split the paired rows where the firing of either side changes."""
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
        joins.append(Join(b, t, _compact(rows_b), _compact(rows_t), left.keys[mine] % num_pairs, same))
    return joins


def _compact(rows: Array) -> Rows:
    first, last = int(rows[0]), int(rows[-1])
    neighbours = last - first == len(rows) - 1 and bool(np.all(rows[1:] - rows[:-1] == 1))
    return slice(first, last + 1) if neighbours else rows


def without_rows(plan: Plan, left_out: frozenset[int]) -> Plan:
    """The plan without these row pairs."""
    joins, count, wanted = [], 0, np.array(sorted(left_out), np.int64)
    for join in plan.joins:
        keep = ~np.isin(join.pairs, wanted) if join.pairs is not None else np.ones(0, bool)
        if join.pairs is None or keep.all():
            joins.append(join)
            continue
        count += int((~keep).sum())
        if keep.any():
            one, two = (_compact(_indices(some)[keep]) for some in (join.baseline_rows, join.target_rows))
            joins.append(Join(join.baseline, join.target, one, two, join.pairs[keep], aligned=False))
    counts = structs.replace(plan.counts, compared=plan.counts.compared - count)
    return structs.replace(plan, joins=tuple(joins), counts=counts)


def _indices(rows: Rows) -> Array:
    return np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows


def _place(whole: Whole) -> tuple[int, tuple[int, int]]:
    key = whole.records[0].key
    return key.step, (key.micro, key.occurrence)


def _turn(whole: Whole, grid: StepRows) -> int:
    """Which of the firings over one grid; micro-batches are far fewer than this."""
    key = whole.records[0].key
    return key.occurrence + (key.micro << 20 if grid.whole_step else 0)


def _signature(whole: Whole, layout: Layout) -> tuple[object, ...]:
    held = whole.shape[layout.axes[1]] if layout.cached else 0
    return (*_place(whole), whole.records[0].key.rank, whole.records[0].rows, held)


def _cached_note(sides: Iterable[tuple[Sequence[Whole], Layout, _Side]]) -> str:
    """What is said of rows that a side holds once more in every step."""
    for name, (wholes, layout, side) in zip(("baseline", "target"), sides, strict=True):
        if layout.cached:
            slots = sum(math.prod(w.shape[axis] for axis in layout.axes) for w in wholes)
            earlier = slots - sum(side.slots.values())
            return (
                f"the {name} holds all positions of the cache here, the step's own last: its {earlier:,} rows of "
                "earlier steps (padding included) were not compared again"
            )
    return ""
