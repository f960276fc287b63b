"""Derivatives: a gradient is computed with the derivative of a function at a value, and carries that value's error."""

import math
from collections.abc import Mapping, Sequence

from msgspec import structs

from tapscope.comparator.metrics.error_distribution import NO_ERROR, ErrorDistribution
from tapscope.comparator.noise_floor.constants import RELU_ZERO_SHARE
from tapscope.comparator.noise_floor.effect import Effect
from tapscope.comparator.noise_floor.graph import Graph
from tapscope.comparator.noise_floor.rerouted_rows import ReroutedRows
from tapscope.comparator.runs.series import zero_fraction
from tapscope.core.formatting import number


def _is_derivative(graph: Graph, node: int) -> bool:
    return graph.nodes[node].is_backward and not graph.nodes[node].is_summed


class DerivativeValues(Effect[list[ErrorDistribution]]):
    """A derivative is taken at values. Where the function was not captured, the errors of the values around it go into
    the gradient in addition to those of other gradients."""

    name = "derivative_values"

    def find(self) -> Mapping[int, list[ErrorDistribution]]:
        """Gradient -> errors that go into it."""
        found = {node: self.around(node) for node in self.inputs.graph.gradients}
        return {node: spreads for node, spreads in found.items() if spreads}

    def around(self, node: int) -> list[ErrorDistribution]:
        """Errors of the values around a function that was not captured."""
        graph, errors = self.inputs.graph, self.effects[ReroutedRows].errors
        inputs = graph.inputs(node)
        if not _is_derivative(graph, node) or inputs.how != "around":
            return []
        values = [graph.value_of(i) for i in (*inputs.nodes, node)]
        return [spread for i in values if i is not None and (spread := errors[i]) is not None]

    def explain(self, node: int) -> str:
        """See :class:`.Effect`."""
        return f"the derivative is taken at values that differ by up to {number(self.contribution(node))}"


class DerivativeJump(Effect[list[ErrorDistribution]]):
    """Where a derivative has a jump, as ReLU's at 0, elements within the error e of it switch between all and nothing.
    Of normal values 0.8 e are within e of their size around 0: the gradient differs by ``sqrt(0.8 e)``."""

    name = "derivative_jump"

    def find(self) -> Mapping[int, list[ErrorDistribution]]:
        """Gradient -> errors that go into it."""
        found = {node: self._errors(node) for node in self.inputs.graph.gradients}
        return {node: spreads for node, spreads in found.items() if spreads}

    def _errors(self, node: int) -> list[ErrorDistribution]:
        graph, errors = self.inputs.graph, self.effects[ReroutedRows].errors
        if not _is_derivative(graph, node):
            return []
        found, inputs = self.effects[DerivativeValues].around(node), graph.inputs(node).nodes
        if not found or self._zeros(node) <= RELU_ZERO_SHARE + self._most_zeros(inputs):
            found = []
        if graph.has_kink(node):
            given = [errors[i] for i in inputs if graph.nodes[i].is_input and not graph.nodes[i].is_backward]
            found += [spread for spread in given if spread is not None]
        return list(map(_switched, found))

    def _zeros(self, node: int) -> float:
        """Share of a gradient's elements that are zero in the run with fewer of them; 0 where it is not known."""
        pair = self.inputs.pairs[node].pair
        return min(zero_fraction(one) if one is not None else 0.0 for one in (pair.baseline, pair.target))

    def _most_zeros(self, nodes: Sequence[int]) -> float:
        gradients = (node for node in nodes if self.inputs.graph.is_backward[node])
        return max(map(self._zeros, gradients), default=1.0)

    def jump(self, node: int) -> float:
        """What the jumps add to a gradient, relative to it."""
        return max((spread.errors[-1] for spread in self.values.get(node, ())), default=0.0)

    def explain(self, node: int) -> str:
        """See :class:`.Effect`."""
        share = number(self.jump(node) ** 2)
        return f"the derivative jumps at 0: a share of {share} of the elements may be all or nothing"


def _switched(spread: ErrorDistribution) -> ErrorDistribution:
    errors = tuple(math.sqrt(0.8 * min(error, 1.0)) for error in spread.errors)
    return structs.replace(NO_ERROR, errors=errors, element=1.0, peak=1.0)
