"""Rounding: the floor of every site of a comparison, modelled from dtypes, reduction lengths and execution order."""

import math
import re
from collections.abc import Mapping, Sequence

from msgspec import Struct

from tapscope import dtypes
from tapscope.comparator.examined import Examined
from tapscope.comparator.floor import (
    CONDITION,
    CONDITION_TWIN,
    ROW_LIMIT,
    Floor,
    learned_conditions,
    local_floor,
    observed_condition,
    path_floor,
    summed_gain,
    unit,
)
from tapscope.comparator.gradients import cancellation, losses, of_loss, spilled, stretch, underflow
from tapscope.comparator.graph import Graph
from tapscope.comparator.names import is_partial, reduced
from tapscope.comparator.spread import NOTHING, Largest, Spread, given, largest, largest_of
from tapscope.index import SiteInfo

_LAYER = re.compile(r"(?<=\.)\d+(?=[.:])")
_GUESS = 4096
"""Reduction length where no parameter shape of either run is known."""
_FLOAT32 = dtypes.epsilon("float32")
_STATE = 1.5
"""Condition of a parameter: it is copied, perhaps into another dtype, and nothing else."""
_MOVED = 2.0
"""How much further off a row may be that took another way: as far as a vector of its size that points elsewhere."""
Params = Mapping[str, tuple[int, ...]]


class _Case(Struct, frozen=True):
    """A numeric site with what its floor depends on."""

    spread: Spread
    given: Largest
    """The largest errors of the inputs."""
    base: float
    """What one pass through the module adds."""
    modelled: float
    """What everything up to and including the module adds, each with condition 1."""
    eps: float
    is_twin: bool
    """Whether both sides have one dtype: then the weights are the same numbers."""
    is_behind_flips: bool
    """Whether token rows that took another way went into it: what they add to the errors is no rounding, and no model
    of a path bounds it."""


class Rounding:
    """The model of one comparison: floors depend on inputs and on the same site in other layers."""

    def __init__(
        self, examined: Sequence[Examined], matched: Sequence[int], graph: Graph, sites: Mapping[str, SiteInfo]
    ) -> None:
        """``matched`` are the indices in ``examined`` of the graph's nodes."""
        self._examined, self._graph = [examined[i] for i in matched], graph
        self._params = [params_of(one, sites) for one in self._examined]
        self._reductions = [_reduction(n.cls, p) for n, p in zip(graph.nodes, self._params, strict=True)]
        self._widest = max(filter(None, self._reductions), default=_GUESS)
        self._losses = losses(graph)
        self._spreads = [
            (one.handed_on or one.spread or NOTHING) if node.numeric else None
            for node, one in zip(graph.nodes, self._examined, strict=True)
        ]
        """Of numeric nodes."""
        self._given = [None if spread is None else given(spread) for spread in self._spreads]
        """What the modules behind a numeric node are given with it."""
        self._modelled = [0.0] * len(matched)
        """Of nodes that have a case."""
        self._behind_flips = [one.handed_on is not None for one in self._examined]
        """Whether token rows that took another way are in what a node holds."""
        self._cases: list[_Case | None] = []
        for node in range(len(matched)):
            case = self._case(node)
            self._cases.append(case)
            if case is not None:
                self._modelled[node] = case.modelled
                self._behind_flips[node] |= case.is_behind_flips
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
        is_back, is_sum = self._graph.is_backward[node], self._is_sum(node)
        whole = path_floor(case.modelled, case.spread, case.base, case.eps, math.inf if is_back else ROW_LIMIT)
        if not self._graph.inputs(node).nodes and not self._graph.nodes[node].is_state:
            return whole, whole
        condition = self._condition[node]
        if self._graph.nodes[node].is_state:
            condition = _STATE
        elif case.is_twin and all(s.is_zero for s in self._inputs(node)):
            condition = min(condition, CONDITION_TWIN)
        mixes = self._graph.inputs(node).how in ("around", "inside", "before")
        local = local_floor(case.given, case.base, case.spread, condition, case.eps, mixes=mixes, sums_rows=is_sum)
        if is_sum:
            whole = whole.of_sum(summed_gain(case.given))
        if not (case.is_behind_flips or is_behind_culprit or is_back):
            return local, local.smaller(whole)
        wide, is_bounded = self._wide(node, case, condition, mixes=mixes)
        if case.is_behind_flips or not is_bounded:
            return wide, wide
        return wide, (wide if is_back else local).smaller(whole)

    def _wide(self, node: int, case: _Case, condition: float, *, mixes: bool) -> tuple[Floor, bool]:
        """(floor where errors may be all in a few rows: of tokens that took another way, or whose gradient is next to
        nothing; whether the model of the path bounds it)."""
        this, inputs = self._graph.nodes[node], self._inputs(node)
        moves = self._graph.inputs(node).how != "same" and not self._keeps_rows(node)
        if moves:
            inputs = tuple(spilled(s) if this.is_backward else s.worst_everywhere() for s in inputs)
        is_vector = (
            self._is_sum(node) and len(self._params[node].get(this.port[len("param[") :].partition("]")[0], ())) == 1
        )
        cancels = cancellation(case.spread, inputs) if is_vector else 1.0
        found = local_floor(
            largest(inputs),
            case.base,
            case.spread,
            cancels * condition,
            case.eps,
            mixes=mixes,
            sums_rows=self._is_sum(node),
            limit=max(ROW_LIMIT, _MOVED * cancels * max((s.errors[-1] for s in inputs), default=0.0)),
            # What a large row's gradient is off by is many times a small row that it is added to.
            tail_limit=math.inf if this.is_backward and moves else 0.0,
            stretch=self._stretch(node, case) if this.is_backward else 1.0,
        )
        return found, cancels == 1.0

    def _stretch(self, node: int, case: _Case) -> float:
        """How much worse the condition of single rows may be: of any size where a sum goes over other tokens."""
        if not self._is_sum(node):
            return stretch(case.spread, self._inputs(node))
        origins = (self._examined[i] for i in self._graph.inputs(node).nodes)
        return math.inf if any(one.is_exact and one.num_unequal for one in origins) else 1.0

    def _is_sum(self, node: int) -> bool:
        """Whether it is the gradient of a parameter, a sum over token rows."""
        return self._graph.is_backward[node] and self._graph.nodes[node].port.startswith("param[")

    def _keeps_rows(self, node: int) -> bool:
        """Whether each row is made of the same row of what went in."""
        this = self._graph.nodes[node]
        return not this.is_input and not self._is_sum(node) and (bool(self._params[node]) or this.is_pointwise)

    def _inputs(self, node: int) -> tuple[Spread, ...]:
        """The spreads of what went into a node."""
        found = tuple(s for s in map(self._spreads.__getitem__, self._graph.inputs(node).nodes) if s is not None)
        return (*found, self._loss(node)) if node in self._losses else found

    def _loss(self, node: int) -> Spread:
        """What a loss hands on to the first of the gradients."""
        return of_loss(self._examined[self._losses[node]].numbers)

    def _case(self, node: int) -> _Case | None:
        one = self._examined[node]
        if one.is_exact or one.spread is None or one.baseline is None or one.target is None:
            return None
        inputs, names = self._graph.inputs(node), self._coarsest(node)
        reduction = self._reductions[node] or self._reduction_inside(node)
        # A sum over ranks rounds every rank's part in the narrow dtype, and then their sum.
        summed = 2 if len(one.baseline.ranks) != len(one.target.ranks) and self._params[node] else 1
        once = math.hypot(unit(*names, reduction), underflow(names, one.spread))
        base = once * math.sqrt(inputs.ops * summed)
        modelled = math.hypot(max(map(self._modelled.__getitem__, inputs.nodes), default=0.0), base)
        errors = [errors for errors in map(self._given.__getitem__, inputs.nodes) if errors is not None]
        if node in self._losses:
            loss = self._loss(node)
            errors.append(given(loss))
            modelled = math.hypot(modelled, loss.errors[-1])
        behind = any(map(self._behind_flips.__getitem__, inputs.nodes))
        eps = max(map(dtypes.epsilon, names))
        return _Case(one.spread, largest_of(errors), base, modelled, eps, names[0] == names[1], behind)

    def _coarsest(self, node: int) -> tuple[str, str]:
        """The dtypes a value was computed in: its own, or 16-bit ones that went in (a head may give out float32)."""
        found = []
        for side in ("baseline", "target"):
            name = _dtype(self._examined[node], side)
            if self._graph.inputs(node).how == "captured":
                origins = (i for i in self._graph.inputs(node).nodes if self._graph.nodes[i].numeric)
                others = [_dtype(self._examined[i], side) for i in origins]
                name = max([name, *(n for n in others if dtypes.epsilon(n) > _FLOAT32)], key=dtypes.epsilon)
            found.append(name)
        return found[0], found[1]

    def _reduction_inside(self, node: int) -> int:
        """Length of the sums of what has no parameters: none in a pointwise function, else as long as any here."""
        return 1 if self._graph.nodes[node].is_pointwise or self._graph.nodes[node].is_state else self._widest

    def _conditions(self) -> list[float]:
        """k of every node, learned from the same site of other layers."""
        kinds: dict[str, list[tuple[int, float]]] = {}
        for node, case in enumerate(self._cases):
            if case is not None and case.base and self._graph.inputs(node).nodes and not case.spread.is_zero:
                kind = _LAYER.sub("*", self._examined[node].site, count=1)
                kinds.setdefault(kind, []).append((node, observed_condition(case.spread, case.given, case.base)))
        found = [CONDITION] * len(self._cases)
        for likes in kinds.values():
            learned = learned_conditions([value for _, value in likes])
            for (node, _), condition in zip(likes, learned, strict=True):
                found[node] = condition
        return found


def _dtype(one: Examined, side: str) -> str:
    return getattr(one, side).dtype or ""


def params_of(one: Examined, sites: Mapping[str, SiteInfo]) -> Params:
    """Local shapes of the parameters of the module that the site belongs to."""
    for side in (one.baseline, one.target):
        info = sites.get(reduced(side.site) if is_partial(side.site) else side.site) if side else None
        if info is not None and info.params:
            return info.params
    return {}


def _reduction(cls: str, params: Params) -> int:
    """Length of the sums that a module with parameters makes; 0 where that is not known."""
    if "Embedding" in cls:
        return 1
    if not params:
        return 0
    matrices = [shape for shape in params.values() if len(shape) >= 2]
    if cls == "Conv1D":  # GPT-2's, which keeps its weight as [in, out]
        return max((shape[0] for shape in matrices), default=0)
    return max(
        (math.prod(shape[1:]) for shape in matrices), default=max((s[0] for s in params.values() if s), default=0)
    )
