"""Trained: the parameters of a comparison that an optimizer moves, and what errors they carry from step to step."""

import math
from collections.abc import Sequence

from msgspec import structs

from tapscope.comparator.examined import Examined
from tapscope.comparator.floor import Floor, local_floor, path_floor, score
from tapscope.comparator.graph import Graph
from tapscope.comparator.spread import NOTHING, QUANTILES, Quantiles, Spread, largest
from tapscope.comparator.updates import UNKNOWN, of_updates

STATE = 1.5
"""Condition of a parameter: it is copied, perhaps into another dtype, and nothing else."""
_STILL: Quantiles = (0.0,) * len(QUANTILES)
Judged = tuple[Spread, Floor, Floor]
"""What is judged, the floor given its inputs, and the floor given the path too."""


class Trained:
    """See the module; all that is asked about is a node of the graph."""

    def __init__(self, examined: Sequence[Examined], graph: Graph) -> None:
        """``examined`` are those of the graph's nodes."""
        self._examined, self._graph = examined, graph
        self.nodes = [n for n, node in enumerate(graph.nodes) if node.is_trained]
        self.clipped = self._clipping() if self.nodes else 0.0
        """Common gain of all gradients of parameters, which were recorded when they had been clipped."""

    def updated(self, node: int, num_steps: int | None = None) -> Spread:
        """What the errors of its gradients make of a parameter in so many steps, or in all."""
        seen = [self._examined[i].sways for i in self._graph.inputs(node).nodes]
        drifts = self._examined[node].drifts[:num_steps]
        return of_updates([(seen[0].get(d.step, _STILL) if seen else UNKNOWN, d.moved) for d in drifts])

    def modelled(self, node: int, base: float) -> float:
        """What everything adds up to the last value of a parameter of which another step is made; ``base`` is the
        rounding of one value."""
        return math.hypot(self.updated(node, -1).errors[-1], base)

    def handed_on(self, node: int) -> Spread:
        """The errors of a parameter as they go into others: each row of an output is made of all rows of a weight, and
        each channel of one row or element."""
        before = [drift.spread for drift in self._examined[node].drifts[:-1]]
        spread = max(before, key=lambda each: each.errors[-1], default=NOTHING)
        return structs.replace(spread.worst_everywhere(), channel=spread.peak, channel_noise=0.0)

    def judged(self, node: int, whole: Judged, base: float, eps: float) -> Judged:
        """``whole``; of a parameter that is trained the step that is furthest off beside what gradients up to it
        explain: a wrong parameter makes the gradients of the next step wrong."""
        if not self._examined[node].drifts:
            return whole
        found: list[Judged] = []
        for num, drift in enumerate(self._examined[node].drifts, 1):
            if not drift.spread.is_zero:
                given, moved = self.updated(node, num), self._examined[node].drifts[:num]
                # Rounded once, and again in each step; a move below half a step between numbers is lost each time.
                rounded = base + sum(min(base, each.moved.errors[0]) for each in moved)
                local = local_floor(largest((given,)), rounded, drift.spread, STATE, eps)
                path = path_floor(math.hypot(given.errors[-1], rounded), drift.spread, rounded, eps)
                found.append((drift.spread, local, local.smaller(path)))
        return max(found or [whole], key=lambda each: score(*each[2].worst(each[0])[:2]))

    def _clipping(self) -> float:
        """What a clip by the norm of all gradients makes of their errors: the norm is off by no more than they are."""
        backward = (n for n, node in enumerate(self._graph.nodes) if node.is_backward and not node.is_summed)
        numbers = (self._examined[n].numbers for n in backward)
        errors = sorted(each.rel_l2 for each in numbers if each is not None and math.isfinite(each.rel_l2))
        return errors[len(errors) // 2] if errors else 0.0
