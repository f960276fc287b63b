"""Pair result: everything about one matched pair of sites that does not depend on other sites."""

from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from msgspec import Struct, structs

from tapscope.comparator.facts import ChoiceDifference, ErrorMetrics, Place, RowCounts, Side, StepResult
from tapscope.comparator.matching.match import Pair
from tapscope.comparator.metrics.error_distribution import ErrorDistribution, ParameterUpdate, Quantiles
from tapscope.comparator.metrics.measure import are_masks
from tapscope.comparator.metrics.metric_columns import MetricColumns
from tapscope.comparator.runs.series import named_side, sources_of
from tapscope.core import dtypes

if TYPE_CHECKING:
    from tapscope.comparator.metrics.detail import Detail


class PairMeta(Struct, frozen=True, kw_only=True):
    """Facts about a pair that do not depend on its values; pairs with the same shape key share one object."""

    baseline: Side | None = None
    """With the site name of one of these pairs."""
    target: Side | None = None
    problem: str = ""
    """Why it could not be compared; there are no values then."""
    is_shape_mismatch: bool = False
    """Whether the problem is a real difference, two whole tensors of different shapes, rather than missing dims."""
    exclusion_reason: str = ""
    """Why no rows match although nothing is wrong; the pair is then excluded from the findings."""
    layout: str = "whole"
    rows: RowCounts = RowCounts()
    num_missing: tuple[int, int] = (0, 0)
    """Firings that baseline and target lack without an explanation: the other run has them."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    """The notes that say why values may be wrong."""


class PairValues(Struct, frozen=True, kw_only=True, gc=False):
    """Results from the values of a pair."""

    basis: str = "none"
    num_unequal: int = 0
    """Rows that are not exactly equal as numbers; with statistics only, firings whose hashes differ."""
    worst: Place | None = None
    columns: MetricColumns | None = None
    """Columns that hold its metrics; None if it was not compared as numbers."""
    index: int = 0
    """Its index in these columns."""
    step: int = 0
    """The target's step of all rows."""
    steps: tuple[StepResult, ...] | None = None
    """Results per step if there are several steps or none."""
    distribution: ErrorDistribution | None = None
    """The error distribution, if more is known than the columns hold, or there are no columns."""


class PairExtras(Struct, frozen=True, kw_only=True):
    """Facts that only a few pairs have."""

    propagated: ErrorDistribution | None = None
    """Distribution over all rows, if some were excluded (:mod:`..detectors.exclude_rerouted_rows`): this is what
    propagates."""
    baseline_norm: float = 0.0
    """Norm of the baseline's rows that were read; 0 if there are none, and without gradients."""
    summand_ratio: float = 0.0
    """Norm of the partial sums of a side, over all of them, / norm of their sum; 0 for values that
    ranks do not sum."""
    row_relative_errors: Quantiles = ()
    """Errors of the input rows of a norm, each relative to itself (:mod:`..metrics.near_zero_rows`); else empty."""
    softmax_condition: Quantiles = ()
    """Condition of attention weights (:mod:`..metrics.softmax_condition`); else empty."""
    errors_above_typical: Quantiles = ()
    """Row errors relative to at least the typical row size, if there are outliers; else empty."""
    peak_above_typical: float = 0.0
    """The same for the largest element."""
    parameter_updates: tuple[ParameterUpdate, ...] = ()
    """Optimizer updates of a parameter, step by step; see :mod:`..metrics.updates`."""
    update_sensitivity: Mapping[int, Quantiles] = {}
    """Step -> share of the update that errors of the gradient may flip; empty for other sites."""
    unequal_rows: tuple[int, ...] = ()
    """Row pairs whose integers differ, the first few; -1 without token rows."""
    choices: ChoiceDifference | None = None
    """How many choices of experts or keys differ; None for other sites."""
    permuted: bool = False
    """Whether unequal tensors hold the same elements in another order in some firing."""
    detail: "Detail | None" = None
    replica_problem: str = ""
    """What is wrong with the replicas of one side; empty if nothing."""
    replica_place: Place | None = None
    """Where the replicas differ."""


NO_VALUES = PairValues()
NO_EXTRAS = PairExtras()


class PairResult(Struct, frozen=True, gc=False):
    """One site before it is judged. There may be very many: common parts are shared, metrics are held in columns, and
    properties are computed on access."""

    pair: Pair
    site: str
    meta: PairMeta
    values: PairValues = NO_VALUES
    extras: PairExtras = NO_EXTRAS

    def replace(self, **members: Any) -> "PairResult":
        """Return a copy with other members of :attr:`meta` and :attr:`extras`."""
        about = {name: value for name, value in members.items() if name in PairMeta.__struct_fields__}
        more = {name: value for name, value in members.items() if name not in about}
        return PairResult(
            self.pair, self.site, structs.replace(self.meta, **about), self.values, structs.replace(self.extras, **more)
        )

    @property
    def baseline(self) -> Side | None:
        """The baseline's side; None for a site that only the target has."""
        return named_side(self.meta.baseline, self.pair.baseline)

    @property
    def target(self) -> Side | None:
        """The target's side; None for a site that only the baseline has."""
        return named_side(self.meta.target, self.pair.target)

    @property
    def names(self) -> Iterator[str]:
        """The recorded site in each run, see :attr:`..facts.Side.site`."""
        return (sources_of(one)[0].site for one in (self.pair.baseline, self.pair.target) if one is not None)

    @property
    def dtypes(self) -> tuple[str, str]:
        """Dtypes of both sides; empty without a tensor."""
        one, two = self.meta.baseline, self.meta.target
        return interned_pair((one.dtype if one else None) or "", (two.dtype if two else None) or "")

    @property
    def is_matched(self) -> bool:
        """Whether both runs have the site."""
        return self.meta.baseline is not None and self.meta.target is not None

    @property
    def is_exact(self) -> bool:
        """Whether values of this kind must be equal: integers, booleans, plain values."""
        one, two = self.meta.baseline, self.meta.target
        return one is not None and two is not None and are_exact(one.dtype, two.dtype)

    @property
    def problem(self) -> str:
        """See :class:`PairMeta`."""
        return self.meta.problem

    @property
    def exclusion_reason(self) -> str:
        """See :class:`PairMeta`."""
        return self.meta.exclusion_reason

    @property
    def rows(self) -> RowCounts:
        """See :class:`PairMeta`."""
        return self.meta.rows

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about the pair."""
        return self.meta.notes

    @property
    def basis(self) -> str:
        """What was compared, see :attr:`.finding.Finding.basis`."""
        return self.values.basis

    @property
    def num_unequal(self) -> int:
        """See :class:`PairValues`."""
        return self.values.num_unequal

    @property
    def metrics(self) -> ErrorMetrics | None:
        """Global metrics of everything that was read."""
        values = self.values.columns
        return None if values is None else values.metrics(self.values.index)

    @property
    def num_nonfinite_mismatch(self) -> int:
        """Places where one side is not finite and the other is different."""
        values = self.values.columns
        return 0 if values is None else values.num_nonfinite_mismatch(self.values.index)

    @property
    def has_distribution(self) -> bool:
        """Whether it was compared as numbers, or by statistics."""
        return self.values.distribution is not None or self.values.columns is not None

    @property
    def distribution(self) -> ErrorDistribution | None:
        """Distribution of its errors; None if it was not compared as numbers."""
        distribution, values = self.values.distribution, self.values.columns
        return values.distribution(self.values.index) if distribution is None and values is not None else distribution

    @property
    def is_equal(self) -> bool:
        """Whether nothing that was read differs, not even by a gain."""
        distribution, values = self.values.distribution, self.values.columns
        if distribution is None:
            return values is None or bool(values.is_zero.item(self.values.index))
        return distribution.is_zero and not distribution.gain

    @property
    def steps(self) -> tuple[StepResult, ...]:
        """One result per target step, in order; steps with equal hashes have none."""
        steps, values = self.values.steps, self.values.columns
        return (
            (values.step(self.values.index, self.values.step),) if steps is None and values is not None else steps or ()
        )


@lru_cache
def are_exact(baseline: str | None, target: str | None) -> bool:
    """Return whether values of these dtypes must be equal, see :attr:`PairResult.is_exact`."""
    return are_masks(baseline, target) or not (dtypes.is_float(baseline) or dtypes.is_float(target))


@lru_cache
def interned_pair(baseline: str, target: str) -> tuple[str, str]:
    """One shared object for all sites."""
    return baseline, target
