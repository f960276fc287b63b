"""Rounding: the floor of every site of a comparison, modelled from dtypes, reduction lengths and execution order."""

import math
from collections.abc import Sequence

from msgspec import Struct, structs

from tapscope import dtypes
from tapscope.comparator.backward import Backward
from tapscope.comparator.computed import computed_in
from tapscope.comparator.conditions import CONDITION, CONDITION_TWIN, kind_of, learned_conditions, observed_condition
from tapscope.comparator.examined import Examined
from tapscope.comparator.floor import ROW_LIMIT, Floor, local_floor, path_floor, summed_gain, unit
from tapscope.comparator.gradients import drowned, shared_gain, spilled, underflow
from tapscope.comparator.graph import Graph
from tapscope.comparator.lifts import NO_LIFT, UNMET, Lifts
from tapscope.comparator.sharpness import beyond
from tapscope.comparator.spread import NOTHING, Largest, Quantiles, Spread, given, largest, largest_of
from tapscope.comparator.trained import STATE, Judged, Trained
from tapscope.comparator.widths import Params, reduction_of

_GUESS = 4096
"""Reduction length where no parameter shape of either run is known."""
_MOVED = 2.0
"""How much further off a row may be that took another way: as far as a vector of its size that points elsewhere. A row
that was made of such rows may be so by as much as its condition makes of their error."""


class _Case(Struct, frozen=True, gc=False):
    """A numeric site with what its floor depends on."""

    spread: Spread
    given: Largest
    """The largest errors of the inputs."""
    base: float
    """What one pass through the module adds."""
    modelled: float
    """What everything up to and including the module adds, each with condition 1."""
    eps: float
    limit: float
    """The most that its typical row may be off."""
    is_twin: bool
    """Whether both sides have one dtype: then the weights are the same numbers."""
    is_behind_flips: bool
    """Whether token rows that took another way went into it: what they add to the errors is no rounding, and no model
    of a path bounds it."""


class Rounding:
    """The model of one comparison: floors depend on inputs and on the same site in other layers."""

    def __init__(
        self,
        examined: Sequence[Examined],
        graph: Graph,
        params: Sequence[Params],
        unmet: frozenset[str] = frozenset(),
    ) -> None:
        """``examined`` are those of the graph's nodes, ``params`` the parameters of their modules; ``unmet`` is of
        :func:`.lifts.unmet`."""
        self._unmet = unmet
        self._examined, self._graph, self._params = examined, graph, params
        self._names = [computed_in(examined, graph, node) for node in range(len(examined))]
        """The dtypes each was computed in."""
        self._reductions = [reduction_of(n.cls, p) for n, p in zip(graph.nodes, params, strict=True)]
        self._widest = max(filter(None, self._reductions), default=_GUESS)
        self._spreads = [
            (one.handed_on or one.spread or NOTHING) if node.numeric else None
            for node, one in zip(graph.nodes, self._examined, strict=True)
        ]
        """Of numeric nodes."""
        self._backward = Backward(self._examined, graph, tuple(self._spreads))
        self._besides = [self._backward.beside(node, names) for node, names in enumerate(self._names)]
        self._trained = Trained(self._examined, graph)
        for node in self._trained.nodes:
            self._spreads[node] = self._trained.handed_on(node)
        self._lifts = Lifts(examined, graph, self._spreads)
        self._given = [None if spread is None else given(spread) for spread in self._lifts.handed]
        """What the modules behind a numeric node are given with it."""
        self._modelled = [0.0] * len(examined)
        """Of nodes that have a case."""
        self._behind_flips = [one.handed_on is not None for one in self._examined]
        """Whether token rows that took another way are in what a node holds."""
        self._cases: list[_Case | None] = [None] * len(examined)
        for node in (*self._trained.nodes, *range(len(examined))):  # of a parameter the next steps are made
            case = self._cases[node] = self._case(node)
            if case is not None:
                trained = graph.nodes[node].is_trained
                self._modelled[node] = self._trained.modelled(node, case.base) if trained else case.modelled
                self._behind_flips[node] |= case.is_behind_flips or self._lifts.makes_noise(node)
        self._condition = self._conditions()

    def is_numeric(self, node: int) -> bool:
        """Whether rounding has a say at all."""
        return self._cases[node] is not None

    def base(self, node: int) -> float:
        """What the module that made a numeric site adds by itself."""
        return case.base if (case := self._cases[node]) is not None else 0.0

    def floors(self, node: int, *, is_behind_culprit: bool = False) -> tuple[Floor, Floor]:
        """(given its inputs, given the path too): the verdict is about the second, the first says who is to blame.

        ``is_behind_culprit``: what went in carries another module's error, which like that of a token that went to
        other experts may be all in a few rows.
        """
        case = self._cases[node]
        assert case is not None
        is_back, is_sum = self._graph.is_backward[node], self._graph.nodes[node].is_summed
        unseen = NO_LIFT if is_back else self._unseen(node)
        lifts = self._lifts.of(node) if unseen is NO_LIFT else unseen
        tail_limit = math.inf if is_back or lifts is not NO_LIFT else 0.0
        whole = path_floor(
            case.modelled, case.spread, case.base, case.eps, limit=case.limit, tail_limit=tail_limit
        ).lifted(lifts)
        if not self._graph.inputs(node).nodes and not self._graph.nodes[node].is_state:
            return whole, whole
        condition = self._condition[node]
        if self._graph.nodes[node].is_state:
            condition = STATE
        elif case.is_twin and all(s.is_zero for s in self._inputs(node)):
            condition = min(condition, CONDITION_TWIN)
        mixes = self._graph.inputs(node).how in ("around", "inside", "before")
        local = local_floor(
            case.given,
            case.base,
            case.spread,
            condition,
            case.eps,
            mixes=mixes,
            sums_rows=is_sum,
            limit=case.limit,
            tail_limit=0.0 if lifts is NO_LIFT else math.inf,
        ).lifted(unseen)
        if is_sum:
            whole = whole.of_sum(summed_gain(case.given), case.spread.num_rows)
        if not (case.is_behind_flips or is_behind_culprit or is_back):
            return local, local.smaller(whole)
        wide, is_bounded = self._wide(node, case, condition, mixes=mixes)
        wide = wide.lifted(unseen)
        if case.is_behind_flips or not is_bounded:
            return wide, wide
        if is_back and mixes:
            whole = whole.scaled(shared_gain(case.spread))
        return wide, (wide if is_back else local).smaller(whole)

    def judged(self, node: int, *, is_behind_culprit: bool = False) -> Judged:
        """The spread that is furthest beyond its floor, and the :meth:`floors` of it."""
        case = self._cases[node]
        assert case is not None
        local, whole = self.floors(node, is_behind_culprit=is_behind_culprit)
        if self._graph.nodes[node].is_summed:
            local, whole = local.scaled(self._trained.clipped), whole.scaled(self._trained.clipped)
        return self._trained.judged(node, (case.spread, local, whole), case.base, case.eps)

    def _wide(self, node: int, case: _Case, condition: float, *, mixes: bool) -> tuple[Floor, bool]:
        """(floor where errors may be all in a few rows: of tokens that took another way, or whose gradient is next to
        nothing; whether the model of the path bounds it)."""
        this, inputs = self._graph.nodes[node], self._inputs(node)
        moves = self._graph.inputs(node).how != "same" and not self._keeps_rows(node)
        if moves:
            inputs = tuple(spilled(s) if this.is_backward else s.worst_everywhere() for s in inputs)
        shape = self._params[node].get(this.port[len("param[") :].partition("]")[0], ())
        is_vector = this.is_summed and len(shape) == 1
        cancels = self._backward.cancellation(node) if is_vector else 1.0
        given = max((s.errors[-1] for s in inputs), default=0.0)
        is_open = (this.is_backward and self._graph.inputs(node).how != "same") or self._lifts.of(node) is not NO_LIFT
        turned = min(_MOVED, condition * given) if case.is_behind_flips else 0.0
        found = local_floor(
            largest(inputs),
            case.base,
            case.spread,
            cancels * condition,
            case.eps,
            mixes=mixes,
            sums_rows=this.is_summed,
            limit=max(case.limit, _MOVED * cancels * given, turned),
            # A large row's error is many times a small row that it is added to, and small rows are differences.
            tail_limit=math.inf if is_open else 0.0,
            stretch=self._backward.stretch(node, self._inputs(node)),
        )
        return found.scaled(shared_gain(case.spread) if this.is_backward and mixes else 0.0), cancels == 1.0

    def _unseen(self, node: int) -> Quantiles:
        """By how much more than usual a function that nobody saw may enlarge errors: a softmax, or with a norm in it
        that was recorded and not compared."""
        is_around = self._graph.inputs(node).how == "around" and self._graph.enclosing(node) in self._unmet
        return UNMET if is_around else beyond(CONDITION, self._examined[node].sharpness)

    def _keeps_rows(self, node: int) -> bool:
        """Whether each row is made of the same row of what went in."""
        this = self._graph.nodes[node]
        return not this.is_input and not this.is_summed and (bool(self._params[node]) or this.is_pointwise)

    def _inputs(self, node: int) -> tuple[Spread, ...]:
        """The spreads of what went into a node."""
        if self._graph.nodes[node].is_trained:
            return (self._trained.updated(node),)
        found = tuple(s for s in map(self._lifts.handed.__getitem__, self._graph.inputs(node).nodes) if s is not None)
        return *found, *self._backward.sharpened(node, self._besides[node])

    def _case(self, node: int) -> _Case | None:
        one = self._examined[node]
        if not self._graph.nodes[node].numeric or one.spread is None or one.baseline is None or one.target is None:
            return None
        inputs, names = self._graph.inputs(node), self._names[node]
        reduction = self._reductions[node] or self._reduction_inside(node)
        # A sum over ranks rounds every rank's part in the narrow dtype, and then their sum.
        summed = 2 if len(one.baseline.ranks) != len(one.target.ranks) and self._params[node] else 1
        lost = math.hypot(underflow(names, one.spread), drowned(one.spread))
        once = math.hypot(unit(*names, reduction), lost)
        base = once * math.sqrt(inputs.ops * summed)
        modelled = math.hypot(self._model(inputs.nodes), base)
        errors = [errors for errors in map(self._given.__getitem__, inputs.nodes) if errors is not None]
        if one.drifts:
            update = self._trained.updated(node)
            errors, modelled = [given(update)], math.hypot(update.errors[-1], base)
        errors += map(given, self._besides[node])
        if (loss := self._backward.loss(node)) is not None:
            modelled = math.hypot(modelled, loss.errors[-1])
        behind = any(map(self._behind_flips.__getitem__, inputs.nodes))
        eps, spread = max(map(dtypes.epsilon, names)), one.spread
        if one.even_errors and inputs.how == "around" and not self._graph.is_backward[node]:
            spread = structs.replace(spread, errors=one.even_errors)
        limit = max(ROW_LIMIT, CONDITION * lost)
        return _Case(spread, largest_of(errors), base, modelled, eps, limit, names[0] == names[1], behind)

    def _model(self, origins: Sequence[int]) -> float:
        """What everything up to some values adds; parameters that were trained carry errors of their own."""
        if not self._trained.nodes:
            return max(map(self._modelled.__getitem__, origins), default=0.0)
        trained = [self._graph.nodes[i].is_trained for i in origins]
        sides = (
            [self._modelled[i] for i, is_own in zip(origins, trained, strict=True) if is_own is own]
            for own in (True, False)
        )
        return math.hypot(*(max(side, default=0.0) for side in sides))

    def _reduction_inside(self, node: int) -> int:
        """Length of the sums of what has no parameters: none in a pointwise function, else as long as any here."""
        return 1 if self._graph.nodes[node].is_pointwise or self._graph.nodes[node].is_state else self._widest

    def _conditions(self) -> list[float]:
        """k of every node, learned from the same site of other layers."""
        kinds: dict[str, list[tuple[int, float]]] = {}
        for node, case in enumerate(self._cases):
            if case is not None and case.base and self._graph.inputs(node).nodes and not case.spread.is_zero:
                kind = kind_of(self._examined[node].site)
                kinds.setdefault(kind, []).append((node, observed_condition(case.spread, case.given, case.base)))
        found = [CONDITION] * len(self._cases)
        for likes in kinds.values():
            learned = learned_conditions([value for _, value in likes])
            for (node, _), condition in zip(likes, learned, strict=True):
                found[node] = condition
        return found
