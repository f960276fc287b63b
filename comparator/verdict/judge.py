"""Judge: a verdict for every site, from its own errors, those of its inputs, and the floor that rounding explains."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import Struct, field, structs

from tapscope.comparator.facts import StepResult
from tapscope.comparator.noise_floor.derivative_error import KinkCrossings
from tapscope.comparator.noise_floor.error_model import ErrorModel, FloorEffect
from tapscope.comparator.noise_floor.floor_inputs import ComparisonFacts
from tapscope.comparator.noise_floor.floor_table import ratio_of
from tapscope.comparator.noise_floor.graph import Graph
from tapscope.comparator.noise_floor.measured_floor import MeasuredFloor
from tapscope.comparator.noise_floor.node import Inputs, make_nodes
from tapscope.comparator.noise_floor.reduction_length import params_of
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.verdict.choice_change import ChoiceChange
from tapscope.comparator.verdict.finding import Finding, Verdict
from tapscope.comparator.verdict.rules import Rule, find_rule, measures_of
from tapscope.core.gc_control import trim_heap
from tapscope.core.site import Glob
from tapscope.run_format.index import SiteInfo

_SETTINGS = tuple(
    f":in[{name}]"
    for name in ("use_cache", "return_dict", "output_attentions", "output_hidden_states", "output_router_logits")
)
"""Arguments of transformers that choose what a forward returns and keeps; the values that it computes are the same."""
ALLOWED = "allowed to differ"
"""First words of the note on a site that may differ and does."""


class Standards(Struct, frozen=True, kw_only=True):
    """What sites are judged by, in addition to the error model."""

    tolerance: tuple[float, float] | None = None
    """(atol, rtol) instead of any floor."""
    rules: tuple[Rule, ...] = ()
    """Conditions in place of a floor, for the sites that they match."""
    measured_floor: MeasuredFloor | None = None
    """The floor that a noise run measured."""
    changes: Mapping[str, ChoiceChange] = field(default_factory=dict)
    """Site of integers -> why they may differ."""
    unmatched_norms: frozenset[str] = frozenset()
    """See :attr:`~.floor_inputs.ComparisonFacts.unmatched_norms`."""
    kv_cache_epsilon: float = 0.0
    """See :attr:`~.floor_inputs.ComparisonFacts.kv_cache_epsilon`."""
    time_embeddings: Mapping[str, float] = field(default_factory=dict)
    """See :attr:`~.floor_inputs.ComparisonFacts.time_embeddings`."""
    kink_crossings: Mapping[str, KinkCrossings] = field(default_factory=dict)
    """See :attr:`~.floor_inputs.ComparisonFacts.kink_crossings`."""
    allowed: tuple[Glob, ...] = ()
    """Sites that may differ."""
    explained: tuple[Glob, ...] = ()
    """Sites whose findings list the effects that made their floor."""
    disabled: frozenset[str] = frozenset()
    """Names of effects of the noise floor to leave out."""
    missing_gradients: Mapping[str, str] = field(default_factory=dict)
    """Site of a gradient that one run lacks and should have -> what to report."""


class Judge:
    """Judges all sites of a comparison: floors depend on inputs and on the same site in other layers."""

    def __init__(
        self, examined: Sequence[PairResult], sites: Mapping[str, SiteInfo], standards: Standards | None = None
    ) -> None:
        """``examined`` in execution order; ``sites`` of the runs."""
        self._examined = examined
        self._standards = standards or Standards()
        absent = self._standards.missing_gradients
        self.matched = [
            i
            for i, one in enumerate(examined)
            if (one.is_matched and (not one.problem or one.about.is_misfit)) or one.site in absent
        ]
        """Indices of what was compared, and of the gradients that should be there to be."""
        ours = [examined[i] for i in self.matched]
        params = [params_of(one, sites) for one in ours]
        self.graph = Graph(make_nodes(ours, params, sites))
        self.inputs: list[Inputs] = self.graph.all_inputs
        alone = {one.site.rpartition(":")[0]: one.more.sharpness for one in examined if not one.is_matched}
        alone = {path: found for path, found in alone.items() if found}
        facts = ComparisonFacts(
            alone,
            self._standards.kv_cache_epsilon,
            self._standards.time_embeddings,
            self._standards.unmatched_norms,
            self._standards.kink_crossings,
        )
        self._model = ErrorModel(ours, self.graph, params, facts, self._standards.disabled)
        trim_heap()  # findings take as much room as the arrays did that floors were worked out in
        self._behind: set[int] = set()
        """Nodes above their floor, and everything downstream of them."""

    def findings(self) -> list[Finding]:
        """One finding a site, in execution order."""
        found: list[Finding] = []
        within: set[str] = set()  # sites judged so far that rounding explains, where that matters
        node = 0  # of the next site that has one
        for i, one in enumerate(self._examined):
            is_node = node < len(self.matched) and self.matched[node] == i
            judged = self._judge_matched(one, node, found, within) if is_node else _unmatched(one, i)
            found.append(self._allowed(judged) if judged.verdict.is_bad else judged)
            is_bad = found[-1].verdict.is_bad
            if self._standards.changes and not is_bad:
                within.add(one.site)
            if is_node and (is_bad or self._is_behind(node)):
                self._behind.add(node)
            node += is_node
        return found

    def base(self, node: int) -> float:
        """What the module that made a node adds by itself; 0 where rounding has no say."""
        return self._model.local_error(node)

    def _allowed(self, finding: Finding) -> Finding:
        """With the user's leave to differ, if there is one."""
        names = {finding.site, *finding.seen.pair.names()}
        glob = next((each.text for each in self._standards.allowed if any(map(each.matches, names))), None)
        if glob is None:
            return finding
        notes = (f"{ALLOWED}: {finding.verdict} ({glob})", *finding.notes)
        return structs.replace(
            finding, verdict=Verdict.CLOSE, growth=0.0, judged_by=f"--allow-differ {glob}", notes=notes
        )

    def _is_behind(self, node: int) -> bool:
        return bool(self._behind) and not self._behind.isdisjoint(self.inputs[node].nodes)

    def _judge_matched(self, one: PairResult, node: int, found: list[Finding], within: set[str]) -> Finding:
        how, order = self.inputs[node].how, self.matched[node]
        if not one.is_matched:
            return _absent(one, order, self._standards.missing_gradients[one.site], how)
        if one.about.is_misfit:
            return _misfit(one, order, how)
        if one.more.replicas:
            notes = (one.more.replicas,)
            how_far: dict[str, Any] = {"test": "replicas", "error": 1.0, "judged_by": "equality"}
            return _finding(one, order, Verdict.DIFFERS, **how_far, notes=notes)
        rule = self._rule(one)
        odd = one.num_odd
        if odd and not (rule is not None and rule.sees_nonfinite):
            by: dict[str, Any] = {"test": "nonfinite", "judged_by": "equality", "inputs": how}
            return _finding(one, order, Verdict.NONFINITE, error=float(odd), **by)
        if rule is not None and one.numbers is not None:
            return self._by_rule(one, node, order, found, rule)
        if self._standards.tolerance is not None and one.numbers is not None and not one.is_exact:
            return _by_tolerance(one, order, self._standards.tolerance, how)
        judged = (
            self._by_floor(one, node, order, found)
            if self._model.is_numeric(node)
            else self._by_equality(one, order, within)
        )
        if rule is None:
            return judged
        why = "needs values, and only statistics were captured: the floor decides"
        if one.basis == "value":
            why = "applies to tensors; a plain value must be equal, unless --allow-differ matches it"
        return structs.replace(judged, notes=(*judged.notes, f"{rule.text} {why}"))

    def _rule(self, one: PairResult) -> Rule | None:
        if not self._standards.rules:
            return None
        return find_rule(self._standards.rules, (one.site, *one.names))

    def _by_rule(self, one: PairResult, node: int, order: int, found: list[Finding], rule: Rule) -> Finding:
        judged = (
            self._by_floor(one, node, order, found)
            if self._model.is_numeric(node)
            else _finding(one, order, Verdict.SAME)
        )
        values = measures_of(one.numbers, one.spread, judged.ratio)
        if rule.holds(values):
            verdict = Verdict.SAME if judged.verdict is Verdict.SAME and not one.num_unequal else Verdict.CLOSE
            return structs.replace(judged, verdict=verdict, test="rule", judged_by=f"rule {rule.text}")
        said = ", ".join(
            f"{name} is {values[name]:.4g}" for name in sorted(rule.require.names) if values[name] is not None
        )
        notes = (f"breaks the rule {rule.text}: {said}", *judged.notes)
        return structs.replace(
            judged, verdict=Verdict.DIFFERS, test="rule", judged_by=f"rule {rule.text}", growth=math.inf, notes=notes
        )

    def _by_equality(self, one: PairResult, order: int, within: set[str]) -> Finding:
        if not one.num_unequal:
            return _finding(one, order, Verdict.SAME, judged_by="equality")
        if one.basis == "value" and one.site.endswith(_SETTINGS):
            notes = ("an argument that selects what is returned, not what is computed",)
            return _finding(one, order, Verdict.CLOSE, test="plain", judged_by="equality", notes=notes)
        if one.basis == "value":
            by_value: dict[str, Any] = {"test": "plain", "growth": math.inf, "judged_by": "equality"}
            return _finding(one, order, Verdict.DIFFERS, error=float(one.num_unequal), **by_value)
        change = self._standards.changes.get(one.site)
        if change is not None and not change.is_unexplained and (not change.scores or change.scores in within):
            return _finding(one, order, Verdict.CLOSE, test="exact", judged_by="equality", notes=(change.sentence,))
        follows = change is not None and not change.is_unexplained  # from scores that are beyond their own floor
        by: dict[str, Any] = {"test": "exact", "growth": 0.0 if follows else math.inf, "judged_by": "equality"}
        by["notes"] = (change.sentence,) if change is not None else ()
        return _finding(one, order, Verdict.DIFFERS, error=float(one.num_unequal), **by)

    def _by_floor(self, one: PairResult, node: int, order: int, found: list[Finding]) -> Finding:
        how = self.inputs[node].how
        if one.is_equal and not one.more.permuted:
            verdict = Verdict.CLOSE if one.num_unequal else Verdict.SAME
            return _finding(one, order, verdict, inputs=how, judged_by="equality")
        if not self.inputs[node].ops and how == "same":  # the bytes of another site: its verdict holds here
            other = found[self.matched[self.inputs[node].nodes[0]]]
            if other.basis == one.basis and other.judged_by in ("rounding", "twin"):
                same: dict[str, Any] = {"error": other.error, "floor": other.floor, "row_floor": other.row_floor}
                same["floor_effects"] = self._effects(one, self.inputs[node].nodes[0])
                return _finding(
                    one, order, other.verdict, **same, test=other.test, inputs=how, judged_by=other.judged_by
                )
        if one.more.permuted:  # rounding moves no value to another place
            assert one.spread is not None
            by: dict[str, Any] = {"test": "permuted", "growth": math.inf, "judged_by": "rounding", "inputs": how}
            return _finding(one, order, Verdict.DIFFERS, error=one.spread.errors[-1], **by)
        error, limit, test, row_floor, growth = self._model.floor(node, is_behind_culprit=self._is_behind(node))
        noise = self._standards.measured_floor
        by_noise = noise.judged(one, self._model.local_error(node)) if noise is not None else None
        if by_noise is not None:  # errors of inputs above their own floor are not the site's
            error, limit, test, row_floor = by_noise
            beyond = max((found[self.matched[i]].ratio for i in self.inputs[node].nodes if i < node), default=0.0)
            growth = ratio_of(error, limit) / max(1.0, beyond)
        return _finding(
            one,
            order,
            Verdict.DIFFERS if ratio_of(error, limit) > 1.0 else Verdict.CLOSE,
            error=error,
            floor=limit,
            row_floor=row_floor,
            test=test,
            growth=growth,
            inputs=how,
            judged_by="rounding" if by_noise is None else "twin",
            floor_effects=self._effects(one, node) if by_noise is None else (),
        )

    def _effects(self, one: PairResult, node: int) -> tuple[FloorEffect, ...]:
        """The effects that made the floor of a node, where ``one`` is to be explained."""
        if not any(glob.matches(one.site) for glob in self._standards.explained):
            return ()
        return self._model.explain(node, is_behind_culprit=self._is_behind(node))


def _by_tolerance(one: PairResult, order: int, tolerance: tuple[float, float], how: str) -> Finding:
    assert one.numbers is not None
    atol, rtol = tolerance
    growth = float(one.numbers.over > 0)
    if not one.numbers.over:
        verdict = Verdict.SAME if one.numbers.equal == one.numbers.count else Verdict.CLOSE
        return _finding(one, order, verdict, test="tolerance", inputs=how, judged_by="tolerance")
    notes = (f"{one.numbers.over:,} of {one.numbers.count:,} elements beyond atol {atol:g} + rtol {rtol:g}",)
    return _finding(
        one,
        order,
        Verdict.DIFFERS,
        error=float(one.numbers.over),
        test="tolerance",
        judged_by="tolerance",
        growth=growth,
        inputs=how,
        notes=notes,
    )


def _unmatched(one: PairResult, order: int) -> Finding:
    if not one.is_matched:
        return _finding(one, order, Verdict.ONLY_TARGET if one.about.baseline is None else Verdict.ONLY_BASELINE)
    return _finding(one, order, Verdict.SHAPE, notes=(one.problem,))


def _misfit(one: PairResult, order: int, how: str) -> Finding:
    """Whole tensors of different shapes differ from the first step on."""
    assert one.pair.target is not None
    first = one.pair.target.firings[0].step
    read = structs.replace(one.read, steps=(StepResult(first, 0, 0.0, 1.0, 1.0),))
    seen = structs.replace(one, read=read)
    by: dict[str, Any] = {"test": "shape", "growth": math.inf, "judged_by": "equality", "inputs": how}
    return _finding(seen, order, Verdict.SHAPE, error=1.0, **by, notes=(one.problem,))


def _absent(one: PairResult, order: int, note: str, how: str) -> Finding:
    """A missing gradient counts as zeros: all of it differs."""
    (series,) = (side for side in (one.pair.baseline, one.pair.target) if side is not None)
    steps = tuple(StepResult(step, 0, 0.0, 1.0, 1.0) for step in dict.fromkeys(f.step for f in series.firings))
    by: dict[str, Any] = {"test": "absent", "growth": math.inf, "judged_by": "equality", "inputs": how}
    seen = structs.replace(one, read=structs.replace(one.read, steps=steps))
    return _finding(seen, order, Verdict.DIFFERS, error=1.0, **by, notes=(note,))


def _finding(one: PairResult, order: int, verdict: Verdict, *, notes: tuple[str, ...] = (), **judged: Any) -> Finding:
    """A finding on a site, with what was ``judged``."""
    return Finding(one, verdict, order, **judged, notes=(*notes, *one.notes) if notes else one.notes)
