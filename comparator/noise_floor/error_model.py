"""ErrorModel: computes the noise floor of every site of a comparison from a table of named effects."""

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct

from tapscope.comparator.noise_floor.attention import AttentionMean
from tapscope.comparator.noise_floor.batch_norm_offset import BatchNormOffset
from tapscope.comparator.noise_floor.bounds import SiteTerms, local_bound, path_bound, summed_gain, worst_limit
from tapscope.comparator.noise_floor.compute_dtype import ComputeDtype
from tapscope.comparator.noise_floor.conditions import Condition, LearnedCondition
from tapscope.comparator.noise_floor.derivative_error import DerivativeJump, DerivativeValues
from tapscope.comparator.noise_floor.effect import Effect, EffectTable
from tapscope.comparator.noise_floor.float16_underflow import Float16Underflow, FlushedElement
from tapscope.comparator.noise_floor.floor_inputs import NO_FACTS, ComparisonFacts, FloorInputs
from tapscope.comparator.noise_floor.floor_table import TESTS, FloorTable
from tapscope.comparator.noise_floor.graph import Graph
from tapscope.comparator.noise_floor.inherited_attention_error import InheritedAttention
from tapscope.comparator.noise_floor.inherited_error import InheritedError
from tapscope.comparator.noise_floor.kv_cache_error import KVCacheRounding
from tapscope.comparator.noise_floor.large_rows import LargeRowRounding
from tapscope.comparator.noise_floor.local_error import LocalError
from tapscope.comparator.noise_floor.local_rounding import DtypeRounding, OpsInSequence, RankSum, ReductionOrder
from tapscope.comparator.noise_floor.loss_gradient import LossGradient, LossHead
from tapscope.comparator.noise_floor.near_zero_rows import NormOfNearZeroRows, UnevenRows, UnmatchedNorm
from tapscope.comparator.noise_floor.node import NO_INPUTS
from tapscope.comparator.noise_floor.optimizer_params import OptimizerUpdates
from tapscope.comparator.noise_floor.path_error import PathBound
from tapscope.comparator.noise_floor.reduction_length import Params
from tapscope.comparator.noise_floor.rerouted_rows import ReroutedRows
from tapscope.comparator.noise_floor.rope_error import RopeAngle
from tapscope.comparator.noise_floor.row_concentration import (
    FewTerms,
    MultiplicativeModule,
    RaggedSum,
    RowConcentration,
    SharedGain,
    SingleTermRows,
    SumCancellation,
    WeakGradient,
)
from tapscope.comparator.noise_floor.sharp_softmax import SharpSoftmax
from tapscope.comparator.noise_floor.site_form import NarrowRows, OffsetWeight, PointwiseChannel
from tapscope.comparator.noise_floor.time_embedding_error import TimeEmbedding
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.core import dtypes

Array = np.ndarray[Any, Any]

ROW_EFFECTS = (
    WeakGradient,
    SumCancellation,
    RaggedSum,
    MultiplicativeModule,
    SingleTermRows,
    FewTerms,
    SharedGain,
    RowConcentration,
)
"""Effects that count only if all errors may be in a few rows."""
EFFECTS: tuple[type[Effect[Any]], ...] = (
    # Measured errors, and the dtypes in which values were computed
    ComputeDtype,
    UnevenRows,
    # Errors that one pass through the module adds
    DtypeRounding,
    ReductionOrder,
    Float16Underflow,
    LargeRowRounding,
    RopeAngle,
    TimeEmbedding,
    InheritedAttention,
    OpsInSequence,
    RankSum,
    LocalError,
    # Errors of the site's inputs
    ReroutedRows,
    OptimizerUpdates,
    NormOfNearZeroRows,
    SharpSoftmax,
    LossGradient,
    LossHead,
    DerivativeValues,
    DerivativeJump,
    FlushedElement,
    BatchNormOffset,
    PointwiseChannel,
    AttentionMean,
    KVCacheRounding,
    InheritedError,
    # Amplification of these errors
    LearnedCondition,
    Condition,
    UnmatchedNorm,
    OffsetWeight,
    NarrowRows,
    # Errors concentrated in a few rows
    *ROW_EFFECTS,
    # The bound along the path
    PathBound,
)
"""Every effect, in evaluation order: each may use the effects before it."""
OPTIONAL = tuple(kind.name for kind in EFFECTS if kind.is_optional)
"""Names of the effects that an ablation may disable."""


class SiteFloor(NamedTuple):
    """The floor of one site, in the test with the largest ratio of error to floor."""

    error: float
    floor: float
    test: str
    row_floor: float
    """Floor of a single row."""
    growth: float
    """error / floor of the site's own module, given the errors of its inputs."""


class FloorEffect(Struct, frozen=True):
    """The contribution of one effect to the floor of a site."""

    effect: str
    """Name of the effect, see the table in docs/reference/noise-floor-effects.md."""
    contribution: float
    """Size of the contribution, in :attr:`unit`."""
    unit: str
    """``error``, relative to the row; or ``factor``, on the errors of inputs or on the limits of some tests."""
    floor_without: float | None
    """Floor of the deciding test with this effect disabled; None for an effect that every floor needs."""
    explanation: str
    """One sentence on why the effect applies."""


class _Columns(NamedTuple):
    """The members of :class:`SiteFloor`, with one element per case."""

    errors: Array
    floors: Array
    tests: Array
    row_floors: Array
    growths: Array


class ErrorModel:
    """The floors of one comparison, which depend on inputs and on the same site in other layers."""

    def __init__(
        self,
        pairs: Sequence[PairResult],
        graph: Graph,
        params: Sequence[Params],
        facts: ComparisonFacts = NO_FACTS,
        disabled: Collection[str] = (),
    ) -> None:
        """Evaluate all effects that are not ``disabled`` (names of effects).

        ``pairs`` are the results of the graph's nodes, ``params`` the parameters of their modules.
        """
        self._arguments = pairs, graph, params, facts
        self._disabled = frozenset(disabled)
        self._others: dict[str, ErrorModel] = {}
        self.inputs = inputs = FloorInputs(pairs, graph, params, facts)
        self.effects = effects = EffectTable()
        for kind in EFFECTS:
            effects.add(kind(inputs, effects, is_enabled=kind.name not in self._disabled))
        self._graph = graph
        nodes = [graph.nodes[node] for node in inputs.nodes]
        self._is_back = np.array([node.is_backward for node in nodes], bool)
        self._is_sum = np.array([node.is_summed for node in nodes], bool)
        is_state = np.array([node.is_state for node in nodes], bool)
        given = [graph.inputs(node) for node in inputs.nodes]
        self._is_made = is_state | np.array([bool(each.nodes) or each.source == NO_INPUTS for each in given], bool)
        """[cases]: whether the inputs of the case are known."""
        self._mixes = np.array([inputs.attention.mixes(node) for node in inputs.nodes], bool)
        self._condition = effects[Condition].column
        self._factors = self._unobserved_factors()
        self._is_rerouted = self._downstream_of_rerouted()
        self._is_concentrated = self._is_made & (self._is_rerouted | self._is_back)
        """[cases]: whether all errors of the case may be in a few rows, even if no site upstream is bad."""
        self._terms = self._site_terms()
        self._local, self._path = self._bounds()

    # Queries

    def is_numeric(self, node: int) -> bool:
        """Return whether the site was compared as rounded numbers."""
        return self.inputs.case_of[node] >= 0

    def local_error(self, node: int) -> float:
        """Return the error that the module of a site adds by itself; 0 if the site was not compared as rounded
        numbers."""
        return self.effects[LocalError].values.get(node, 0.0)

    def floor(self, node: int, *, is_downstream: bool = False) -> SiteFloor:
        """Return the floor of a numeric site.

        ``is_downstream`` states that the site is downstream of a culprit: its inputs carry another module's error,
        which may be concentrated in a few rows.
        """
        case, columns = self.inputs.case_of[node], self._downstream_columns if is_downstream else self._usual_columns
        errors, floors, tests, row_floors, growths = columns
        return SiteFloor(
            errors.item(case), floors.item(case), TESTS[tests.item(case)], row_floors.item(case), growths.item(case)
        )

    def explain(self, node: int, *, is_downstream: bool = False) -> tuple[FloorEffect, ...]:
        """Return the effects that make up the floor of a numeric site, in the order of the table.

        Each optional effect is disabled in turn to determine the floor of the deciding test without that effect.
        """
        own = self.floor(node, is_downstream=is_downstream)
        _, local, whole = self._downstream_tables if is_downstream else self._usual_tables
        effects, test, case = [], TESTS.index(own.test), self.inputs.case_of[node]
        is_by_rows = bool(self._is_made[case] if is_downstream else self._is_concentrated[case])
        is_path = whole.limits[test, case] < local.limits[test, case]
        for effect in self.effects.applying(node):
            if (isinstance(effect, PathBound) and not is_path) or (isinstance(effect, ROW_EFFECTS) and not is_by_rows):
                continue
            without = None
            if effect.is_optional:
                without = self._without(effect.name).limit(node, own.test, is_downstream=is_downstream)
            size = effect.contribution(node)
            effects.append(FloorEffect(effect.name, size, str(effect.unit), without, effect.explain(node)))
        return tuple(effects)

    def _without(self, effect: str) -> "ErrorModel":
        """Return the model with one more effect disabled."""
        if effect not in self._others:
            self._others[effect] = ErrorModel(*self._arguments, disabled={*self._disabled, effect})
        return self._others[effect]

    def limit(self, node: int, test: str, *, is_downstream: bool = False) -> float:
        """Return the floor of a site in one test; the two tail tests share a name, and the smaller floor applies."""
        tables = self._downstream_tables if is_downstream else self._usual_tables
        rows = [i for i, name in enumerate(TESTS) if name == test]
        return float(tables[2].limits[rows, self.inputs.case_of[node]].min())

    # Both bounds of every case

    @cached_property
    def _usual_tables(self) -> tuple[Array, FloorTable, FloorTable]:
        tests, local, whole = self._tables(self._is_concentrated, self._is_rerouted)
        return tests, local, local.where(self._downstream_of_mean(), whole)

    @cached_property
    def _downstream_tables(self) -> tuple[Array, FloorTable, FloorTable]:
        # The error of a culprit is not rounding, so the path bounds all cases, regardless of their inputs.
        return self._tables(self._is_made, np.zeros_like(self._is_made))

    @cached_property
    def _usual_columns(self) -> _Columns:
        return _columns(*self._usual_tables)

    @cached_property
    def _downstream_columns(self) -> _Columns:
        return _columns(*self._downstream_tables)

    def _tables(self, is_concentrated: Array, is_open: Array) -> tuple[Array, FloorTable, FloorTable]:
        """Return (errors by test, local bounds, both bounds) of all cases.

        The errors of ``is_concentrated`` cases may all be in a few rows. The path does not bound ``is_open`` cases.
        """
        tests, local, whole = self._terms.spreads.tests, self._local, self._bounded(self._local, self._path)
        if is_concentrated.any() and self.effects[RowConcentration].is_enabled:
            cases = np.flatnonzero(is_concentrated)
            by_rows = self._row_concentrated(cases, is_open[cases])
            local, whole = local.replaced(cases, by_rows[0]), whole.replaced(cases, by_rows[1])
        updates = self.effects[OptimizerUpdates]
        if updates.values:
            at, tests_of_updates, *floors = updates.judged(self._terms)
            tests[:, at], local, whole = tests_of_updates, local.replaced(at, floors[0]), whole.replaced(at, floors[1])
        if known := self.inputs.facts.inherited_activations:
            these = [case for case, node in enumerate(self.inputs.nodes) if self.inputs.site(node) in known]
            local, whole = local.inherited(these, tests), whole.inherited(these, tests)
        return tests, local, whole

    def _bounds(self) -> tuple[FloorTable, FloorTable]:
        """Return (local bound, path bound); a site without inputs has only the path bound."""
        given = self.effects[InheritedError].given
        near_zero = self.effects[NormOfNearZeroRows].factors(self.inputs.nodes)
        factors = np.where((self._factors > 1.0).any(0), self._factors, near_zero)
        is_amplified = (factors > 1.0).any(0)
        open_tail = np.where(self._is_back | is_amplified, np.inf, worst_limit(given, self._condition))
        bound = self.effects[PathBound]
        path = path_bound(bound.column, self._terms._replace(tail_limit=open_tail), bound.worst_rows).amplified(factors)
        keeps_channels = np.array([self.inputs.attention.convolves(node) for node in self.inputs.nodes], bool)
        local = local_bound(
            given,
            self._terms._replace(tail_limit=np.where(is_amplified, np.inf, 0.0)),
            self._condition,
            mixes=self._mixes,
            keeps_channels=keeps_channels & ~self._is_back,
            sums_rows=self._is_sum,
        )
        local = local.amplified(self._factors).where(self._is_made, path)
        summed = path.for_sums(summed_gain(given), self._terms.spreads.num_rows)
        return local, summed.where(self._is_sum & self._is_made, path)

    def _bounded(self, local: FloorTable, path: FloorTable) -> FloorTable:
        """Return the stricter of both bounds."""
        return local.smaller(path) if self.effects[PathBound].is_enabled else local

    def _row_concentrated(self, cases: Array, is_open: Array) -> tuple[FloorTable, FloorTable]:
        """Return (local bound, both bounds) of the given cases, whose errors may all be in a few rows."""
        is_back, mixes = self._is_back[cases], self._mixes[cases]
        rows = self.effects[RowConcentration]
        local, is_bounded = rows.floors(self._terms, cases, self._condition[cases], mixes, self._is_rerouted[cases])
        local = local.amplified(self._factors[:, cases])
        shared = self.inputs.columns(self.effects[SharedGain].values, 0.0)[cases]
        both = self._bounded(local.where(is_back, self._local.at(cases)), self._path.at(cases).with_gain(shared))
        return local, local.where(is_open | ~is_bounded, both)

    # Terms of the bounds

    def _site_terms(self) -> SiteTerms:
        names = [self.effects[ComputeDtype].names(node) for node in self.inputs.nodes]
        local = self.effects[LocalError]
        return SiteTerms(
            self.effects[UnevenRows].judged,
            local.column,
            np.array([max(map(dtypes.epsilon, each)) for each in names]),
            local.limits,
            weight_rounding=self.inputs.columns(self.effects[OffsetWeight].values, 1.0),
            widens_narrow=self.effects[NarrowRows].is_enabled,
            is_gradient=self._is_back,
        )

    def _unobserved_factors(self) -> Array:
        """Return factors on the row errors of functions that were not captured, [quantiles, cases]."""
        norms, softmax = self.effects[UnmatchedNorm].values, self.effects[SharpSoftmax]
        return np.array([norms.get(n) or softmax.factor(n) for n in self.inputs.nodes]).reshape(-1, 4).T

    def _downstream_of_mean(self) -> Array:
        """Return, for each case, whether a norm upstream subtracts the mean of each channel of an image.

        Rounding errors do not share that mean, so each such norm amplifies them by rms / standard deviation of its
        input. The path adds up errors as if no module amplified them, so it does not bound these cases.
        """
        is_downstream = [False] * len(self.inputs.pairs)
        for node in self.inputs.nodes:
            if not self._graph.is_backward[node]:
                origins = self._graph.inputs(node).nodes
                is_norm = self._graph.nodes[node].subtracts_mean
                is_downstream[node] = is_norm or any(map(is_downstream.__getitem__, origins))
        return np.array([is_downstream[node] for node in self.inputs.nodes], bool)

    def _downstream_of_rerouted(self) -> Array:
        """Return, for each case, whether its inputs contain rerouted token rows, or rows that are pure rounding.

        The errors of these rows are not rounding of the modules upstream, so the path does not bound these cases.
        """
        noise, rerouted = self.effects[NormOfNearZeroRows].noise, self.effects[ReroutedRows].values
        holds = [node in rerouted for node in range(len(self.inputs.pairs))]
        is_downstream = [False] * len(self.inputs.nodes)
        if any(holds) or noise:
            parameters = (n for n in self.effects[OptimizerUpdates].values if self.inputs.case_of[n] >= 0)
            for node in (*parameters, *self.inputs.nodes):
                origins = self._graph.inputs(node).nodes
                here = any(map(holds.__getitem__, origins))
                is_downstream[self.inputs.case_of[node]] = here
                holds[node] |= here or not noise.isdisjoint(origins)
        return np.array(is_downstream, bool)


def _columns(tests: Array, local: FloorTable, whole: FloorTable) -> _Columns:
    return _Columns(*whole.worst(tests), whole.errors[-1], local.worst(tests).ratios)
