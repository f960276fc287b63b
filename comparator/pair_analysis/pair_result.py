"""Examined: everything about one matched pair of sites that can be known without looking at other sites."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from msgspec import Struct, structs

from tapscope.comparator.facts import ErrorMetrics, Place, RowCounts, Side, StepResult
from tapscope.comparator.matching.match import Pair
from tapscope.comparator.metrics.error_distribution import ErrorDistribution, ParameterUpdate, Quantiles
from tapscope.comparator.metrics.measure import are_masks
from tapscope.comparator.metrics.metric_columns import MetricColumns
from tapscope.comparator.runs.series import named_side, sources_of
from tapscope.core import dtypes

if TYPE_CHECKING:
    from tapscope.comparator.metrics.detail import Detail


class PairMeta(Struct, frozen=True, kw_only=True):
    """What is known of a pair beside its values; one object for all pairs of a form of which nothing else is."""

    baseline: Side | None = None
    """Named as that of one of these pairs."""
    target: Side | None = None
    problem: str = ""
    """Why it could not be compared; what values gave is then empty."""
    is_misfit: bool = False
    """Whether the problem is how the runs differ, whole tensors of two shapes, and no lack of dims."""
    apart: str = ""
    """Why nothing of it meets though nothing is wrong: it is left out of the findings."""
    layout: str = "whole"
    rows: RowCounts = RowCounts()
    missing: int = 0
    """Firings without a partner that nobody explained."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    """Of the notes, those that say why values may be wrong."""


class PairValues(Struct, frozen=True, kw_only=True, gc=False):
    """What came of the values of a pair."""

    basis: str = "none"
    num_unequal: int = 0
    """Rows that are not equal bit for bit as numbers; where only statistics were kept, firings whose hashes differ."""
    worst: Place | None = None
    values: MetricColumns | None = None
    """Where its numbers are; None for what was not compared as numbers."""
    place: int = 0
    """Its place among these."""
    step: int = 0
    """The target's step that all rows are of."""
    steps: tuple[StepResult, ...] | None = None
    """Where there are several, or none."""
    spread: ErrorDistribution | None = None
    """Where more is known of it than those numbers say, or they are none."""


class PairExtras(Struct, frozen=True, kw_only=True):
    """What is known of a few pairs alone."""

    handed_on: ErrorDistribution | None = None
    """The spread of all rows where some were set aside (:mod:`.set_aside`): that is what goes into what follows."""
    size: float = 0.0
    """Norm of the baseline's rows that were read; 0 where none was, and without gradients."""
    own_errors: Quantiles = ()
    """Errors of the rows that a norm is given, each relative to itself (:mod:`.lifts`); empty for anything else."""
    sharpness: Quantiles = ()
    """Condition of attention weights (:mod:`.sharpness`); empty for anything else."""
    even_errors: Quantiles = ()
    """Errors of the rows, each relative to the typical one at least, where some stand out; else empty."""
    even_peak: float = 0.0
    """The same of the largest element."""
    drifts: tuple[ParameterUpdate, ...] = ()
    """Of a parameter that an optimizer moved, step by step; see :mod:`.updates`."""
    sways: Mapping[int, Quantiles] = {}
    """Step -> what errors of a parameter's gradient turn of an update; empty for anything else."""
    unequal: tuple[int, ...] = ()
    """Row pairs whose integers differ, the first few; -1 where there are no token rows."""
    permuted: bool = False
    """Whether somewhere unequal tensors hold the same elements, in another order."""
    detail: "Detail | None" = None
    replicas: str = ""
    """What is wrong with the replicas of one side, if anything."""
    replica_place: Place | None = None
    """Where that is."""


NO_VALUES = PairValues()
NO_EXTRAS = PairExtras()


class PairResult(Struct, frozen=True, gc=False):
    """One site before it is judged. There may be very many: what pairs have in common is held once, numbers are held in
    columns, and what is asked for is made of these."""

    pair: Pair
    site: str
    about: PairMeta
    read: PairValues = NO_VALUES
    more: PairExtras = NO_EXTRAS

    def but(self, **members: Any) -> "PairResult":
        """With other members of :attr:`about` and :attr:`more`."""
        about = {name: value for name, value in members.items() if name in PairMeta.__struct_fields__}
        more = {name: value for name, value in members.items() if name not in about}
        return PairResult(
            self.pair, self.site, structs.replace(self.about, **about), self.read, structs.replace(self.more, **more)
        )

    @property
    def baseline(self) -> Side | None:
        """What a finding says of the baseline's part; None for what only the target has."""
        return named_side(self.about.baseline, self.pair.baseline)

    @property
    def target(self) -> Side | None:
        """The same of the target."""
        return named_side(self.about.target, self.pair.target)

    @property
    def names(self) -> Iterator[str]:
        """What either run recorded it as, see :attr:`.finding.Side.site`."""
        return (sources_of(one)[0].site for one in (self.pair.baseline, self.pair.target) if one is not None)

    @property
    def dtypes(self) -> tuple[str, str]:
        """Of both sides; empty where there is no tensor."""
        one, two = self.about.baseline, self.about.target
        return interned_pair((one.dtype if one else None) or "", (two.dtype if two else None) or "")

    @property
    def is_matched(self) -> bool:
        """Whether both runs have the site."""
        return self.about.baseline is not None and self.about.target is not None

    @property
    def is_exact(self) -> bool:
        """Whether values of this kind must be equal: integers, booleans, values that are no tensors."""
        one, two = self.about.baseline, self.about.target
        return one is not None and two is not None and are_exact(one.dtype, two.dtype)

    @property
    def problem(self) -> str:
        """See :class:`PairMeta`."""
        return self.about.problem

    @property
    def apart(self) -> str:
        """See :class:`PairMeta`."""
        return self.about.apart

    @property
    def rows(self) -> RowCounts:
        """See :class:`PairMeta`."""
        return self.about.rows

    @property
    def notes(self) -> tuple[str, ...]:
        """What is to be said of it."""
        return self.about.notes

    @property
    def basis(self) -> str:
        """What was compared, see :attr:`.finding.Finding.basis`."""
        return self.read.basis

    @property
    def num_unequal(self) -> int:
        """See :class:`PairValues`."""
        return self.read.num_unequal

    @property
    def numbers(self) -> ErrorMetrics | None:
        """Of everything that was read."""
        values = self.read.values
        return None if values is None else values.numbers(self.read.place)

    @property
    def num_odd(self) -> int:
        """Places where one side is not finite and the other is something else."""
        values = self.read.values
        return 0 if values is None else values.mismatch(self.read.place)

    @property
    def has_spread(self) -> bool:
        """Whether it was compared as numbers, or as statistics."""
        return self.read.spread is not None or self.read.values is not None

    @property
    def spread(self) -> ErrorDistribution | None:
        """How its errors are distributed; None for what was not compared as numbers."""
        found, values = self.read.spread, self.read.values
        return values.spread(self.read.place) if found is None and values is not None else found

    @property
    def is_equal(self) -> bool:
        """Whether nothing of what was read differs, and no gain either."""
        found, values = self.read.spread, self.read.values
        if found is None:
            return values is None or bool(values.is_zero.item(self.read.place))
        return found.is_zero and not found.gain

    @property
    def steps(self) -> tuple[StepResult, ...]:
        """One result a target step, in order; steps whose hashes are equal have none."""
        found, values = self.read.steps, self.read.values
        return (values.step(self.read.place, self.read.step),) if found is None and values is not None else found or ()


@lru_cache
def are_exact(baseline: str | None, target: str | None) -> bool:
    """Whether values of these types must be equal, see :attr:`PairResult.is_exact`."""
    return are_masks(baseline, target) or not (dtypes.is_float(baseline) or dtypes.is_float(target))


@lru_cache
def interned_pair(baseline: str, target: str) -> tuple[str, str]:
    """One object for all sites."""
    return baseline, target
