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
    """Baseline side, with the site name of one of the pairs that share this object."""
    target: Side | None = None
    problem: str = ""
    """Why the pair could not be compared; empty if it could. A pair with a problem has no values."""
    is_shape_mismatch: bool = False
    """Whether the problem is a real difference (whole tensors of different shapes) rather than missing dims."""
    exclusion_reason: str = ""
    """Why no rows match although nothing is wrong; the pair is then excluded from the findings."""
    layout: str = "whole"
    rows: RowCounts = RowCounts()
    num_missing: tuple[int, int] = (0, 0)
    """Number of firings that (baseline, target) lacks without an explanation, although the other run has them."""
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    """The subset of notes that say why values may be wrong."""


class PairValues(Struct, frozen=True, kw_only=True, gc=False):
    """Results computed from the values of a pair."""

    basis: str = "none"
    num_unequal: int = 0
    """Number of rows that are not exactly equal; with statistics only, number of firings whose hashes differ."""
    worst: Place | None = None
    columns: MetricColumns | None = None
    """Columnar metrics that include this pair; None if it was not compared numerically."""
    index: int = 0
    """Index of the pair in :attr:`columns`."""
    step: int = 0
    """Target step of all rows, if there is only one."""
    steps: tuple[StepResult, ...] | None = None
    """Results per step if the pair covers several steps or none; otherwise None."""
    distribution: ErrorDistribution | None = None
    """Error distribution, if it is more detailed than :attr:`columns` or there are no columns."""


class PairExtras(Struct, frozen=True, kw_only=True):
    """Facts that only a few pairs have."""

    propagated: ErrorDistribution | None = None
    """Error distribution over all rows if some were excluded (:mod:`..detectors.exclude_rerouted_rows`): downstream
    sites inherit this error."""
    baseline_norm: float = 0.0
    """Norm of the baseline rows that were read; 0 if none were read, or in runs without gradients."""
    summand_ratio: float = 0.0
    """Norm of all partial sums of a side together / norm of their total; 0 for values that are not summed over
    ranks."""
    row_relative_errors: Quantiles = ()
    """Error of each input row of a norm relative to that row (:mod:`..metrics.near_zero_rows`); empty for other
    sites."""
    softmax_condition: Quantiles = ()
    """Condition number of attention weights (:mod:`..metrics.softmax_condition`); empty for other sites."""
    errors_above_typical: Quantiles = ()
    """Row errors relative to the row size, but at least to the typical one; empty without outlier rows."""
    peak_above_typical: float = 0.0
    """The counterpart of :attr:`errors_above_typical` for the largest element."""
    parameter_updates: tuple[ParameterUpdate, ...] = ()
    """Optimizer updates of a parameter, step by step: see :mod:`..metrics.updates`."""
    update_sensitivity: Mapping[int, Quantiles] = {}
    """Step -> share of the update that errors of the gradient may flip; empty for other sites."""
    unequal_rows: tuple[int, ...] = ()
    """Row pairs whose integers differ, limited to the first few; -1 without token rows."""
    choices: ChoiceDifference | None = None
    """Number of differing choices of experts or keys; None for other sites."""
    permuted: bool = False
    """Whether, in some firing, unequal tensors hold the same elements in another order."""
    detail: "Detail | None" = None
    replica_problem: str = ""
    """Defect of the replicas of one side; empty if they agree."""
    replica_place: Place | None = None
    """Place where the replicas differ."""


NO_VALUES = PairValues()
NO_EXTRAS = PairExtras()


class PairResult(Struct, frozen=True, gc=False):
    """Comparison result of one site before it is judged.

    There may be very many: common parts are shared, metrics are stored in columns, and properties are computed on
    access.
    """

    pair: Pair
    site: str
    meta: PairMeta
    values: PairValues = NO_VALUES
    extras: PairExtras = NO_EXTRAS

    def replace(self, **members: Any) -> "PairResult":
        """Return a copy with the given fields of :attr:`meta` and :attr:`extras` replaced."""
        about = {name: value for name, value in members.items() if name in PairMeta.__struct_fields__}
        more = {name: value for name, value in members.items() if name not in about}
        return PairResult(
            self.pair, self.site, structs.replace(self.meta, **about), self.values, structs.replace(self.extras, **more)
        )

    @property
    def baseline(self) -> Side | None:
        """Baseline side; None for a site that only the target has."""
        return named_side(self.meta.baseline, self.pair.baseline)

    @property
    def target(self) -> Side | None:
        """Target side; None for a site that only the baseline has."""
        return named_side(self.meta.target, self.pair.target)

    @property
    def names(self) -> Iterator[str]:
        """Recorded site name in each run, see :attr:`..facts.Side.site`."""
        return (sources_of(one)[0].site for one in (self.pair.baseline, self.pair.target) if one is not None)

    @property
    def dtypes(self) -> tuple[str, str]:
        """(baseline, target) dtypes; empty for a side without a tensor."""
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
        """See :attr:`PairMeta.problem`."""
        return self.meta.problem

    @property
    def exclusion_reason(self) -> str:
        """See :attr:`PairMeta.exclusion_reason`."""
        return self.meta.exclusion_reason

    @property
    def rows(self) -> RowCounts:
        """See :attr:`PairMeta.rows`."""
        return self.meta.rows

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences about the pair."""
        return self.meta.notes

    @property
    def basis(self) -> str:
        """Kind of data that was compared, see :attr:`.finding.Finding.basis`."""
        return self.values.basis

    @property
    def num_unequal(self) -> int:
        """See :attr:`PairValues.num_unequal`."""
        return self.values.num_unequal

    @property
    def metrics(self) -> ErrorMetrics | None:
        """Global metrics over everything that was read; None if not compared numerically."""
        values = self.values.columns
        return None if values is None else values.metrics(self.values.index)

    @property
    def num_nonfinite_mismatch(self) -> int:
        """Number of elements where one side is not finite and the other is different."""
        values = self.values.columns
        return 0 if values is None else values.num_nonfinite_mismatch(self.values.index)

    @property
    def has_distribution(self) -> bool:
        """Whether the pair was compared numerically, or by statistics."""
        return self.values.distribution is not None or self.values.columns is not None

    @property
    def distribution(self) -> ErrorDistribution | None:
        """Error distribution; None if the pair was not compared numerically."""
        distribution, values = self.values.distribution, self.values.columns
        return values.distribution(self.values.index) if distribution is None and values is not None else distribution

    @property
    def is_equal(self) -> bool:
        """Whether everything that was read is equal, including the gain."""
        distribution, values = self.values.distribution, self.values.columns
        if distribution is None:
            return values is None or bool(values.is_zero.item(self.values.index))
        return distribution.is_zero and not distribution.gain

    @property
    def steps(self) -> tuple[StepResult, ...]:
        """One result per target step, in order; steps with equal hashes are not included."""
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
    """Return the pair as one shared object, to save memory over all sites."""
    return baseline, target
