"""Cases: the sites that were compared as rounded numbers, with what their floors depend on, in columns."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tapscope.comparator.metrics.columns import largest_in
from tapscope.comparator.metrics.error_distribution import NOTHING, Spread
from tapscope.comparator.metrics.spreads import CHANNELS, Largest, Spreads
from tapscope.comparator.noise_floor.attention import NONE, Attention, Beside
from tapscope.comparator.noise_floor.backward import Backward
from tapscope.comparator.noise_floor.compute_dtype import computed_in
from tapscope.comparator.noise_floor.conditions import CONDITION
from tapscope.comparator.noise_floor.floor import OFFSET, ROW_LIMIT, Terms, unit
from tapscope.comparator.noise_floor.gradients import drowned, underflow
from tapscope.comparator.noise_floor.graph import Graph
from tapscope.comparator.noise_floor.lifts import Lifts
from tapscope.comparator.noise_floor.optimizer_params import Trained
from tapscope.comparator.noise_floor.propagated_errors import HandedOn, spreads_of
from tapscope.comparator.noise_floor.reduction_length import Params, reduction_of, summands_of, summed_of
from tapscope.comparator.noise_floor.rope_error import angle_error
from tapscope.comparator.pair_analysis.pair_result import Examined
from tapscope.core import dtypes

Array = np.ndarray[Any, Any]
_GUESS = 4096
"""Reduction length where no parameter shape of either run is known."""


class Cases:
    """The numeric sites of one comparison. Columns have one element a case, in execution order."""

    def __init__(
        self, examined: Sequence[Examined], graph: Graph, params: Sequence[Params], beside: Beside = NONE
    ) -> None:
        """``examined`` are those of the graph's nodes, ``params`` the parameters of their modules."""
        self.examined, self.graph, self.params = examined, graph, params
        self._sinusoids = beside.sinusoids
        self.names = [computed_in(examined, graph, node) for node in range(len(examined))]
        """The dtypes that each node was computed in."""
        self._reductions = [reduction_of(n.cls, p) for n, p in zip(graph.nodes, params, strict=True)]
        self._widest = max(filter(None, self._reductions), default=_GUESS)
        self.attention = Attention(examined, graph, beside)
        self.backward = Backward(examined, graph, HandedOn(examined, graph), self.attention.lifts_around())
        self.besides = {i: found for i, names in enumerate(self.names) if (found := self.backward.beside(i, names))}
        """Node -> what goes into it beside what the graph says."""
        self.trained = Trained(examined, graph)
        moved = {node: self.trained.handed_on(node) for node in self.trained.nodes}
        self._handed_on = HandedOn(examined, graph, moved)
        self.lifts = Lifts(examined, graph, self._handed_on)
        self.nodes = [i for i, node in enumerate(graph.nodes) if node.numeric]
        """Of each case."""
        self.row = self._rows()
        """The case of each node; -1 where rounding has no say."""
        spreads = spreads_of([examined[node].read for node in self.nodes])
        plain, self.are_equal = self._given(spreads.handed)
        """Whether nothing of what went into each differs."""
        self.typical = plain.errors[0]
        """Of the typical row that went into each."""
        self.given = Largest(self.attention.with_means(plain.values, self.nodes))
        """What went into each, as it appears there."""
        base, self.modelled, self.limit = self._modelled()
        """What everything up to and including the module adds, each with condition 1; the most that the typical row may
        be off."""
        names = [self.names[node] for node in self.nodes]
        eps = np.array([max(map(dtypes.epsilon, each)) for each in names])
        self.offset = np.array([OFFSET if self.graph.nodes[node].is_offset else 1.0 for node in self.nodes])
        self.terms = Terms(self._even(spreads), base, eps, self.limit, offset=self.offset)
        self.is_twin = np.array([one == two for one, two in names], bool)
        """Whether both sides have one dtype: then the weights are the same numbers."""
        self.is_behind_flips = self._behind_flips()
        """Whether token rows that took another way went into it: what they add to the errors is no rounding, and no
        model of a path bounds it."""

    def _rows(self) -> list[int]:
        found = [-1] * len(self.examined)
        for row, node in enumerate(self.nodes):
            found[node] = row
        return found

    def inputs(self, node: int) -> tuple[Spread, ...]:
        """The spreads of what went into a node."""
        if self.graph.nodes[node].is_trained:
            return (self.trained.updated(node),)
        found = tuple(s for s in map(self.lifts.handed, self.graph.inputs(node).nodes) if s is not None)
        return *found, *self.backward.sharpened(node, self.besides.get(node, ()))

    def _even(self, spreads: Spreads) -> Spreads:
        """What is judged, where that is not as it is: of what came from around, rows relative to the typical one."""
        errors, peak = spreads.errors.copy(), spreads.peak.copy()
        for row, node in enumerate(self.nodes):
            even = self.examined[node].more.even_errors
            if even and self.graph.inputs(node).how == "around" and not self.graph.is_backward[node]:
                errors[:, row], peak[row] = even, min(peak[row], self.examined[node].more.even_peak)
        return spreads._replace(errors=errors, peak=peak)

    def _given(self, own: Array) -> tuple[Largest, Array]:
        """See :attr:`given`; ``own`` are the errors that each case hands on, as a rule."""
        handed = np.zeros((len(own), len(self.examined)))
        handed[:, self.nodes] = own
        odd = sorted({*self._handed_on.instead, *self.lifts.by})
        handed[:, odd] = Spreads.of([self.lifts.handed(node) or NOTHING for node in odd]).handed
        more, places = list[Spread](), list[Sequence[int]]()
        for node in self.nodes:
            origins: Sequence[int] = self.graph.inputs(node).nodes
            beside = self.besides.get(node, ())
            if self.graph.nodes[node].is_trained:
                origins, beside = (), (self.trained.updated(node), *beside)
            if beside:
                first = handed.shape[1] + len(more)
                origins = *origins, *range(first, first + len(beside))
                more += beside
            places.append(origins)
        handed = np.concatenate((handed, Spreads.of(more).handed), axis=1)
        given = Largest(self._with_channels(largest_in(handed, places)))
        (is_off,) = largest_in((Largest(handed).errors[-1:] != 0.0).astype(np.float64), places)
        return given, is_off == 0.0

    def _with_channels(self, given: Array) -> Array:
        """With the gains of single channels that go into a function of each element, whether they are beyond their
        noise or not: it may make several times that of a channel, where it is next to flat or to zero."""
        for row, node in enumerate(self.nodes):
            if self.graph.nodes[node].is_pointwise and not self.graph.is_backward[node]:
                spreads = (self.examined[i].spread for i in self.graph.inputs(node).nodes if self.row[i] >= 0)
                given[CHANNELS, row] = max((abs(s.channel) for s in spreads if s is not None), default=0.0)
        return given

    def _modelled(self) -> tuple[Array, Array, Array]:
        """(base, all that is modelled, limit) of each case."""
        bases, limits = zip(*map(self._base, self.nodes), strict=True) if self.nodes else ((), ())
        modelled = [0.0] * len(self.examined)
        for node in (n for n in self.trained.nodes if self.row[n] >= 0):  # of a parameter the next steps are made
            modelled[node] = self.trained.modelled(node, bases[self.row[node]])
        found = []
        for node, base in zip(self.nodes, bases, strict=True):
            if self.graph.nodes[node].is_trained:
                found.append(math.hypot(self.trained.updated(node).errors[-1], base))
                continue
            before = self._model(self.graph.inputs(node).nodes, modelled)
            here = math.hypot(self.attention.passed(node, before), base)
            if (loss := self.backward.loss(node)) is not None:
                here = math.hypot(here, loss.errors[-1])
            here = math.hypot(here, self.backward.jump(node))
            modelled[node] = here
            found.append(here)
        return np.array(bases), np.array(found), np.array(limits)

    def _model(self, origins: Sequence[int], modelled: Sequence[float]) -> float:
        """What everything up to some values adds; parameters that were trained carry errors of their own."""
        if not self.trained.nodes:
            return max(map(modelled.__getitem__, origins), default=0.0)
        trained = [self.graph.nodes[i].is_trained for i in origins]
        sides = (
            [modelled[i] for i, is_own in zip(origins, trained, strict=True) if is_own is own] for own in (True, False)
        )
        return math.hypot(*(max(side, default=0.0) for side in sides))

    def _base(self, node: int) -> tuple[float, float]:
        """(what one pass through the module adds, the most that its typical row may be off)."""
        one, inputs, names = self.examined[node], self.graph.inputs(node), self.names[node]
        assert one.about.baseline is not None
        assert one.about.target is not None
        reduction = max(self._reductions[node] or self._reduction_inside(node), self._summands(node))
        # A sum over ranks rounds every rank's part in the narrow dtype, and then their sum.
        summed = 2 if len(one.about.baseline.ranks) != len(one.about.target.ranks) and self.params[node] else 1
        spread = one.read.spread  # else it has no sizes
        lost = math.hypot(underflow(names, spread), drowned(spread)) if spread is not None else 0.0
        turned = angle_error(self.graph.nodes[node].cls, one.read.worst)
        of_time = self._sinusoids.get(one.site, 0.0)
        once = math.hypot(unit(*names, reduction), lost, turned, of_time)
        handed = inputs.nodes if self.graph.nodes[node].is_input else ()
        off = max((self._sinusoids.get(self.examined[i].site, 0.0) for i in handed), default=of_time)
        return once * math.sqrt(inputs.ops * summed), max(ROW_LIMIT, CONDITION * lost, CONDITION * off)

    def _summands(self, node: int) -> int:
        """Length of the sums over token rows or places; 0 where there are none."""
        this, shape = self.graph.nodes[node], _shape(self.examined[node])
        if not this.is_summed:
            return summands_of(this.cls, shape, self.params[node])
        outputs = [i for i in self.graph.inputs(node).nodes if self.graph.nodes[i].port.startswith("out")]
        return max((summed_of(_shape(self.examined[i]), shape) for i in outputs), default=0)

    def _reduction_inside(self, node: int) -> int:
        """Length of the sums of what has no parameters: none in a pointwise function, else as long as any here."""
        return 1 if self.graph.nodes[node].is_pointwise or self.graph.nodes[node].is_state else self._widest

    def _behind_flips(self) -> Array:
        holds = [one.more.handed_on is not None for one in self.examined]
        """Whether such rows are in what a node holds."""
        found = [False] * len(self.nodes)
        if any(holds) or self.lifts.noise:
            for node in (*(n for n in self.trained.nodes if self.row[n] >= 0), *self.nodes):
                origins = self.graph.inputs(node).nodes
                here = any(map(holds.__getitem__, origins))
                found[self.row[node]] = here
                holds[node] |= here or not self.lifts.noise.isdisjoint(origins)
        return np.array(found, bool)


def _shape(one: Examined) -> tuple[int, ...]:
    return one.baseline.shape if one.baseline is not None else ()
