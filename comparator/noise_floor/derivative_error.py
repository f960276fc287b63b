"""Derivatives: a gradient is computed with the derivative of a function at a value, and inherits the error of that
value."""

import math
from collections.abc import Mapping, Sequence

from msgspec import Struct, structs

from tapscope.comparator.metrics.error_distribution import NO_ERROR, ErrorDistribution, Quantiles
from tapscope.comparator.noise_floor.constants import (
    KINK_CROSSING_MARGIN,
    MIN_KINK_CROSSINGS,
    NORMAL_DENSITY_AT_ZERO,
    RELU_ZERO_SHARE,
)
from tapscope.comparator.noise_floor.effect import Effect
from tapscope.comparator.noise_floor.graph import Graph
from tapscope.comparator.noise_floor.rerouted_rows import ReroutedRows
from tapscope.comparator.runs.series import zero_fraction
from tapscope.core.formatting import number


def _is_derivative(graph: Graph, node: int) -> bool:
    return graph.nodes[node].is_backward and not graph.nodes[node].is_summed


class DerivativeValues(Effect[list[ErrorDistribution]]):
    """Errors of the values at which a derivative is evaluated. If the function was not captured, the errors of the
    values around it enter the gradient in addition to the errors of other gradients."""

    name = "derivative_values"

    def find(self) -> Mapping[int, list[ErrorDistribution]]:
        """Compute gradient -> errors of its values."""
        errors_of = {node: self.around(node) for node in self.inputs.graph.gradients}
        return {node: errors for node, errors in errors_of.items() if errors}

    def around(self, node: int) -> list[ErrorDistribution]:
        """Return the errors of the values around a function that was not captured."""
        graph, errors = self.inputs.graph, self.effects[ReroutedRows].errors
        inputs = graph.inputs(node)
        if not _is_derivative(graph, node) or inputs.source != "enclosing_module":
            return []
        values = [graph.value_of(i) for i in (*inputs.nodes, node)]
        return [error for i in values if i is not None and (error := errors[i]) is not None]

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        return f"the derivative is taken at values that differ by up to {number(self.contribution(node))}"


class KinkCrossings(Struct, frozen=True):
    """Elements of a gradient that are zero in exactly one run: their values are on different sides of a ReLU's kink.

    Measured by :mod:`..detectors.kink_crossings`.
    """

    count: int
    """Number of elements that are zero in exactly one run."""
    num_elements: int
    """Number of elements of the rows that differ."""
    errors: Quantiles
    """Error of the gradient's rows due to the crossings alone, at each quantile over rows."""
    mean_error: float
    """Root mean square error over all rows due to the crossings alone."""


class DerivativeJump(Effect[list[ErrorDistribution]]):
    """Jump of ReLU's derivative at 0: an element whose value is within its error e of 0 may propagate its whole
    gradient in one run and zero in the other. Of normally distributed values, a share of ``0.8 e`` is that close. If no
    more elements than that are zero in exactly one run, the error that they cause is known; otherwise it is ``sqrt(0.8
    e)``.
    """

    name = "derivative_jump"
    _measured: Mapping[int, KinkCrossings] = {}
    """Gradients whose crossings were counted, and are no more than expected."""

    def find(self) -> Mapping[int, list[ErrorDistribution]]:
        """Compute gradient -> errors that the jumps of its derivative add."""
        values = {node: at_kink for node in self.inputs.graph.gradients if (at_kink := self._values_at_kink(node))}
        self._measured = {node: crossings for node in values if (crossings := self._crossings(node, values[node]))}
        return {
            node: [_distribution(self._measured[node].errors)]
            if node in self._measured
            else [_distribution(_modelled_errors(spread)) for spread in values[node]]
            for node in values
        }

    def _crossings(self, node: int, values: Sequence[ErrorDistribution]) -> KinkCrossings | None:
        """Return the crossings of a gradient, if the errors of the values explain their number."""
        crossings = self.inputs.facts.kink_crossings.get(self.inputs.site(node))
        return (
            crossings if crossings is not None and crossings.count <= _expected_crossings(values, crossings) else None
        )

    def _values_at_kink(self, node: int) -> list[ErrorDistribution]:
        """Return the errors of the values at which a jumping derivative was evaluated; empty for any other gradient."""
        graph, errors = self.inputs.graph, self.effects[ReroutedRows].errors
        if not _is_derivative(graph, node):
            return []
        spreads, inputs = self.effects[DerivativeValues].around(node), graph.inputs(node).nodes
        if not spreads or self._zeros(node) <= RELU_ZERO_SHARE + self._most_zeros(inputs):
            spreads = []
        if graph.has_kink(node):
            given = [errors[i] for i in inputs if graph.nodes[i].is_input and not graph.nodes[i].is_backward]
            spreads += [spread for spread in given if spread is not None]
        return spreads

    def _zeros(self, node: int) -> float:
        """Return the fraction of zeros in the run with fewer zeros; 0 if unknown."""
        pair = self.inputs.pairs[node].pair
        return min(zero_fraction(one) if one is not None else 0.0 for one in (pair.baseline, pair.target))

    def _most_zeros(self, nodes: Sequence[int]) -> float:
        gradients = (node for node in nodes if self.inputs.graph.is_backward[node])
        return max(map(self._zeros, gradients), default=1.0)

    def jump(self, node: int) -> float:
        """Return the error of the typical row of a gradient, and of everything downstream in the backward, due to the
        jumps.

        Later rows are sums over earlier ones, so the root mean square over rows counts.
        """
        if node in self._measured:
            return self._measured[node].mean_error
        return max((spread.errors[-1] for spread in self.values.get(node, ())), default=0.0)

    def worst_row(self, node: int) -> float:
        """Return the error of the worst row due to the jumps if it was measured; otherwise 0."""
        return self._measured[node].errors[-1] if node in self._measured else 0.0

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        if node in self._measured:
            crossings = self._measured[node]
            return (
                f"the derivative jumps at 0: {crossings.count:,} of {crossings.num_elements:,} elements are zero in "
                "exactly one run, no more than the errors of the values explain"
            )
        share = number(self.jump(node) ** 2)
        return f"the derivative jumps at 0: a share of {share} of the elements may be all or nothing"


def _expected_crossings(values: Sequence[ErrorDistribution], crossings: KinkCrossings) -> float:
    """Return the maximum number of elements that may change sides: the share ``0.8 e`` of normal values, with a
    margin."""
    error = max(spread.errors[0] for spread in values)
    return MIN_KINK_CROSSINGS + KINK_CROSSING_MARGIN * NORMAL_DENSITY_AT_ZERO * error * crossings.num_elements


def _modelled_errors(spread: ErrorDistribution) -> Quantiles:
    return tuple(math.sqrt(NORMAL_DENSITY_AT_ZERO * min(error, 1.0)) for error in spread.errors)


def _distribution(errors: Quantiles) -> ErrorDistribution:
    """Return the error distribution of rows in which single elements may be complete in one run and zero in the
    other."""
    return structs.replace(NO_ERROR, errors=errors, element=1.0, peak=1.0)
