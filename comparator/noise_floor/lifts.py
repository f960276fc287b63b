"""Lifts: what modules make of rows next to nothing; see :mod:`.small_rows`."""

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from tapscope.comparator.metrics.columns import largest_in
from tapscope.comparator.metrics.error_distribution import QUANTILES, Quantiles, Spread
from tapscope.comparator.metrics.near_zero_rows import NO_LIFT
from tapscope.comparator.noise_floor.floor import ROW_LIMIT
from tapscope.comparator.noise_floor.graph import Graph
from tapscope.comparator.noise_floor.propagated_errors import HandedOn
from tapscope.comparator.pair_analysis.pair_result import Examined
from tapscope.kernels.native.aggregate import SMALL_ROW

Array = np.ndarray[Any, Any]

UNMET = (1.0, *(1.0 / SMALL_ROW,) * (len(QUANTILES) - 1))
"""By how much a norm that was not compared enlarges errors, at :data:`~.spread.QUANTILES`: whatever is less than what
errors are measured beside at least it may lift up to that."""


def unmet(everything: Sequence[Examined], norms: Collection[str]) -> frozenset[str]:
    """Modules with a norm inside that both runs recorded, and whose rows do not meet: heads of all tokens in a batch
    that is not the other's."""
    found = set()
    for one in everything:
        path, _, port = one.site.rpartition(":")
        if one.apart and one.baseline and one.target and path in norms and port.startswith("out"):
            found.add(path.rpartition(".")[0])
    return frozenset(found)


class Lifts:
    """By how much more than they seem rows are off to the norms of a comparison."""

    def __init__(self, examined: Sequence[Examined], graph: Graph, spreads: HandedOn) -> None:
        """``examined`` and ``spreads`` are those of the graph's nodes."""
        self._graph, self._spreads = graph, spreads
        given = [(i, spread, one) for i, one in enumerate(examined) if one.more.own_errors and (spread := spreads[i])]
        lifts = {i: _lift(spread.errors, one.more.own_errors) for i, spread, one in given}
        self.by = {i: by for i, by in lifts.items() if by is not NO_LIFT}
        """Node -> by how much more than they seem its rows are off to what follows, where that is so."""
        self.noise = frozenset(i for i in self.by if (spread := self.handed(i)) and spread.errors[-1] > ROW_LIMIT)
        """Nodes with a row of which rounding has left nothing: a norm makes it as large as any other."""

    def handed(self, node: int) -> Spread | None:
        """A node's spread as what follows is given it."""
        spread = self._spreads[node]
        return spread.lifted(self.by[node]) if spread is not None and node in self.by else spread

    def of(self, nodes: Sequence[int]) -> Array:
        """[quantiles, nodes]: what is made of the inputs of some nodes."""
        if not self.by:
            return np.broadcast_to(1.0, (len(QUANTILES), len(nodes)))
        lifts = np.ones((len(QUANTILES), len(self._graph.nodes)))
        lifts[:, list(self.by)] = np.array(list(self.by.values())).T
        found = largest_in(lifts, [self._graph.inputs(node).nodes for node in nodes])
        return np.maximum(found, 1.0)


def _lift(errors: Sequence[float], own: Sequence[float]) -> Quantiles:
    """How much larger the errors of rows are beside themselves; 1 of what is given to no norm."""
    if not own:
        return NO_LIFT
    found = tuple(max(1.0, alone / error) if error > 0.0 else 1.0 for error, alone in zip(errors, own, strict=True))
    return found if max(found) > 1.0 else NO_LIFT
