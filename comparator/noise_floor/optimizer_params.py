"""Trained: the parameters of a comparison that an optimizer moves, and what errors they carry from step to step."""

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

import numpy as np
from msgspec import structs

from tapscope.comparator.metrics.columns import hypot
from tapscope.comparator.metrics.error_distribution import NOTHING, QUANTILES, Quantiles, Spread
from tapscope.comparator.metrics.spreads import Largest, Spreads
from tapscope.comparator.metrics.updates import UNKNOWN, of_updates
from tapscope.comparator.noise_floor.floor import ROW_LIMIT, Terms, local_floors, path_floors
from tapscope.comparator.noise_floor.floors import Floors
from tapscope.comparator.noise_floor.graph import Graph
from tapscope.comparator.pair_analysis.pair_result import Examined

STATE = 1.5
"""Condition of a parameter: it is copied, perhaps into another dtype, and nothing else."""
_STILL: Quantiles = (0.0,) * len(QUANTILES)
Array = np.ndarray[Any, Any]


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
        seen = [self._examined[i].more.sways for i in self._graph.inputs(node).nodes]
        drifts, moves = self._examined[node].more.drifts[:num_steps], []
        turned = _STILL if seen else UNKNOWN
        for drift in drifts:  # where no gradient differs, those before it still move the parameter
            turned = seen[0].get(drift.step, turned) if seen else turned
            moves.append((turned, drift))
        return of_updates(moves)

    def modelled(self, node: int, base: float) -> float:
        """What everything adds up to the last value of a parameter of which another step is made; ``base`` is the
        rounding of one value."""
        return math.hypot(self.updated(node, -1).errors[-1], base)

    def handed_on(self, node: int) -> Spread:
        """The errors of a parameter as they go into others: each row of an output is made of all rows of a weight, and
        each channel of one row or element."""
        before = [drift.spread for drift in self._examined[node].more.drifts[:-1]]
        spread = max(before, key=lambda each: each.errors[-1], default=NOTHING)
        return structs.replace(spread.worst_everywhere(), channel=spread.peak, channel_noise=0.0)

    def judged(self, terms: Terms, row: Sequence[int]) -> tuple[list[int], Array, Floors, Floors]:
        """(rows, tests, floors given their inputs, floors given the path too) of parameters that differ; ``terms`` are
        those of all cases, and ``row`` the node's among them, or -1. Of each the step counts that is furthest off
        beside what gradients up to it explain, for a wrong parameter makes the gradients of the next step wrong."""
        steps = [
            (node, num, drift.spread)
            for node in (n for n in self.nodes if row[n] >= 0)
            for num, drift in enumerate(self._examined[node].more.drifts, 1)
            if not drift.spread.is_zero
        ]
        rows = [row[node] for node, _, _ in steps]
        given = Largest.of([(self.updated(node, num),) for node, num, _ in steps])
        base = np.array([self._rounded(node, num, terms.base.item(row[node])) for node, num, _ in steps])
        spreads = Spreads.of([spread for _, _, spread in steps])
        # One that began at zero is made of its updates alone, and may be off by all of them.
        own = Terms(spreads, base, terms.eps[rows], np.maximum(ROW_LIMIT, given.errors[0]), given.errors[-1])
        local = local_floors(given, own, STATE).of_one_row(spreads.num_rows)
        path = path_floors(hypot(given.errors[-1], base), own).of_one_row(spreads.num_rows)
        whole = local.smaller(path)
        scores = whole.worst(spreads.tests).scores.tolist()
        worst = [max(group, key=scores.__getitem__) for _, group in groupby(range(len(rows)), rows.__getitem__)]
        return [rows[i] for i in worst], spreads.tests[:, worst], local.at(worst), whole.at(worst)

    def _rounded(self, node: int, num_steps: int, base: float) -> float:
        """Once, and again in each step; a move below half a step between numbers is lost each time."""
        moved = self._examined[node].more.drifts[:num_steps]
        return base + sum(min(base, each.moved.errors[0]) for each in moved)

    def _clipping(self) -> float:
        """What a clip by the norm of all gradients makes of their errors: the norm is off by no more than they are."""
        backward = (n for n, node in enumerate(self._graph.nodes) if node.is_backward and not node.is_summed)
        numbers = (self._examined[n].numbers for n in backward)
        errors = sorted(each.rel_l2 for each in numbers if each is not None and math.isfinite(each.rel_l2))
        return errors[len(errors) // 2] if errors else 0.0
