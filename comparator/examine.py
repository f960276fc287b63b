"""Examine: everything about one matched pair of sites that can be known without looking at other sites."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tapscope import dtypes
from tapscope.comparator.align import Aligner, Plan
from tapscope.comparator.assemble import Coords, Whole, assemble, coords_of
from tapscope.comparator.finding import Numbers, Place, RowCounts, Side, StepResult
from tapscope.comparator.layout import Layout, layout_of
from tapscope.comparator.match import Pair, Series
from tapscope.comparator.measure import Measured, WidthError, are_masks, measure
from tapscope.comparator.names import is_partial
from tapscope.comparator.replicas import check_replicas
from tapscope.comparator.rows import RowMap
from tapscope.comparator.spread import NOTHING, Spread, row_errors, spread_of
from tapscope.comparator.summaries import compare_stats, compare_values
from tapscope.errors import DataError
from tapscope.kernels.native import RowMeasures
from tapscope.run import Run

Array = np.ndarray[Any, Any]

MAX_UNEQUAL = 64
"""Unequal integer rows whose place is kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Examined:
    """One site before it is judged."""

    pair: Pair
    site: str
    baseline: Side | None = None
    target: Side | None = None
    problem: str = ""
    """Why it could not be compared; everything below is then empty."""
    basis: str = "none"
    layout: str = "whole"
    rows: RowCounts = field(default_factory=RowCounts)
    missing: int = 0
    """Firings without a partner that nobody explained."""
    spread: Spread | None = None
    """None for what was not compared as numbers."""
    numbers: Numbers | None = None
    worst: Place | None = None
    steps: tuple[StepResult, ...] = ()
    unequal: tuple[Place, ...] = ()
    """Rows whose integers differ, the first few."""
    num_unequal: int = 0
    replicas: str = ""
    """What is wrong with the replicas of one side, if anything."""
    notes: tuple[str, ...] = ()

    @property
    def is_exact(self) -> bool:
        """Whether values of this kind must be equal: integers, booleans, values that are no tensors."""
        if self.baseline is None or self.target is None:
            return False
        names = self.baseline.dtype, self.target.dtype
        return are_masks(*names) or not any(map(dtypes.is_float, names))


@dataclass(slots=True)
class Examiner:
    """Compares pairs of one comparison; holds what is common to all of them."""

    baseline: Run
    target: Run
    row_map: RowMap
    tolerance: tuple[float, float] | None = None
    _aligner: Aligner = field(init=False)
    _coords: tuple[Mapping[int, Coords], Mapping[int, Coords]] = field(init=False)

    def __post_init__(self) -> None:
        self._aligner = Aligner(self.row_map)
        self._coords = coords_of(self.baseline), coords_of(self.target)

    def examine(self, pair: Pair) -> Examined:
        """Compare one pair; what cannot be compared says why, only a broken program raises."""
        if pair.baseline is None or pair.target is None:
            series = pair.baseline or pair.target
            assert series is not None
            only = _side(series, series.first.shape)
            mine, other = (only, None) if pair.baseline else (None, only)
            return Examined(pair=pair, site=series.site, baseline=mine, target=other)
        if pair.baseline.first.dtype is None or pair.target.first.dtype is None:
            return _examine_values(pair)
        left = [assemble(self.baseline, self._coords[0], f) for f in pair.baseline.firings]
        right = [assemble(self.target, self._coords[1], f) for f in pair.target.firings]
        sides = _side(pair.baseline, left[0].shape), _side(pair.target, right[0].shape)
        one = Examined(pair=pair, site=_named(pair), baseline=sides[0], target=sides[1])
        try:
            return self._compare(one, pair, left, right)
        except (WidthError, DataError) as error:
            return replace(one, problem=str(error))

    def _compare(self, one: Examined, pair: Pair, left: list[Whole], right: list[Whole]) -> Examined:
        assert pair.baseline is not None
        assert pair.target is not None
        known = self.row_map.known
        layouts = (
            layout_of(pair.baseline.site, left, self.row_map.baseline if known else {}),
            layout_of(pair.target.site, right, self.row_map.target if known else {}),
        )
        problem = next((p for p in [w.problem for w in (*left, *right)] + [x.problem for x in layouts] if p), "")
        plan = Plan(problem=problem) if problem else self._aligner.plan(left, right, layouts)
        if plan.problem:
            return replace(one, problem=plan.problem)
        counts = RowCounts(plan.num_rows, plan.num_forked, plan.num_unaligned, plan.num_absent)
        notes = tuple(dict.fromkeys(note for w in (*left, *right) for note in w.notes))
        one = replace(one, layout=_weaker(layouts), rows=counts, missing=plan.missing, notes=notes)
        if not plan.joins:
            return replace(one, problem=_no_rows(counts))
        used = {id(w): w for j in plan.joins for w in (left[j.baseline], right[j.target])}.values()
        if not all(w.has_values for w in used) and not _all_hashed(plan, left, right, layouts):
            return _examine_stats(one, left, right, plan, layouts)
        measured = measure(left, right, plan.joins, layouts, self.tolerance or (0.0, 0.0))
        return self._with_numbers(replace(one, replicas=check_replicas(used)), measured, left, right)

    def _with_numbers(self, one: Examined, measured: Measured, left: list[Whole], right: list[Whole]) -> Examined:
        numbers = _numbers(measured)
        if not len(measured.rows):
            return replace(one, basis="hash", numbers=numbers, spread=NOTHING)
        errors = row_errors(measured)
        row = int(np.argmax(np.where(measured.rows.nonfinite_mismatch > 0, np.inf, errors)))
        odd = np.flatnonzero(measured.rows.equal < measured.rows.width)
        places = [self.place(measured, int(i), left, right) for i in odd[:MAX_UNEQUAL]] if one.is_exact else []
        return replace(
            one,
            basis="values",
            numbers=numbers,
            spread=spread_of(measured),
            worst=self.place(measured, row, left, right),
            steps=_steps(measured, errors, right),
            unequal=tuple(places),
            num_unequal=len(odd),
        )

    def place(self, measured: Measured, row: int, left: Sequence[Whole], right: Sequence[Whole]) -> Place:
        """Where a measured row is."""
        pair, column = int(measured.pairs[row]), int(measured.rows.argmax[row])
        target = int(measured.target_firing[row])
        step = right[target].records[0].key.step
        baseline_step = left[int(measured.baseline_firing[row])].records[0].key.step
        rank = int(measured.target_rank[row]) if len(right[target].records) > 1 else -1
        where = None if rank < 0 else rank
        if pair < 0:
            first = int(np.flatnonzero(measured.target_firing == target)[0])
            return Place(step, baseline_step, index=(row - first, column), rank=where)
        rows = self.row_map
        return Place(
            step,
            baseline_step,
            rows.requests[int(rows.pair_request[pair])],
            int(rows.pair_position[pair]),
            int(rows.pair_visit[pair]),
            (column,),
            where,
        )


def _examine_stats(
    one: Examined, left: list[Whole], right: list[Whole], plan: Plan, layouts: tuple[Layout, Layout]
) -> Examined:
    problem, spread = compare_stats(left, right, plan, layouts)
    if problem:
        return replace(one, problem=problem)
    note = "only statistics were kept: what leaves mean, rms and maximum alone is not seen"
    return replace(one, basis="stats", spread=spread, notes=(*one.notes, note))


def _examine_values(pair: Pair) -> Examined:
    """A pair of which at least one side is no tensor."""
    assert pair.baseline is not None
    assert pair.target is not None
    problem, compared, unequal = compare_values(pair.baseline, pair.target)
    return Examined(
        pair=pair,
        site=pair.baseline.site,
        baseline=_side(pair.baseline, pair.baseline.first.shape),
        target=_side(pair.target, pair.target.first.shape),
        problem=problem,
        basis="value" if compared else "none",
        num_unequal=unequal,
    )


def _named(pair: Pair) -> str:
    """The baseline's name, but the summands' own where they meet a sum: a name belongs to one finding."""
    assert pair.baseline is not None
    assert pair.target is not None
    return pair.target.site if is_partial(pair.target.site) else pair.baseline.site


def _side(series: Series, shape: tuple[int, ...]) -> Side:
    ranks = tuple(sorted({r.key.rank for f in series.firings for r in f.records}))
    return Side(series.site, series.first.dtype, shape, series.num_records, series.first.dims, ranks)


def _weaker(layouts: tuple[Layout, Layout]) -> str:
    sources = {layout.source for layout in layouts}
    return next(s for s in ("inferred", "annotated", "whole") if s in sources)


def _no_rows(counts: RowCounts) -> str:
    reasons = [f"{n:,} {what}" for n, what in ((counts.forked, "forked"), (counts.unaligned, "unaligned")) if n]
    return f"no row in common here{': ' + ', '.join(reasons) if reasons else ''}"


def _all_hashed(plan: Plan, left: list[Whole], right: list[Whole], layouts: tuple[Layout, Layout]) -> bool:
    return layouts[0] == layouts[1] and all(
        j.aligned and left[j.baseline].digest is not None and left[j.baseline].digest == right[j.target].digest
        for j in plan.joins
    )


def _numbers(measured: Measured) -> Numbers:
    total = measured.total
    return Numbers(
        total.max_abs,
        total.mean_abs,
        total.rel_l2,
        total.cosine,
        total.equal + measured.num_hashed,
        total.count + measured.num_hashed,
        total.over,
        total.nonfinite_baseline,
        total.nonfinite_target,
        total.nonfinite_mismatch,
    )


def _steps(measured: Measured, errors: Array, right: Sequence[Whole]) -> tuple[StepResult, ...]:
    """One result a target step, in order; steps whose hashes are equal have none."""
    step_of = np.array([w.records[0].key.step for w in right])[measured.target_firing]
    found = []
    for step in np.unique(step_of):
        rows = np.flatnonzero(step_of == step)
        found.append(
            StepResult(
                int(step),
                len(rows),
                float(measured.rows.max_abs[rows].max()),
                _relative(measured.rows, rows),
                float(errors[rows].max()),
            )
        )
    return tuple(found)


def _relative(measures: RowMeasures, rows: Array) -> float:
    diff, base = float(measures.sum_sq_diff[rows].sum()), float(measures.sum_sq_baseline[rows].sum())
    if base == 0.0:
        return 0.0 if diff == 0.0 else float("inf")
    return float(np.sqrt(diff / base))
