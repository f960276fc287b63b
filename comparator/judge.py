"""Judge: a verdict for every site, from its own errors, those of its inputs, and the floor that rounding explains."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tapscope import dtypes
from tapscope.comparator.examine import Examined
from tapscope.comparator.finding import Finding, Verdict
from tapscope.comparator.flips import Flip
from tapscope.comparator.floor import AMPLIFY_TWIN, Floor, amplification, depth_floor, learned, local_floor, score, unit
from tapscope.comparator.graph import Graph, Inputs, Node
from tapscope.comparator.names import is_partial, reduced
from tapscope.comparator.spread import NOTHING, Spread
from tapscope.index import SiteInfo

_LAYER = re.compile(r"(?<=\.)\d+(?=[.:])")


@dataclass(frozen=True, slots=True)
class _Case:
    """A numeric site with what its floor depends on."""

    spread: Spread
    inputs: tuple[Spread, ...]
    how: str
    base: float
    """What one pass through the module adds."""
    eps: float
    depth: float
    is_twin: bool
    """Whether both sides have one dtype: then the weights are the same numbers."""


class Judge:
    """Judges the sites of one comparison together: floors depend on inputs and on the same site in other layers."""

    def __init__(
        self,
        examined: Sequence[Examined],
        sites: Mapping[str, SiteInfo],
        tolerance: tuple[float, float] | None = None,
        flips: Mapping[str, Flip] | None = None,
    ) -> None:
        """``examined`` in execution order; ``sites`` of the runs; ``flips``: integers that rounding may explain."""
        self._examined = examined
        self._tolerance = tolerance
        self._flips = flips or {}
        self.matched = [i for i, one in enumerate(examined) if one.baseline and one.target and not one.problem]
        self.graph = Graph([_node(examined[i], sites) for i in self.matched])
        self.inputs: list[Inputs] = [self.graph.inputs(n) for n in range(len(self.matched))]
        self._cases = [self._case(n, sites) for n in range(len(self.matched))]
        self._amplify = _peers(examined, self.matched, self._cases)

    def findings(self) -> list[Finding]:
        """One finding a site, in execution order."""
        nodes = {index: n for n, index in enumerate(self.matched)}
        found: list[Finding] = []
        within: set[str] = set()  # sites judged so far that rounding explains
        for i, one in enumerate(self._examined):
            found.append(self._judge_matched(one, nodes[i], i, within) if i in nodes else _unmatched(one, i))
            if not found[-1].verdict.is_bad:
                within.add(one.site)
        return found

    def _spread(self, node: int) -> Spread:
        return self._examined[self.matched[node]].spread or NOTHING

    def _case(self, node: int, sites: Mapping[str, SiteInfo]) -> _Case | None:
        one = self._examined[self.matched[node]]
        if one.is_exact or one.spread is None or one.baseline is None or one.target is None:
            return None
        inputs = self.inputs[node]
        names = one.baseline.dtype or "", one.target.dtype or ""
        base = unit(*names, _reduction(one, sites)) * inputs.ops**0.5
        spreads = tuple(self._spread(i) for i in inputs.nodes)
        eps, depth = max(map(dtypes.epsilon, names)), float(self.graph.depth[node])
        return _Case(one.spread, spreads, inputs.how, base, eps, depth, names[0] == names[1])

    def _judge_matched(self, one: Examined, node: int, order: int, within: set[str]) -> Finding:
        if one.replicas:
            return _finding(one, order, Verdict.DIFFERS, test="replicas", error=1.0, notes=(one.replicas,))
        if one.numbers is not None and one.numbers.nonfinite_mismatch:
            mismatches = one.numbers.nonfinite_mismatch
            inputs = self.inputs[node].how
            return _finding(one, order, Verdict.NONFINITE, test="nonfinite", error=float(mismatches), inputs=inputs)
        if self._tolerance is not None and one.numbers is not None and not one.is_exact:
            return _by_tolerance(one, order, self._tolerance, self.inputs[node].how)
        case = self._cases[node]
        return self._by_equality(one, order, within) if case is None else self._by_floor(one, node, order, case)

    def _by_equality(self, one: Examined, order: int, within: set[str]) -> Finding:
        if not one.num_unequal:
            return _finding(one, order, Verdict.SAME)
        if one.basis == "value":  # a flag, a number: if it mattered, a tensor differs and is judged by itself
            return _finding(one, order, Verdict.CLOSE, test="plain", notes=("a plain value differs",))
        flip = self._flips.get(one.site)
        if flip is not None and (not flip.logits or flip.logits in within):
            return _finding(one, order, Verdict.CLOSE, test="exact", notes=(flip.sentence,))
        return _finding(one, order, Verdict.DIFFERS, test="exact", error=float(one.num_unequal), growth=float("inf"))

    def _by_floor(self, one: Examined, node: int, order: int, case: _Case) -> Finding:
        if one.permuted:  # rounding leaves no value where it was and none where another was
            error = case.spread.errors[-1]
            return _finding(one, order, Verdict.DIFFERS, error=error, test="permuted", growth=math.inf, inputs=case.how)
        if case.spread.is_zero and not case.spread.gain:
            verdict = Verdict.CLOSE if one.num_unequal else Verdict.SAME
            return _finding(one, order, verdict, inputs=case.how)
        local, floor = self._floors(node, case)
        error, limit, test = floor.worst(case.spread)
        own_error, own_limit, _ = local.worst(case.spread)
        verdict = Verdict.DIFFERS if score(error, limit) > 1.0 else Verdict.CLOSE
        growth = score(own_error, own_limit)
        return _finding(one, order, verdict, error=error, floor=limit, test=test, growth=growth, inputs=case.how)

    def _floors(self, node: int, case: _Case) -> tuple[Floor, Floor]:
        """(given the inputs, given the depth too): the second is the one that the verdict is about."""
        amplify = self._amplify[node]
        if case.is_twin and all(s.is_zero for s in case.inputs):
            amplify = min(amplify, AMPLIFY_TWIN)
        local = local_floor(case.inputs, case.base, case.spread, amplify, case.eps)
        deep = depth_floor(case.base, case.depth, case.spread, case.eps)
        return (local, local.smaller(deep)) if case.how else (deep, deep)


def _node(one: Examined, sites: Mapping[str, SiteInfo]) -> Node:
    path, _, port = one.site.rpartition(":")
    return Node(path, port, not one.is_exact and one.spread is not None, bool(_params(one, sites)))


def _params(one: Examined, sites: Mapping[str, SiteInfo]) -> dict[str, tuple[int, ...]]:
    for side in (one.baseline, one.target):
        info = sites.get(reduced(side.site) if is_partial(side.site) else side.site) if side else None
        if info is not None and info.params:
            return info.params
    return {}


def _reduction(one: Examined, sites: Mapping[str, SiteInfo]) -> int:
    """Length of the sums that made this value: the weight's input features where known, else a generous guess."""
    widths = [shape[-1] for shape in _params(one, sites).values() if len(shape) >= 2]
    return max(widths, default=4096)


def _peers(examined: Sequence[Examined], matched: Sequence[int], cases: Sequence[_Case | None]) -> list[float]:
    """k of every node, learned from the same site of other layers."""
    kinds: dict[str, list[tuple[int, float]]] = {}
    for node, case in enumerate(cases):
        if case is not None and case.how and not case.spread.is_zero:
            kind = _LAYER.sub("*", examined[matched[node]].site, count=1)
            kinds.setdefault(kind, []).append((node, amplification(case.spread, case.inputs, case.base)))
    found = [learned(())] * len(cases)
    for likes in kinds.values():
        for node, _ in likes:
            found[node] = learned([value for other, value in likes if other != node])
    return found


def _by_tolerance(one: Examined, order: int, tolerance: tuple[float, float], how: str) -> Finding:
    assert one.numbers is not None
    atol, rtol = tolerance
    growth = float(one.numbers.over > 0)
    if not one.numbers.over:
        verdict = Verdict.SAME if one.numbers.equal == one.numbers.count else Verdict.CLOSE
        return _finding(one, order, verdict, test="tolerance", inputs=how)
    notes = (f"{one.numbers.over:,} of {one.numbers.count:,} elements beyond atol {atol:g} + rtol {rtol:g}",)
    return _finding(
        one,
        order,
        Verdict.DIFFERS,
        error=float(one.numbers.over),
        test="tolerance",
        growth=growth,
        inputs=how,
        notes=notes,
    )


def _unmatched(one: Examined, order: int) -> Finding:
    if one.baseline is None or one.target is None:
        return _finding(one, order, Verdict.ONLY_TARGET if one.baseline is None else Verdict.ONLY_BASELINE)
    return _finding(one, order, Verdict.SHAPE, notes=(one.problem,))


def _finding(
    one: Examined,
    order: int,
    verdict: Verdict,
    *,
    error: float = 0.0,
    floor: float = 0.0,
    test: str = "",
    growth: float = 0.0,
    inputs: str = "",
    notes: tuple[str, ...] = (),
) -> Finding:
    return Finding(
        one.site,
        verdict,
        one.pair.matched_by,
        one.baseline,
        one.target,
        order,
        one.basis,
        one.layout,
        one.rows,
        one.numbers,
        one.worst,
        error,
        floor,
        test,
        growth,
        inputs,
        "",
        one.steps,
        (*notes, *one.notes),
    )
