"""Pair analyzer: compare one matched pair of sites, independently of other sites."""

import math
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from msgspec import Struct, structs

from tapscope.comparator.alignment.prepare import PairPreparer, PreparedPair
from tapscope.comparator.facts import RowCounts
from tapscope.comparator.matching.match import Pair
from tapscope.comparator.metrics.lazy_pair import LazyPair
from tapscope.comparator.metrics.measure import WidthError, measure_all
from tapscope.comparator.metrics.softmax_condition import softmax_condition_alone
from tapscope.comparator.pair_analysis.pair_result import PairExtras, PairMeta, PairResult, PairValues
from tapscope.comparator.pair_analysis.replicas import (
    against_one_rank,
    check_replicas,
    contradicted_ranks,
    has_right_rank,
    stacked_by_rank,
    with_replicas,
)
from tapscope.comparator.pair_analysis.shape_class import ShapeClass, shape_class_of
from tapscope.comparator.pair_analysis.sketches import compare_sketches, has_sketches
from tapscope.comparator.pair_analysis.suggester import MIN_WRONG_ERROR, Suggester
from tapscope.comparator.pair_analysis.summaries import analyze_plain_values, compare_stats, unequal_hashes
from tapscope.comparator.pair_analysis.value_reader import PERMUTED, PendingRead, ReaderOptions, ValueReader
from tapscope.comparator.runs.firings import Firing
from tapscope.comparator.runs.grids import StepRows
from tapscope.comparator.runs.mesh_coords import MeshCoords
from tapscope.comparator.runs.series import side_of
from tapscope.core.errors import DataError
from tapscope.core.site import compact_ranges, is_parameter
from tapscope.run_format.record import Record

_OF_EACH_RANK = "each data-parallel rank has its own, and the runs have different numbers of these ranks"
"""Reason for excluding a per-rank scalar such as a loss."""

if TYPE_CHECKING:
    from tapscope.comparator.metrics.detail import Detail


class AnalyzedPair(Struct, frozen=True):
    """A compared pair, before dims are suggested for it."""

    result: PairResult
    prepared: PreparedPair | None = None
    """The prepared pair; None if there is no need to suggest dims."""


class PackedPair(NamedTuple):
    """An :class:`AnalyzedPair` without its pair and prepared data, as sent by a worker process."""

    site: str
    meta: PairMeta
    values: PairValues
    extras: PairExtras
    is_changed: bool
    """Whether a variant of the pair was measured, see :meth:`PairAnalyzer.comparable_variant`."""
    has_suggestion: bool
    """Whether dims may be suggested for the pair."""


class PairAnalyzer:
    """Compares the pairs of one comparison."""

    def __init__(
        self, preparer: PairPreparer, tolerance: tuple[float, float] | None = None, detail: bool = False
    ) -> None:
        """Compare pairs prepared by ``preparer``; ``detail`` enables detailed metrics of unequal pairs, see
        :mod:`..metrics.detail`."""
        self.preparer, self.tolerance, self.detail = preparer, tolerance, detail
        self.has_gradients = False
        """Whether the runs have gradients, whose floors depend on the magnitude of values."""
        self.norm_modules: frozenset[str] = frozenset()
        """Paths of the modules that normalize each row."""
        self.conv_modules: frozenset[str] = frozenset()
        """Paths of the modules that combine neighboring rows of an image, such as convolutions."""
        self._suggester = Suggester(preparer)
        self._shape_classes: dict[Hashable, ShapeClass] = {}
        """Shape key of a pair -> shape class."""

    def with_preparer(self, preparer: PairPreparer, tolerance: tuple[float, float] | None) -> "PairAnalyzer":
        """Return a copy with the same knowledge of modules, for pairs with other firings or another tolerance."""
        other = PairAnalyzer(preparer, tolerance, self.detail)
        other.has_gradients, other.norm_modules, other.conv_modules = (
            self.has_gradients,
            self.norm_modules,
            self.conv_modules,
        )
        return other

    def analyze(self, pair: Pair) -> PairResult:
        """Compare one pair. If that is impossible, the result states why; an exception is a bug."""
        (analyzed,) = self.analyze_batch([pair])
        return self.with_suggested_dims(analyzed)

    @np.errstate(all="ignore")  # as in compare(), since this may run in its own thread
    def analyze_batch(self, pairs: Sequence[Pair]) -> list[AnalyzedPair]:
        """Run the main part of :meth:`analyze` for several pairs; several threads may call this concurrently.

        Measuring many small pairs together is faster than one by one.
        """
        prepared_pairs = [self._prepare(pair) for pair in pairs]
        pending = [one for one in prepared_pairs if isinstance(one, PendingRead)]
        read = self._read_values(pending) if pending else iter(())
        return [next(read) if isinstance(one, PendingRead) else one for one in prepared_pairs]

    @np.errstate(all="ignore")
    def count_over(self, pairs: Sequence[Pair]) -> list[int]:
        """Return the number of elements beyond the tolerance for each pair; all pairs must have values to read.

        Raises DataError if values cannot be read.
        """
        prepared_pairs = [one for pair in pairs if isinstance(one := self._prepare(pair), PendingRead)]
        batch = measure_all([one.lazy_pair for one in prepared_pairs], self.tolerance or (0.0, 0.0))
        problems = [problem for each in batch.section if (problem := batch.problem(each)) is not None]
        if problems or len(prepared_pairs) < len(pairs):
            raise DataError(str(problems[0]) if problems else "the values can no longer be read")
        return [batch.num_over[section] for section in batch.section]

    def packed(self, pairs: Sequence[Pair]) -> list[PackedPair]:
        """Return the results of :meth:`analyze_batch` in the form sent to another process."""
        return [_packed(pair, analyzed) for pair, analyzed in zip(pairs, self.analyze_batch(pairs), strict=True)]

    def unpacked(self, pairs: Sequence[Pair], packed: Sequence[PackedPair]) -> Iterator[AnalyzedPair]:
        """Yield analyzed pairs from the results of :meth:`packed` for the same pairs in another process."""
        for pair, packed_pair in zip(pairs, packed, strict=True):
            prepared = None
            if packed_pair.is_changed or packed_pair.has_suggestion:
                pair, prepared = self.comparable_variant(pair)
            result = PairResult(pair, packed_pair.site, packed_pair.meta, packed_pair.values, packed_pair.extras)
            yield AnalyzedPair(result, prepared if packed_pair.has_suggestion else None)

    def comparable_variant(self, pair: Pair) -> tuple[Pair, PreparedPair]:
        """Return the pair and its preparation, or a variant that can be measured.

        Variants, in order: ranks treated as replicas, ranks compared with the single rank of the other run, ranks
        stacked and compared one by one.
        """
        prepared = self.preparer.prepare(pair)
        if prepared.problem and (variant := with_replicas(pair)) is not pair:
            pair, prepared = variant, self.preparer.prepare(variant)
        if prepared.problem and (variant := against_one_rank(pair)) is not pair:
            variant_prepared = self.preparer.prepare(variant)
            pair, prepared = (variant, variant_prepared) if has_right_rank(variant_prepared) else (pair, prepared)
        if prepared.problem and self._may_stack(pair) and (stacked := stacked_by_rank(pair)) is not pair:
            pair, prepared = stacked, self.preparer.prepare(stacked)
        return pair, prepared

    def _prepare(self, pair: Pair) -> "AnalyzedPair | PendingRead":
        """Return the pair ready for reading, or its final result if no values need to be read."""
        if pair.baseline is None or pair.target is None:
            return AnalyzedPair(self._unmatched(pair))
        if reason := self.preparer.batch_description(pair.baseline, pair.target):
            baseline, target = (side_of(one, one.first.shape) for one in (pair.baseline, pair.target))
            about = PairMeta(baseline=baseline, target=target, exclusion_reason=reason)
            return AnalyzedPair(PairResult(pair, pair.site or pair.baseline.site, about))
        if not (pair.baseline.is_tensor and pair.target.is_tensor):
            left, right = self.preparer.mesh_coords
            is_same_mesh = left.coords == right.coords
            return AnalyzedPair(
                analyze_plain_values(pair, self.preparer.shift_steps, self.preparer.row_map, is_same_mesh=is_same_mesh)
            )
        shape_key, site = self.preparer.shape_key(pair), pair.site or pair.baseline.site
        shape_class = self._shape_classes.get(shape_key)
        if (
            shape_class is not None
            and shape_class.batched is not None
            and (to_read := shape_class.batched.reading(pair)) is not None
        ):
            lazy_pair = LazyPair(shape_class.prepared, pair, shape_class.batched, is_equal=to_read == "nothing")
            return PendingRead(shape_class, lazy_pair, pair, site, shape_class.meta)
        variant, prepared = self.comparable_variant(pair)
        if variant is not pair:
            pair, shape_class, shape_key = variant, None, None
        if shape_class is None:
            is_shared = shape_key is not None and self.preparer.template(shape_key) is not None
            shape_class = shape_class_of(pair, prepared, is_shared=is_shared)
            if is_shared:
                self._shape_classes[shape_key] = shape_class
        result = PairResult(pair, site, shape_class.meta)
        if result.problem and self._is_of_each_rank(pair):
            result = PairResult(pair, site, structs.replace(result.meta, problem="", exclusion_reason=_OF_EACH_RANK))
            return AnalyzedPair(result)
        if result.problem or prepared.plan.exclusion_reason:
            return AnalyzedPair(result, prepared if prepared.problem else None)
        try:
            return self._without_reading(shape_class, prepared, result)
        except DataError as error:
            return AnalyzedPair(result.replace(problem=str(error)))

    def _may_stack(self, pair: Pair) -> bool:
        """Return whether each rank may be compared with the same rank of the other run, although ranks hold different
        values.

        That is so if neither run records the distribution over ranks, or if the ranks are data parallel, equally in
        both runs, with the same token rows.
        """
        baseline, target = pair.sides
        places, row_map = self.preparer.mesh_coords, self.preparer.row_map
        if not (row_map.known or any(place.has_axes for place in places)):
            return True
        if is_parameter(baseline.site) or places[0].coords != places[1].coords:
            return False
        for one, two in zip(baseline.firings, target.firings, strict=False):
            if not (_is_data_parallel(one, places[0]) and _is_data_parallel(two, places[1])):
                return False
            held = [
                (row_map.baseline.of(a), row_map.target.of(b))
                for a, b in zip(_by_rank(one), _by_rank(two), strict=False)
            ]
            if not all(_same_rows(*rows) for rows in held):
                return False
        return True

    def _is_of_each_rank(self, pair: Pair) -> bool:
        """Return whether the pair is a per-rank scalar of runs with different numbers of data-parallel ranks.

        Each rank computes such a scalar, for example a loss, from its own rows.
        """
        places = self.preparer.mesh_coords
        sizes = [place.sizes.get("dp", 1) for place in places]
        is_scalar = all(math.prod(side.first.shape) == 1 and side.is_float for side in pair.sides)
        if sizes[0] == sizes[1] or not is_scalar or not self.preparer.row_map.known:
            return False
        return not is_parameter(pair.sides[0].site) and all(
            place.sizes.get("dp", 1) == 1 or all(_is_data_parallel(firing, place) for firing in side.firings)
            for side, place in zip(pair.sides, places, strict=True)
        )

    def _unmatched(self, pair: Pair) -> PairResult:
        """Return the result for a site that only one run has."""
        series = pair.baseline or pair.target
        assert series is not None
        side, notes = side_of(series, series.first.shape), (pair.note,) if pair.note else ()
        meta = PairMeta(baseline=side, notes=notes) if pair.baseline else PairMeta(target=side, notes=notes)
        result = PairResult(pair, pair.site or series.site, meta)
        try:
            firings = self.preparer.weights_of(1 if pair.baseline is None else 0, series)
            return result.replace(softmax_condition=softmax_condition_alone(firings)) if firings else result
        except DataError:  # the condition is supplementary
            return result

    def _without_reading(
        self, shape_class: ShapeClass, prepared: PreparedPair, result: PairResult
    ) -> "AnalyzedPair | PendingRead":
        if not prepared.plan.joins:
            return AnalyzedPair(result.replace(problem=_no_rows(prepared.plan.counts)))
        joined = prepared.joined_firings
        replicas = check_replicas(joined)
        notes = (*prepared.notes, replicas.note) if replicas.note else prepared.notes
        members: dict[str, Any] = {"replica_problem": replicas.problem, "replica_place": replicas.place, "notes": notes}
        if replicas.whole is not None and replicas.place is not None:
            wrong = contradicted_ranks(prepared, replicas.whole)
            other = self.preparer.target if replicas.whole.run is self.preparer.baseline else self.preparer.baseline
            members["replica_place"] = structs.replace(replicas.place, rank=wrong[0] if len(wrong) == 1 else None)
            if wrong:
                ranks = f"rank{'s' if len(wrong) > 1 else ''} {compact_ranges(wrong)}"
                members["replica_problem"] = f"{replicas.problem}; {ranks} not as {other.name} has it"
        if replicas.problem or notes != result.notes:
            result = result.replace(**members)
        if all(whole.has_values for whole in joined) or all(map(prepared.equal_by_hash, prepared.plan.joins)):
            return PendingRead(shape_class, LazyPair(prepared), result.pair, result.site, result.meta, result.extras)
        if has_sketches(result.pair.baseline, result.pair.target):
            estimated = compare_sketches(result, self.preparer)
            if isinstance(estimated, PairResult):
                return AnalyzedPair(estimated)
            result = result.replace(notes=(f"sketches not compared: {estimated}", *result.notes))
        result = _of_stats(result, prepared, shape_class.is_exact)
        return AnalyzedPair(result, None if result.problem else prepared)

    def _read_values(self, prepared_pairs: Sequence[PendingRead]) -> Iterator[AnalyzedPair]:
        """Read and measure the values of the pairs; yield the results."""
        batch = measure_all([pending.lazy_pair for pending in prepared_pairs], self.tolerance or (0.0, 0.0))
        detail = self.measure_detail if self.detail else None
        reader = ValueReader(
            batch,
            ReaderOptions(self.preparer.row_map, self.has_gradients, self.norm_modules, self.conv_modules, detail),
        )
        for pending, section in zip(prepared_pairs, batch.section, strict=True):
            prepared = None if pending.lazy_pair.batched else pending.lazy_pair.prepared
            problem = batch.problem(section)
            if problem is not None:
                is_shape_mismatch = _is_width(problem) and _are_whole(pending.lazy_pair.prepared)
                failed = PairResult(pending.pair, pending.site, pending.shape_class.meta).replace(
                    problem=str(problem), is_shape_mismatch=is_shape_mismatch
                )
                yield AnalyzedPair(failed, prepared if _is_width(problem) else None)
                continue
            try:
                yield AnalyzedPair(reader.result_of(pending, section), prepared)
            except DataError as error:
                yield AnalyzedPair(
                    PairResult(pending.pair, pending.site, pending.shape_class.meta).replace(problem=str(error))
                )

    def with_suggested_dims(self, analyzed: AnalyzedPair) -> PairResult:
        """Return the result, with a suggestion of dims that would explain the problem, if there is one.

        Must be called in the order of the pairs, because a suggestion depends on earlier ones.
        """
        result, prepared = analyzed.result, analyzed.prepared
        if prepared is None:
            return result
        if not result.problem:
            warning = self._suggester.check_layout(
                result.pair, prepared, result.metrics.rel_l2 if result.metrics else 0.0
            )
            return result.replace(notes=(warning, *result.notes)) if warning else result
        broken = any(w.problem for w in (prepared.left[0], prepared.right[0]))
        suggestion = self._suggester.suggest(result.pair, broken=broken)
        return result.replace(problem=f"{result.problem}; {suggestion}") if suggestion else result

    def measure_detail(self, site: str, prepared: PreparedPair) -> "Detail":
        """Measure a pair with values on both sides in detail, see :mod:`..metrics.detail`. Raises DataError."""
        from tapscope.comparator.metrics.detail import detail_of

        configs = [run.model_config for run in (self.preparer.baseline, self.preparer.target)]
        known = [int(k) for config in configs if (k := config.get("num_experts_per_tok"))]
        return detail_of(prepared, site, known[0] if known else None)


def _packed(pair: Pair, analyzed: AnalyzedPair) -> PackedPair:
    result = analyzed.result
    is_doubtful = bool(result.problem) or result.metrics is None or not result.metrics.rel_l2 < MIN_WRONG_ERROR
    is_changed = result.pair is not pair
    return PackedPair(
        result.site,
        result.meta,
        result.values,
        result.extras,
        is_changed,
        analyzed.prepared is not None and is_doubtful,
    )


def _are_whole(prepared: PreparedPair) -> bool:
    """Return whether no other dims would help: both sides have dims or come from one rank, and are not axis
    permutations."""
    sides = (prepared.left[0], prepared.right[0])
    if sorted(sides[0].shape) == sorted(sides[1].shape):
        return False
    return all(whole.dims is not None or len({r.key.rank for r in whole.records}) == 1 for whole in sides)


def _is_width(problem: Exception) -> bool:
    """Return whether other dims might solve the problem."""
    return isinstance(problem, WidthError)


def _of_stats(result: PairResult, prepared: PreparedPair, is_exact: bool) -> PairResult:
    """Return the result of a pair for which only statistics were recorded."""
    problem, spread = compare_stats(prepared)
    num_unequal, padded = unequal_hashes(prepared)
    if num_unequal and padded and is_exact and not problem:
        problem = "the hashes differ, maybe in the padding alone: capture with keep=full to compare these"
    if problem:
        return result.replace(problem=problem)
    unequal = [join for join in prepared.plan.joins if prepared.unequal_by_hash(join)]
    permuted = bool(num_unequal) and any(map(prepared.equal_by_multiset_hash, unequal))
    notes = [PERMUTED] if permuted else ["the hashes differ, the statistics do not"] * (num_unequal and spread.is_zero)
    notes.append("only statistics were kept: differences that leave mean, rms and maximum unchanged are not seen")
    values = PairValues(basis="stats", distribution=spread, num_unequal=num_unequal)
    return structs.replace(result.replace(permuted=permuted, notes=(*notes, *result.notes)), values=values)


def _no_rows(counts: RowCounts) -> str:
    reasons = [f"{n:,} {what}" for n, what in ((counts.num_forked, "forked"), (counts.num_unaligned, "unaligned")) if n]
    return f"no row in common here{': ' + ', '.join(reasons) if reasons else ''}"


def _is_data_parallel(firing: Firing, places: MeshCoords) -> bool:
    """Return whether values differ only between ranks with different ``dp`` coordinates."""
    groups: dict[int, set[object]] = {}
    for record in firing.records:
        at = places.coords[record.key.rank].get("dp")
        if at is None or record.hash is None:
            return False
        groups.setdefault(at, set()).add((record.hash, record.shape))
    return all(len(values) == 1 for values in groups.values())


def _by_rank(firing: Firing) -> list[Record]:
    return sorted(firing.records, key=lambda record: record.key.rank)


def _same_rows(left: StepRows | None, right: StepRows | None) -> bool:
    """Return whether both grids hold the same row pairs."""
    if left is None or right is None:
        return left is right
    return np.array_equal(left.pairs, right.pairs)
