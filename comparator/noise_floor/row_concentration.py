"""Row concentration: floors of sites whose errors may all be in a few rows.

These are sites downstream of rerouted token rows, sites downstream of another module's error, where single rows carry
the whole error, and gradients, because rows of tokens that the model predicts with certainty are near zero.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from msgspec import structs

from tapscope.comparator.metrics.elementwise import larger, smaller
from tapscope.comparator.metrics.error_columns import ErrorColumns, LargestErrors
from tapscope.comparator.metrics.error_distribution import ErrorDistribution
from tapscope.comparator.noise_floor.bounds import SiteTerms, local_bound
from tapscope.comparator.noise_floor.constants import (
    CONDITION_WIDENING,
    MATRIX_NDIM,
    MULTIPLICATIVE_CONDITION,
    NARROW_ROW_WIDTH,
    REDIRECTED_ROW_ERROR,
    REDIRECTED_SMALL_ROW_ERROR,
)
from tapscope.comparator.noise_floor.effect import Effect, Unit
from tapscope.comparator.noise_floor.floor_table import FloorTable
from tapscope.comparator.noise_floor.inherited_error import InheritedError
from tapscope.comparator.noise_floor.near_zero_rows import NormOfNearZeroRows
from tapscope.comparator.noise_floor.rerouted_rows import ReroutedRows
from tapscope.core.formatting import number
from tapscope.kernels.native.aggregate import SMALL_ROW

Array = np.ndarray[Any, Any]


class WeakGradient(Effect[float]):
    """Weak influence of a value on the loss, measured as the norm of its gradient times the norm of the value. A
    function that is linear in a value preserves this product. If a softmax or a norm hardly reacts to the value, its
    gradient is a difference of larger terms and carries their errors: ``largest effect of the values computed from it /
    its own``.
    """

    name = "weak_gradient"
    unit = Unit.FACTOR

    def find(self) -> Mapping[int, float]:
        """Compute gradient -> factor on the condition of single rows."""
        graph = self.inputs.graph
        sizes = [one.extras.baseline_norm for one in self.inputs.pairs] if graph.gradients else []
        values = {(node.path, node.port): size for node, size in zip(graph.nodes, sizes, strict=False)}
        effects = {
            n: sizes[n] * values.get((graph.nodes[n].path, graph.nodes[n].port.removesuffix(".grad")), 0.0)
            for n in graph.gradients
        }
        factors = {}
        for node in graph.gradients:
            if graph.nodes[node].is_summed:
                continue
            before = [effects.get(i, 0.0) for i in graph.inputs(node).nodes if not graph.nodes[i].is_summed]
            factor = weakness(effects[node], before)
            if factor > 1.0:
                factors[node] = factor
        return factors

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        return f"the loss depends on it {number(self.values[node])} times less than on the values computed from it"


def weakness(effect: float, inputs: Sequence[float]) -> float:
    """Return how many times smaller a value's effect on the loss is than that of the values computed from it."""
    return max(1.0, max(inputs, default=0.0) / effect) if effect > 0.0 else 1.0


class SumCancellation(Effect[float]):
    """Cancellation in a sum over tokens: the condition number of summation is ``norm of the terms / norm of the sum``
    (Higham, section 4.1) if the sum is smaller than one of independent terms. The gradient of a key bias, which a
    softmax cancels, is pure rounding. This applies to biases and norm weights only, because the terms of a matrix have
    another size.
    """

    name = "sum_cancellation"
    unit = Unit.FACTOR

    def find(self) -> Mapping[int, float]:
        """Compute gradient of a parameter -> factor on the condition."""
        graph, pairs = self.inputs.graph, self.inputs.pairs
        factors = {}
        for node in graph.gradients:
            if not graph.nodes[node].is_summed or len(self.inputs.parameter_shape(node)) != 1:
                continue
            terms = [pairs[i].extras.baseline_norm for i in graph.inputs(node).nodes if graph.is_backward[i]]
            factor = cancellation(pairs[node].extras.baseline_norm, terms)
            if factor > 1.0:
                factors[node] = factor
        return factors

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        return f"terms of the sum over tokens cancel: they are {number(self.values[node])} times as large as the sum"


def cancellation(size: float, inputs: Sequence[float]) -> float:
    """Return how many times smaller a sum over tokens is than a sum of independent terms, from norms."""
    return max(1.0, max(inputs, default=0.0) / size) if size > 0.0 else 1.0


class RaggedSum(Effect[float]):
    """Sum over different rows in the two runs, because the integers that select the rows (tokens, experts) differ.
    Single rows may differ by any amount."""

    name = "ragged_sum"
    unit = Unit.FACTOR

    def find(self) -> Mapping[int, float]:
        """Compute gradient of a parameter -> infinity."""
        graph, pairs = self.inputs.graph, self.inputs.pairs
        unlimited = {}
        for node in graph.gradients:
            if graph.nodes[node].is_summed and graph.nodes[node].numeric:
                origins = graph.inputs(node).nodes
                if any(pairs[i].is_exact and pairs[i].num_unequal for i in origins):
                    unlimited[node] = math.inf
        return unlimited

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        return "integer inputs differ, so the sum covers different rows"


class MultiplicativeModule(Effect[float]):
    """Product of several factors of one row in a function that was not captured, in a module with parameters of its
    own, such as a state space model. The condition number of its rows is twice as large."""

    name = "multiplicative_module"
    unit = Unit.FACTOR

    def find(self) -> Mapping[int, float]:
        """Compute node -> factor on the condition."""
        graph = self.inputs.graph
        return {node: MULTIPLICATIVE_CONDITION for node in self.inputs.nodes if graph.is_of_many(node)}

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        module = self.inputs.graph.enclosing(node)
        return f"computed by {module}, which has parameters of its own, in a function that was not captured"


class SingleTermRows(Effect[float]):
    """Rows of the gradient of expert weights, which may have a single term, for an expert that one token chose. Such a
    row may differ as much as a single element."""

    name = "single_term_rows"
    unit = Unit.FACTOR

    def find(self) -> Mapping[int, float]:
        """Compute gradient of an expert weight -> 1."""
        graph = self.inputs.graph
        summed = (node for node in graph.gradients if graph.nodes[node].is_summed)
        return {node: 1.0 for node in summed if len(self.inputs.parameter_shape(node)) > MATRIX_NDIM}

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        return "a row may be the sum of one term, since few tokens choose an expert"


class FewTerms(Effect[float]):
    """Sum over token rows of which only n < 5 carry nearly the whole gradient of a weight, for example if the loss
    depends on one token of a sequence. The rows of the gradient then vary like n elements of a gradient: one may differ
    ``5 / n`` times as much (:data:`~.constants.NARROW_ROW_WIDTH`).
    """

    name = "few_terms"
    unit = Unit.FACTOR

    def find(self) -> Mapping[int, float]:
        """Compute gradient of a weight -> factor on the condition of single rows."""
        graph, errors, factors = self.inputs.graph, self.effects[ReroutedRows].errors, {}
        for node in graph.gradients:
            if not graph.nodes[node].is_summed or len(self.inputs.parameter_shape(node)) < MATRIX_NDIM:
                continue
            origins = (errors[i] for i in graph.inputs(node).nodes if graph.is_backward[i])
            terms = min(
                (s.row_sizes.num_terms for s in origins if s is not None and s.row_sizes is not None), default=math.inf
            )
            if terms < NARROW_ROW_WIDTH:
                factors[node] = NARROW_ROW_WIDTH / terms
        return factors

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        return f"it sums over about {number(NARROW_ROW_WIDTH / self.values[node])} token rows: the others are near zero"


class SharedGain(Effect[float]):
    """Common gain of gradient rows that attention has mixed: the rows carry the errors of later tokens, so only about
    sqrt(n) of n rows are independent, and the gain is up to ``3 gain_sd / n^(1/4)``."""

    name = "shared_gain"

    def find(self) -> Mapping[int, float]:
        """Compute gradient with mixed rows -> common gain."""
        graph, mixes, case_of = self.inputs.graph, self.inputs.attention.mixes, self.inputs.case_of
        nodes = [node for node in graph.gradients if case_of[node] >= 0 and mixes(node)]
        gains = shared_gain(self.inputs.spreads.at([case_of[node] for node in nodes])).tolist()
        return {node: gain for node, gain in zip(nodes, gains, strict=True) if gain}

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        return "rows share the errors of later tokens, and with these a common gain"


def shared_gain(spreads: ErrorColumns) -> Array:
    """Return the common gain of rows that share errors, [sites]."""
    limit: Array = 3.0 * spreads.gain_sd / np.sqrt(np.sqrt(np.maximum(spreads.num_rows, 1)))
    return limit


def spilled(spread: ErrorDistribution) -> ErrorDistribution:
    """Return the errors of rows as they appear in other rows, to which the backward adds them.

    Every row may carry the worst row's error. A small row may carry that of the typical row relative to its own size,
    which counts as at least :data:`SMALL_ROW` of the typical one.
    """
    worst = spread.worst_everywhere()
    return structs.replace(
        worst, errors=(worst.errors[0], *(max(e, spread.errors[0] / SMALL_ROW) for e in worst.errors[1:]))
    )


class RowConcentration(Effect[float]):
    """Errors that are all in a few rows: every row may have the error of the worst row of its inputs. A row that was
    computed from a different value may differ by twice its size."""

    name = "row_concentration"
    unit = Unit.FACTOR

    def find(self) -> Mapping[int, float]:
        """Compute node -> error of the worst input row relative to the typical one.

        Whether the effect counts for a node depends on the verdicts upstream, see :meth:`.ErrorModel.floor`.
        """
        errors, nodes = self.effects[InheritedError].given.errors, self.inputs.nodes
        ratio = np.divide(errors[-1], errors[0], out=np.ones_like(errors[0]), where=errors[0] > 0.0)
        return {node: factor for node, factor in zip(nodes, ratio.tolist(), strict=True) if factor > 1.0}

    def floors(
        self, terms: SiteTerms, cases: Array, condition: Array, mixes: Array, rerouted: Array
    ) -> tuple[FloorTable, Array]:
        """Return (local bounds of the given cases, whether the path also bounds them).

        ``condition`` and ``mixes`` belong to these cases; ``rerouted`` marks cases downstream of rerouted rows.
        """
        graph = self.inputs.graph
        nodes = [self.inputs.nodes[case] for case in cases.tolist()]
        is_back = np.array([graph.is_backward[node] for node in nodes], bool)
        is_sum = np.array([graph.nodes[node].is_summed for node in nodes], bool)
        cancels = self._column(SumCancellation, nodes)
        condition = condition * self._column(MultiplicativeModule, nodes)
        spreads, given = terms.spreads.at(cases), LargestErrors.of([self._spreads(node) for node in nodes])
        redirected = np.where(rerouted, smaller(REDIRECTED_ROW_ERROR, condition * given.errors[-1]), 0.0)
        widened = CONDITION_WIDENING[-1] * condition * given.errors[-1]
        small = np.where(rerouted, smaller(REDIRECTED_SMALL_ROW_ERROR, widened), 0.0)
        limit = larger(np.asarray(terms.limit)[cases], REDIRECTED_ROW_ERROR * cancels * given.errors[-1], redirected)
        # The error of a large row may be a multiple of a small row to which it is added; small rows are differences.
        is_made = np.array([graph.inputs(node).source != "aliased" for node in nodes], bool)
        is_open = (is_back & is_made) | (self.effects[NormOfNearZeroRows].factors(nodes) > 1.0).any(0)
        own = terms._replace(
            spreads=spreads,
            local=terms.local[cases],
            eps=terms.eps[cases],
            limit=limit,
            tail_limit=np.where(is_open, np.inf, small),
            weight_rounding=np.asarray(terms.weight_rounding)[cases],
            is_gradient=is_back,
        )
        stretched = self._column(WeakGradient, nodes) * self._column(RaggedSum, nodes) * self._column(FewTerms, nodes)
        floors = local_bound(given, own, cancels * condition, mixes=mixes, sums_rows=is_sum, stretch=stretched)
        has_single_terms = self._column(SingleTermRows, nodes, 0.0) > 0.0
        floors = floors.for_single_terms().where(has_single_terms, floors)
        return floors.with_gain(self._column(SharedGain, nodes, 0.0)), cancels == 1.0

    def _column(self, kind: type[Effect[float]], nodes: Sequence[int], neutral: float = 1.0) -> Array:
        values = self.effects[kind].values
        return np.array([values.get(node, neutral) for node in nodes])

    def _spreads(self, node: int) -> tuple[ErrorDistribution, ...]:
        """Return the errors of a node's inputs, as they may appear in any row of the node."""
        this, graph = self.inputs.graph.nodes[node], self.inputs.graph
        given = self.effects[InheritedError].spreads(node)
        if graph.inputs(node).source == "aliased" or self._keeps_rows(node):
            return given
        return tuple(spilled(s) if this.is_backward else s.worst_everywhere() for s in given)

    def _keeps_rows(self, node: int) -> bool:
        """Return whether each row was computed from the same row of the inputs."""
        this = self.inputs.graph.nodes[node]
        if this.convolves:
            return False
        return not this.is_input and not this.is_summed and (bool(self.inputs.params[node]) or this.is_pointwise)

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        return "errors may all be in a few rows: the worst row of the inputs counts for every row"
