"""Pair preparer: assemble both sides of a pair and decide which rows to compare.

Reads no values except routers' choices and a sample of the rows ordered by them.
"""

import math
import re
from collections.abc import Hashable, Sequence
from functools import cached_property

from msgspec import Struct, structs

from tapscope.comparator.alignment.align import Aligner, JoinPlan, without_rows
from tapscope.comparator.alignment.attention_weight_rows import with_common_keys
from tapscope.comparator.alignment.axis_permute import flatten_leading_axes, permute_features
from tapscope.comparator.alignment.expert_entries import ExpertChoiceTables
from tapscope.comparator.alignment.expert_rows import LAYOUT, OTHER_RANKS, plan_counts, plan_experts
from tapscope.comparator.alignment.layout import Layout, layout_of
from tapscope.comparator.alignment.layout_inference import infer_layouts
from tapscope.comparator.alignment.row_join import RowJoin
from tapscope.comparator.alignment.row_map import RowMap
from tapscope.comparator.alignment.shape_key import WholesLike, is_template, shape_key_of
from tapscope.comparator.assembly.assemble import AssembledTensor
from tapscope.comparator.assembly.blocks import Block, blocks
from tapscope.comparator.assembly.materialise import materialise
from tapscope.comparator.assembly.pieces import is_partition, leaves, same_structure
from tapscope.comparator.matching.match import Pair
from tapscope.comparator.runs import lazy_records
from tapscope.comparator.runs.grids import SideRows
from tapscope.comparator.runs.mesh_coords import MeshCoords, mesh_coords_of
from tapscope.comparator.runs.series import Key, Series, key_of
from tapscope.comparator.runs.split import split_series
from tapscope.comparator.runs.token_grid_inference import meaning_of
from tapscope.core import dtypes
from tapscope.core.errors import DataError
from tapscope.core.site import compact_ranges, is_parameter, module_of, port_of
from tapscope.run_format.run import Run

_WEIGHTS = 4
"""Number of axes of attention weights."""


_EXPERTS = re.compile(r"(?:^|\.)(?:local_)?experts(?:\.|$)")


GATHERED = "it holds the rows of all data-parallel ranks, in the order of the ranks"

LeftOut = dict[tuple[Key, Key], frozenset[int]]
"""(baseline series, target series) -> row pairs excluded from their comparison."""


class _AssembledSide(Struct, frozen=True):
    """The firings of one run's site, assembled over ranks."""

    wholes: tuple[AssembledTensor, ...]
    broken: list[AssembledTensor]
    """Firings that could not be assembled although others of the site could."""
    layout: Layout
    is_gathered: bool = False
    """Whether the firings hold the rows of all data-parallel ranks, see :meth:`.SideRows.gathered`."""


class PreparedPair(Struct, frozen=True):
    """A pair of sites that is ready to be measured."""

    left: Sequence[AssembledTensor]
    right: Sequence[AssembledTensor]
    layouts: tuple[Layout, Layout]
    plan: JoinPlan
    problem: str = ""
    """Why the pair cannot be measured; empty if it can."""
    num_broken: tuple[int, int] = (0, 0)
    """Number of firings of (baseline, target) that were excluded because they, unlike others of the site, could not be
    assembled."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    """The subset of notes that say why values may be wrong."""

    def for_pair(self, pair: Pair) -> "PreparedPair":
        """Return this result transferred to another pair with the same shape key."""
        baseline, target = pair.sides
        left, right = WholesLike(self.left, baseline), WholesLike(self.right, target)
        return PreparedPair(
            left, right, self.layouts, self.plan, self.problem, self.num_broken, self.notes, self.warnings
        )

    @property
    def joined_firings(self) -> list[AssembledTensor]:
        """The firings that take part in joins, each once."""
        if len(self.plan.joins) == 1:
            (join,) = self.plan.joins
            return [self.left[join.baseline], self.right[join.target]]
        left, right = {j.baseline for j in self.plan.joins}, {j.target for j in self.plan.joins}
        return [*(self.left[i] for i in sorted(left)), *(self.right[i] for i in sorted(right))]

    def equal_by_hash(self, join: RowJoin) -> bool:
        """Return whether the hashes prove that the joined rows are equal."""
        one, two = self.left[join.baseline], self.right[join.target]
        return self.may_be_equal(join) and (digest := one.digest) is not None and digest == two.digest

    def may_be_equal(self, join: RowJoin) -> bool:
        """Return whether equal hashes would prove that the joined rows are equal."""
        one, two = self.left[join.baseline], self.right[join.target]
        return one.dtype == two.dtype and join.aligned and self.layouts[0] == self.layouts[1]

    def unequal_by_hash(self, join: RowJoin) -> bool:
        """Return whether both tensors are assembled in the same way and their hashes differ."""
        one, two = self.left[join.baseline].digest, self.right[join.target].digest
        return one is not None and two is not None and same_structure(one, two) and one != two

    def equal_by_multiset_hash(self, join: RowJoin) -> bool:
        """Return whether the multiset hashes show that both tensors hold the same elements in any order."""
        one, two = self.left[join.baseline], self.right[join.target]
        if one.dtype != two.dtype or have_other_elements(one, two):
            return False
        return (bag := one.multiset_hash) is not None and bag == two.multiset_hash


def have_other_elements(one: AssembledTensor, two: AssembledTensor) -> bool:
    """Return whether counting a few elements proves that two tensors hold different elements, see
    :mod:`..runs.lazy_records`."""
    if one.piece is None or two.piece is None or not (is_partition(one.piece) and is_partition(two.piece)):
        return False
    try:
        return lazy_records.have_other_elements(tuple(leaves(one.piece)), tuple(leaves(two.piece)))
    except DataError:
        return False


class PairPreparer:
    """Prepares the pairs of one comparison; work common to several pairs is done once."""

    def __init__(
        self,
        baseline: Run,
        target: Run,
        row_map: RowMap,
        shift_steps: int = 0,
        ranks: frozenset[int] | None = None,
    ) -> None:
        """Prepare pairs of ``baseline`` and ``target`` with the rows of ``row_map``.

        ``shift_steps``: target step number minus baseline step number; ``ranks``: the selected ranks, None for all.
        """
        self.baseline, self.target, self.row_map, self.shift_steps = baseline, target, row_map, shift_steps
        self._missing_shards = MissingShards(baseline, ranks), MissingShards(target, ranks)
        self._gathered = row_map.baseline.gathered(baseline), row_map.target.gathered(target)
        self._aligners: dict[tuple[bool, bool], Aligner] = {}
        """(baseline is gathered, target is gathered) -> aligner; gathered: with the rows of all data-parallel ranks."""
        self.mesh_coords: tuple[MeshCoords, MeshCoords] = mesh_coords_of(baseline), mesh_coords_of(target)
        self._expert_choices = (
            ExpertChoiceTables(baseline, row_map.baseline),
            ExpertChoiceTables(target, row_map.target),
        )
        self._left_out: LeftOut = {}
        self._templates: dict[Hashable, PreparedPair] = {}
        """Shape key -> first prepared pair with that key, see :mod:`.shape_key`."""

    def leave_out(self, pair: Pair, rows: frozenset[int]) -> None:
        """Add row pairs to those excluded from all later preparations of the pair."""
        baseline, target = pair.sides
        key = key_of(baseline), key_of(target)
        self._left_out[key] = self._left_out.get(key, frozenset()) | rows

    def left_out(self) -> "LeftOut":
        """Return a copy of the exclusions, to be restored by :meth:`leave_out_only`."""
        return dict(self._left_out)

    def leave_out_only(self, rows: "LeftOut") -> None:
        """Replace the exclusions by ``rows``, as returned by :meth:`left_out`."""
        self._left_out = dict(rows)

    def prepare(self, pair: Pair) -> PreparedPair:
        """Prepare a pair; the contents of the runs never make this raise."""
        form = self.shape_key(pair)
        if (known := self.template(form)) is not None:
            return known.for_pair(pair)
        baseline, target = pair.sides
        ready = self._prepare(baseline, target)
        if form is not None and is_template(ready.left, baseline) and is_template(ready.right, target):
            self._templates[form] = ready
        return ready

    def shape_key(self, pair: Pair) -> Hashable:
        """Return the key shared by pairs for which :meth:`prepare` gives the same result except for the tensors.

        None if the result of this pair cannot be reused.
        """
        if self._left_out or any(self._expert_choices):
            return None
        baseline, target = pair.sides
        forms = shape_key_of(baseline), shape_key_of(target)
        return None if None in forms else forms

    def template(self, form: Hashable) -> PreparedPair | None:
        """Return the prepared pair from which others with the shape key ``form`` can be derived, if there is one."""
        return self._templates.get(form)

    def weights_of(self, side: int, series: Series) -> list[list[Block]]:
        """Return the blocks of each firing of a site of run ``side``; empty unless the site may be attention weights
        with values."""
        is_output = port_of(series.site).startswith("out") and not series.site.endswith(".grad")
        if not is_output or len(series.shape) != _WEIGHTS or not dtypes.is_float(series.dtype):
            return []
        assembled = self._assembled(side, series)
        wholes, layout = assembled.wholes, assembled.layout
        if not layout.has_key_axis or not all(whole.has_values for whole in wholes):
            return []
        return [blocks(whole.piece, whole.run, layout.axes) for whole in wholes if whole.piece is not None]

    def rows_of(self, side: int) -> SideRows:
        """Return the row tables of the baseline (0) or the target (1)."""
        return self.row_map.target if side else self.row_map.baseline

    def batch_description(self, baseline: Series, target: Series) -> str:
        """Return why an argument that describes the batch is not compared; empty for any other site."""
        meaning = meaning_of(baseline.site) if self.row_map.known else None
        if meaning in ("names", "slots"):
            return "it names the requests of the batch, whose rows are matched by tokens or by name"
        if meaning in ("lengths", "bounds") and any(self._has_several_grids):
            return "the ranks of a run hold different rows, each with lengths of its own"
        if meaning in ("lengths", "bounds") and _shapes(baseline) != _shapes(target):
            return "the runs batch or pad differently, and rows are matched by request and position"
        return ""

    @cached_property
    def _has_several_grids(self) -> tuple[bool, bool]:
        """Whether ranks of (baseline, target) compute different rows in one step."""
        left, right = (
            any(len(set(map(id, by_rank.values()))) > 1 for by_rank in side.at.values())
            for side in (self.row_map.baseline, self.row_map.target)
        )
        return left, right

    def _prepare(self, baseline: Series, target: Series) -> PreparedPair:
        sides = self._assembled(0, baseline), self._assembled(1, target)
        left, right = sides[0].wholes, sides[1].wholes
        layouts = sides[0].layout, sides[1].layout
        if (lacking := self._lacking((left, right), layouts)) is not None:
            return lacking
        aligner = self._aligner_of(sides[0].is_gathered, sides[1].is_gathered)
        layouts = infer_layouts(layouts, (left, right), (aligner.rows.baseline, aligner.rows.target))
        left, right, odd = permute_features(left, right, layouts)
        problems = [w.problem for w in (left[0], right[0])] + [layout.problem for layout in layouts]
        problem = next((p for p in (*problems, odd) if p), "")
        is_annotated = any(layout.source == "annotated" for layout in layouts)
        plan = None if is_annotated else self._plan_of_experts(left, right)
        if plan is None and not is_annotated and self._are_on_other_ranks(baseline.site, problem):
            plan = JoinPlan(exclusion_reason=OTHER_RANKS)
        if plan is not None:
            layouts, problem = (LAYOUT, LAYOUT), ""
        else:
            plan = JoinPlan() if problem else aligner.plan(left, right, layouts)
        if layouts[0].has_key_axis and plan.joins:
            keyed = with_common_keys(plan, left, right, self.row_map, aligner.steps)
            plan, left, right = keyed.plan, keyed.left, keyed.right
        if rows := self._left_out.get((key_of(baseline), key_of(target))):
            plan = without_rows(plan, rows, left)
        layouts = flatten_leading_axes(left, right, layouts)
        warnings = tuple(dict.fromkeys(warning for w in (*left, *right) for warning in w.warnings))
        notes = (*warnings, *dict.fromkeys(note for w in (*left, *right) for note in w.notes))
        notes += (GATHERED,) if plan.joins and any(side.is_gathered for side in sides) else ()
        broken = sides[0].broken + sides[1].broken
        num_broken = len(sides[0].broken), len(sides[1].broken)
        notes += tuple(dict.fromkeys(f"left out step {w.records[0].key.step}: {w.problem}" for w in broken[:1]))
        notes += (plan.note,) if plan.note else ()
        return PreparedPair(left, right, layouts, plan, problem or plan.problem, num_broken, notes, warnings)

    def _lacking(
        self, sides: tuple[tuple[AssembledTensor, ...], tuple[AssembledTensor, ...]], layouts: tuple[Layout, Layout]
    ) -> PreparedPair | None:
        """Return the pair as excluded if a side lacks shards for a known reason.

        None if no shards are missing, or if the run does not explain why.
        """
        for side, (wholes, gaps) in enumerate(zip(sides, self._missing_shards, strict=True)):
            if wholes[0].lacks_shards and gaps.reason:
                plan = JoinPlan(exclusion_reason=f"{wholes[0].problem}: {gaps.reason}")
                count = 0 if gaps.are_chosen else len(wholes)
                return PreparedPair(*sides, layouts, plan, num_broken=(0, count) if side else (count, 0))
        return None

    def _plan_of_experts(self, left: Sequence[AssembledTensor], right: Sequence[AssembledTensor]) -> JoinPlan | None:
        """Return the plan for rows ordered by a router's choice; None if no recorded choice orders the rows."""
        if left[0].problem or right[0].problem:
            return None
        num_pairs = self.row_map.num_pairs
        try:
            entries = (
                self._expert_choices[0].entries(left, num_pairs),
                self._expert_choices[1].entries(right, num_pairs),
            )
            plan = plan_experts(entries, (left, right), num_pairs)
            return plan or plan_counts((self._expert_choices[0].counts(left), self._expert_choices[1].counts(right)))
        except DataError as error:
            return JoinPlan(problem=str(error))

    def _are_on_other_ranks(self, site: str, problem: str) -> bool:
        """Return whether an expert's rows belong to tokens of several ranks that cannot be related between the runs.

        That is expert parallelism over data-parallel ranks in one run, or in both with different sizes or without dims
        that relate the ranks.
        """
        groups = [{axis: sizes.get(axis, 1) for axis in ("ep", "dp")} for sizes in (m.sizes for m in self.mesh_coords)]
        if any(max(group[axis] for group in groups) == 1 for axis in ("ep", "dp")) or is_parameter(site):
            return False
        is_inside = _EXPERTS.search(module_of(site)) is not None
        return is_inside and (bool(problem) or groups[0] != groups[1])

    def _aligner_of(self, is_left_gathered: bool, is_right_gathered: bool) -> Aligner:
        key = is_left_gathered, is_right_gathered
        if key not in self._aligners:
            left, right = self.row_map.baseline, self.row_map.target
            left, right = self._gathered[0] if key[0] else left, self._gathered[1] if key[1] else right
            self._aligners[key] = Aligner(structs.replace(self.row_map, baseline=left, target=right), self.shift_steps)
        return self._aligners[key]

    def _assembled(self, side: int, series: Series) -> _AssembledSide:
        """Assemble the firings of a site; ranks that hold different rows give separate firings."""
        run, rows = (self.baseline, self.target)[side], self.rows_of(side)
        places = self.mesh_coords[side]
        if any(firing.is_stacked for firing in series.firings):
            return _AssembledSide(*_sound(run, places, series), Layout())
        parts = series if is_parameter(series.site) else split_series(series, rows, places.coords)
        apart = None
        if parts is not series:
            apart, broken = _sound(run, places, parts)
            layout = layout_of(series.site, apart, rows)
            if layout.by_rows and not apart[0].problem:
                return _AssembledSide(apart, broken, layout)
        together, broken = _sound(run, places, series)
        if apart is not None and self._gathered[side] and not together[0].problem:
            layout = layout_of(series.site, together, self._gathered[side])
            if layout.by_rows:
                return _AssembledSide(together, broken, layout, is_gathered=True)
        if apart is not None and apart[0].problem and together[0].problem:
            return _AssembledSide(apart, [], Layout())
        return _AssembledSide(together, broken, layout_of(series.site, together, rows))


def _shapes(series: Series) -> list[tuple[int, ...]]:
    return [record.shape for firing in series.firings for record in firing.records[:1]]


def _sound(run: Run, places: MeshCoords, series: Series) -> tuple[tuple[AssembledTensor, ...], list[AssembledTensor]]:
    """Assemble a series; return (firings that could be assembled, firings that could not).

    If none with values could be assembled, the first tuple holds all firings, the failed ones first.
    """
    wholes = materialise(run, places, series)
    sound, broken = tuple(w for w in wholes if not w.problem), [w for w in wholes if w.problem]
    if broken and not any(math.prod(w.shape) for w in sound):  # no firings, or empty ones of idle data-parallel ranks
        return (*broken, *sound), []
    return sound, broken


class MissingShards:
    """Explains missing shards by the run's ledger or by the selection of ranks."""

    def __init__(self, run: Run, ranks: frozenset[int] | None) -> None:
        """Look up missing shards of ``run``; ``ranks`` are the selected ranks, None for all."""
        self._run, self._ranks = run, ranks

    @property
    def are_chosen(self) -> bool:
        """Whether the user's selection excludes ranks of the run."""
        return self._ranks is not None and not self._ranks.issuperset(self._run.ranks)

    @cached_property
    def reason(self) -> str:
        """Why a shard may be missing; empty if the run should have all shards."""
        if self.are_chosen:
            return f"--ranks {compact_ranges(self._ranks or ())} excludes it"
        ledger = self._run.ledger()
        if missing := ledger.missing_ranks:
            return f"{'rank' if len(missing) == 1 else 'ranks'} {compact_ranges(missing)} never connected"
        return "" if ledger.complete and not ledger.open_ranks else f"{self._run.name} is not complete"
