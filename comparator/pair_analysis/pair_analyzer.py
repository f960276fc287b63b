"""Examine: everything about one matched pair of sites that can be known without looking at other sites."""

from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from msgspec import Struct, structs

from tapscope.comparator.alignment.prepare import PairPreparer, PreparedPair
from tapscope.comparator.facts import RowCounts
from tapscope.comparator.matching.match import Pair
from tapscope.comparator.metrics.lazy_pair import LazyPair
from tapscope.comparator.metrics.measure import WidthError, measure_all
from tapscope.comparator.metrics.softmax_condition import softmax_condition_alone
from tapscope.comparator.pair_analysis.pair_result import PairMeta, PairResult, PairValues
from tapscope.comparator.pair_analysis.replicas import (
    check_replicas,
    contradicted_ranks,
    stacked_by_rank,
    with_replicas,
)
from tapscope.comparator.pair_analysis.shape_class import ShapeClass, shape_class_of
from tapscope.comparator.pair_analysis.suggester import Suggester
from tapscope.comparator.pair_analysis.summaries import analyze_plain_values, compare_stats, unequal_hashes
from tapscope.comparator.pair_analysis.value_reader import PERMUTED, PendingRead, ReaderOptions, ValueReader
from tapscope.comparator.runs.series import side_of
from tapscope.core.errors import DataError
from tapscope.core.site import compact_ranges

if TYPE_CHECKING:
    from tapscope.comparator.metrics.detail import Detail


class AnalyzedPair(Struct, frozen=True):
    """A pair compared, before dims are suggested."""

    one: PairResult
    ready: PreparedPair | None = None
    """None where there is nothing to suggest."""


class PairAnalyzer:
    """Compares pairs of one comparison."""

    def __init__(
        self, preparer: PairPreparer, tolerance: tuple[float, float] | None = None, detail: bool = False
    ) -> None:
        """``detail``: whether unequal pairs are measured once more, see :mod:`.detail`."""
        self.preparer, self.tolerance, self.detail = preparer, tolerance, detail
        self.backward = False
        """Whether there are gradients, whose floors depend on how large values are."""
        self.norms: frozenset[str] = frozenset()
        """Paths of the modules that divide each row by its size."""
        self.convolving: frozenset[str] = frozenset()
        """Paths of the modules that make rows of an image of each other."""
        self._suggester = Suggester(preparer)
        self._kinds: dict[Hashable, ShapeClass] = {}
        """By the form of their pairs."""

    def anew(self, preparer: PairPreparer) -> "PairAnalyzer":
        """One that knows the same of the modules, for pairs with other firings."""
        other = PairAnalyzer(preparer, self.tolerance, self.detail)
        other.backward, other.norms, other.convolving = self.backward, self.norms, self.convolving
        return other

    def examine(self, pair: Pair) -> PairResult:
        """Compare one pair; what cannot be compared says why, only a broken program raises."""
        (look,) = self.look([pair])
        return self.advised(look)

    @np.errstate(all="ignore")  # as in compare(), for this may run in a thread of its own
    def look(self, pairs: Sequence[Pair]) -> list[AnalyzedPair]:
        """The greater part of :meth:`examine`, which several threads may do at once; of small pairs it takes less time
        when many are given."""
        begun = [self._begin(pair) for pair in pairs]
        waiting = [one for one in begun if isinstance(one, PendingRead)]
        read = self._read(waiting) if waiting else iter(())
        return [next(read) if isinstance(one, PendingRead) else one for one in begun]

    def _begin(self, pair: Pair) -> "AnalyzedPair | PendingRead":
        """A pair as it is before its values are read, or with all that can be known where there is nothing to read."""
        if pair.baseline is None or pair.target is None:
            return AnalyzedPair(self._alone(pair))
        if not (pair.baseline.is_tensor and pair.target.is_tensor):
            return AnalyzedPair(analyze_plain_values(pair, self.preparer.shift_steps, self.preparer.row_map))
        form, site = self.preparer.form(pair), pair.site or pair.baseline.site
        kind = self._kinds.get(form)
        if kind is not None and kind.alike is not None and kind.alike.fits(pair):
            return PendingRead(kind, LazyPair(kind.ready, pair, kind.alike), pair, site, kind.about)
        ready = self.preparer.prepare(pair)
        if ready.problem and (alike := with_replicas(pair)) is not pair:
            pair, kind, form = alike, None, None
            ready = self.preparer.prepare(pair)
        if ready.problem and self._knows_nothing and (stacked := stacked_by_rank(pair)) is not pair:
            pair, kind, form = stacked, None, None
            ready = self.preparer.prepare(pair)
        if kind is None:
            is_shared = form is not None and self.preparer.like(form) is not None
            kind = shape_class_of(pair, ready, is_shared=is_shared)
            if is_shared:
                self._kinds[form] = kind
        one = PairResult(pair, site, kind.about)
        if one.problem or ready.plan.apart:
            return AnalyzedPair(one, ready if ready.problem else None)
        try:
            return self._before_values(kind, ready, one)
        except DataError as error:
            return AnalyzedPair(one.but(problem=str(error)))

    @property
    def _knows_nothing(self) -> bool:
        """Whether neither run says which rows its steps hold, or how its ranks lie."""
        preparer = self.preparer
        return not (preparer.row_map.known or preparer.baseline.mesh or preparer.target.mesh)

    def _alone(self, pair: Pair) -> PairResult:
        """What only one run has."""
        series = pair.baseline or pair.target
        assert series is not None
        only, notes = side_of(series, series.first.shape), (pair.note,) if pair.note else ()
        about = PairMeta(baseline=only, notes=notes) if pair.baseline else PairMeta(target=only, notes=notes)
        one = PairResult(pair, pair.site or series.site, about)
        try:
            firings = self.preparer.weights_of(1 if pair.baseline is None else 0, series)
            return one.but(sharpness=softmax_condition_alone(firings)) if firings else one
        except DataError:  # it is only beside what is compared
            return one

    def _before_values(self, kind: ShapeClass, ready: PreparedPair, one: PairResult) -> "AnalyzedPair | PendingRead":
        if not ready.plan.joins:
            return AnalyzedPair(one.but(problem=_no_rows(ready.plan.counts)))
        used = ready.used
        replicas = check_replicas(used)
        notes = (*ready.notes, replicas.note) if replicas.note else ready.notes
        known: dict[str, Any] = {"replicas": replicas.problem, "replica_place": replicas.place, "notes": notes}
        if replicas.whole is not None and replicas.place is not None:
            wrong = contradicted_ranks(ready, replicas.whole)
            other = self.preparer.target if replicas.whole.run is self.preparer.baseline else self.preparer.baseline
            known["replica_place"] = structs.replace(replicas.place, rank=wrong[0] if len(wrong) == 1 else None)
            if wrong:
                ranks = f"rank{'s' if len(wrong) > 1 else ''} {compact_ranges(wrong)}"
                known["replicas"] = f"{replicas.problem}; {ranks} not as {other.name} has it"
        if replicas.problem or notes != one.notes:
            one = one.but(**known)
        if all(whole.has_values for whole in used) or all(map(ready.equal_by_hash, ready.plan.joins)):
            return PendingRead(kind, LazyPair(ready), one.pair, one.site, one.about, one.more)
        found = _of_stats(one, ready, kind.is_exact)
        return AnalyzedPair(found, None if found.problem else ready)

    def _read(self, begun: Sequence[PendingRead]) -> Iterator[AnalyzedPair]:
        """Pairs once their values were read."""
        found = measure_all([one.opened for one in begun], self.tolerance or (0.0, 0.0))
        detail = self.measure_detail if self.detail else None
        reader = ValueReader(
            found, ReaderOptions(self.preparer.row_map, self.backward, self.norms, self.convolving, detail)
        )
        for one, section in zip(begun, found.section, strict=True):
            ready = None if one.opened.alike else one.opened.ready
            problem = found.problem(section)
            if problem is not None:
                is_misfit = _is_width(problem) and _are_whole(one.opened.ready)
                said = PairResult(one.pair, one.site, one.kind.about).but(problem=str(problem), is_misfit=is_misfit)
                yield AnalyzedPair(said, ready if _is_width(problem) else None)
                continue
            try:
                yield AnalyzedPair(reader.examined(one, section), ready)
            except DataError as error:
                yield AnalyzedPair(PairResult(one.pair, one.site, one.kind.about).but(problem=str(error)))

    def advised(self, look: AnalyzedPair) -> PairResult:
        """With the dims that would explain what could not be put together, where there are such; one pair after the
        other, for a suggestion depends on those before it."""
        one, ready = look.one, look.ready
        if ready is None:
            return one
        if not one.problem:
            doubt = self._suggester.doubt(one.pair, ready, one.numbers.rel_l2 if one.numbers else 0.0)
            return one.but(notes=(doubt, *one.notes)) if doubt else one
        broken = any(w.problem for w in (ready.left[0], ready.right[0]))
        advice = self._suggester.suggest(one.pair, broken=broken)
        return one.but(problem=f"{one.problem}; {advice}") if advice else one

    def measure_detail(self, site: str, ready: PreparedPair) -> "Detail":
        """A pair with values on both sides once more, see :mod:`.detail`; raises DataError."""
        from tapscope.comparator.metrics.detail import detail_of

        configs = [run.model_config for run in (self.preparer.baseline, self.preparer.target)]
        known = [int(k) for config in configs if (k := config.get("num_experts_per_tok"))]
        return detail_of(ready, site, known[0] if known else None)


def _are_whole(ready: PreparedPair) -> bool:
    """Whether both sides are as one rank holds them, or as their dims say, and have not merely their axes in another
    order: no other dims are to be asked for."""
    sides = (ready.left[0], ready.right[0])
    if sorted(sides[0].shape) == sorted(sides[1].shape):
        return False
    return all(whole.dims is not None or len({r.key.rank for r in whole.records}) == 1 for whole in sides)


def _is_width(problem: Exception) -> bool:
    """Whether other dims may help."""
    return isinstance(problem, WidthError)


def _of_stats(one: PairResult, ready: PreparedPair, is_exact: bool) -> PairResult:
    """A pair of which only statistics were kept."""
    problem, spread = compare_stats(ready)
    num_unequal, padded = unequal_hashes(ready)
    if num_unequal and padded and is_exact and not problem:
        problem = "the hashes differ, maybe in the padding alone: capture with keep=full to compare these"
    if problem:
        return one.but(problem=problem)
    odd = [join for join in ready.plan.joins if ready.unequal_by_hash(join)]
    permuted = bool(num_unequal) and any(map(ready.equal_by_bag, odd))
    notes = [PERMUTED] if permuted else ["the hashes differ, the statistics do not"] * (num_unequal and spread.is_zero)
    notes.append("only statistics were kept: what leaves mean, rms and maximum alone is not seen")
    read = PairValues(basis="stats", spread=spread, num_unequal=num_unequal)
    return structs.replace(one.but(permuted=permuted, notes=(*notes, *one.notes)), read=read)


def _no_rows(counts: RowCounts) -> str:
    reasons = [f"{n:,} {what}" for n, what in ((counts.forked, "forked"), (counts.unaligned, "unaligned")) if n]
    return f"no row in common here{': ' + ', '.join(reasons) if reasons else ''}"
