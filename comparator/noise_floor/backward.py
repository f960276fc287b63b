"""Backward: what the floors of a comparison's gradients depend on beside those of values; see :mod:`.gradients`."""

import math
from collections.abc import Mapping, Sequence

from tapscope.comparator.metrics.error_distribution import Quantiles, Spread
from tapscope.comparator.noise_floor.gradients import (
    cancellation,
    difference,
    effects,
    flushes,
    losses,
    of_head,
    of_kinks,
    of_loss,
    of_values,
    stretch,
)
from tapscope.comparator.noise_floor.graph import Graph
from tapscope.comparator.noise_floor.propagated_errors import HandedOn
from tapscope.comparator.pair_analysis.pair_result import Examined
from tapscope.comparator.runs.series import zeros_of


class Backward:
    """The gradients among the nodes of a graph."""

    def __init__(
        self, examined: Sequence[Examined], graph: Graph, spreads: HandedOn, sharp: Mapping[str, Quantiles]
    ) -> None:
        """``examined`` and ``spreads`` are those of the graph's nodes; ``sharp``: modules that make attention weights
        -> by how much more than usual an error of what they are given is one of the weights: so are the gradients off
        that come back through these."""
        self._examined, self._graph, self._spreads = examined, graph, spreads
        self._losses = losses(graph)
        self._effects = effects(graph, [one.more.size for one in examined])
        self._sharp = sharp
        self._jumps: dict[int, list[Spread]] = {}

    def loss(self, node: int) -> Spread | None:
        """What a loss hands on to the first of the gradients; None to any other node."""
        own = self._losses.get(node)
        return None if own is None else of_loss(self._examined[own].numbers)

    def _loss_at(self, node: int) -> Spread | None:
        """The same of the gradient that a node holds, whichever site showed it first."""
        inputs = self._graph.inputs(node)
        return self.loss(inputs.nodes[0] if inputs.how == "same" else node)

    def beside(self, node: int, names: Sequence[str]) -> Sequence[Spread]:
        """What goes into a gradient of these dtypes beside what the graph says; nothing into a value."""
        if not self._graph.nodes[node].is_backward:
            return ()
        loss, own = self.loss(node), self._spreads[node]
        found = [] if loss is None else [loss]
        if self._graph.nodes[node].is_summed:
            found += map(of_head, filter(None, map(self._loss_at, self._graph.inputs(node).nodes)))
        return [*found, *of_values(self._graph, self._spreads, node), *self._kinks(node), *flushes(names, own)]

    def _kinks(self, node: int) -> list[Spread]:
        found = self._jumps.get(node)
        if found is None:
            found = self._jumps[node] = of_kinks(self._graph, self._spreads, node, self._zeros)
        return found

    def jump(self, node: int) -> float:
        """What the jumps of a derivative add to a gradient, relative to it."""
        return max((spread.errors[-1] for spread in self._kinks(node)), default=0.0)

    def _zeros(self, node: int) -> float:
        """Share of a gradient's elements that are zero, in the run that has fewer; 0 where nobody counted."""
        pair = self._examined[node].pair
        return min(zeros_of(one) if one is not None else 0.0 for one in (pair.baseline, pair.target))

    def sharpened(self, node: int, beside: Sequence[Spread]) -> Sequence[Spread]:
        """What goes in :meth:`beside`, of a gradient that comes back through sharp attention weights."""
        sharp = self._sharp.get(self._graph.enclosing(node)) if beside else None
        return beside if sharp is None else [spread.lifted(sharp) for spread in beside]

    def stretch(self, node: int, inputs: Sequence[Spread]) -> float:
        """How much worse the condition of single rows may be: of any size where a sum goes over other tokens."""
        this, origins, own = self._graph.nodes[node], self._graph.inputs(node).nodes, self._spreads[node]
        if not this.is_backward or own is None:
            return 1.0
        if this.is_summed:
            moved = any(self._examined[i].is_exact and self._examined[i].num_unequal for i in origins)
            return math.inf if moved else 1.0
        before = [self._effects[i] for i in origins if not self._graph.nodes[i].is_summed]
        return stretch(own, inputs) * difference(self._effects[node], before)

    def cancellation(self, node: int) -> float:
        """See :func:`.gradients.cancellation`."""
        origins = (i for i in self._graph.inputs(node).nodes if self._graph.nodes[i].is_backward)
        return cancellation(self._examined[node].more.size, [self._examined[i].more.size for i in origins])
