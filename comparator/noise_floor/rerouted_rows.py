"""Rerouted rows: token rows routed to other experts at a near tie are excluded in their block, but propagate their
errors to all sites downstream of the block."""

from collections.abc import Mapping
from functools import cached_property

from tapscope.comparator.metrics.error_distribution import ErrorDistribution
from tapscope.comparator.noise_floor.effect import Effect
from tapscope.comparator.noise_floor.propagated_errors import PropagatedErrors
from tapscope.core.formatting import number


class ReroutedRows(Effect[ErrorDistribution]):
    """Errors of rerouted rows: sites after a mixture of experts receive the errors of all rows, including rows that
    were routed to other experts (:mod:`..detectors.exclude_rerouted_rows`)."""

    name = "rerouted_rows"

    def find(self) -> Mapping[int, ErrorDistribution]:
        """Compute node with excluded rows -> errors of all of its rows."""
        pairs = self.inputs.pairs
        return {n: spread for n in self.inputs.nodes if (spread := pairs[n].extras.propagated) is not None}

    @cached_property
    def errors(self) -> PropagatedErrors:
        """Node -> the errors that it propagates."""
        return PropagatedErrors(self.inputs.pairs, self.inputs.graph, self.values)

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        error = number(self.contribution(node))
        return f"rows that went to other experts were left out here; with them rows differ by up to {error}"
