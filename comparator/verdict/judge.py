"""Judge: a verdict for every site, from its own errors, those of its inputs, and its noise floor."""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from msgspec import Struct, field, structs

from tapscope.comparator.facts import StepResult
from tapscope.comparator.metrics.error_distribution import QUANTILES
from tapscope.comparator.noise_floor.derivative_error import KinkCrossings
from tapscope.comparator.noise_floor.error_model import ErrorModel, FloorEffect
from tapscope.comparator.noise_floor.floor_inputs import ComparisonFacts
from tapscope.comparator.noise_floor.floor_table import ratio_of
from tapscope.comparator.noise_floor.graph import Graph
from tapscope.comparator.noise_floor.measured_floor import MeasuredFloor
from tapscope.comparator.noise_floor.node import Inputs, make_nodes
from tapscope.comparator.noise_floor.reduction_length import Params, params_of
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.verdict.choice_change import ChoiceChange
from tapscope.comparator.verdict.finding import Finding, Verdict
from tapscope.comparator.verdict.rules import Rule, find_rule, measures_of
from tapscope.core import dtypes
from tapscope.core.gc_control import trim_heap
from tapscope.core.site import Glob
from tapscope.expr.site_pattern import SitePattern
from tapscope.run_format.index import SiteInfo
from tapscope.run_format.sketch import LOW

_OUTPUT_SETTINGS = tuple(
    f":in[{name}]"
    for name in (
        "use_cache",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "logits_to_keep",
    )
)
"""Arguments of transformers that select what a forward returns and keeps, but not what it computes. `logits_to_keep`
may be numbers of rows, which depend on the other requests of the step."""
_CAST_MARGIN = 1.01
"""Times half a unit in the last place: rows are summed in floating point."""
ALLOWED = "allowed to differ"
"""Beginning of the note on a site that is allowed to differ and does."""


class Standards(Struct, frozen=True, kw_only=True):
    """The standards by which sites are judged, in addition to the error model."""

    tolerance: tuple[float, float] | None = None
    """(atol, rtol) instead of any floor."""
    rules: tuple[Rule, ...] = ()
    """Conditions instead of a floor, for the sites that they match."""
    measured_floor: MeasuredFloor | None = None
    """The floor measured by a noise run."""
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
    inherited_attention: Mapping[str, float] = field(default_factory=dict)
    """See :attr:`~.floor_inputs.ComparisonFacts.inherited_attention`."""
    allowed: tuple[SitePattern, ...] = ()
    """Sites that may differ."""
    explained: tuple[Glob, ...] = ()
    """Sites whose findings list the effects that made their floor."""
    disabled: frozenset[str] = frozenset()
    """Names of disabled noise floor effects."""
    missing_gradients: Mapping[str, str] = field(default_factory=dict)
    """Site of a gradient that one run lacks but should have -> sentence for the report."""
    are_weights: bool = False
    """Whether both are checkpoints: nothing was computed, so that only a cast explains a difference."""
    quantized: tuple[Mapping[str, Callable[[], Any]], ...] = ()
    """Of each run: site of a weight that was multiplied out -> what its quantizer explains."""


def compared_graph(
    results: Sequence[PairResult], sites: Mapping[str, SiteInfo], absent: Collection[str] = ()
) -> tuple[list[int], list[Params], Graph]:
    """Indices of the compared results and of those of ``absent`` sites, the parameters of their modules, and their data
    flow. ``results`` in execution order."""
    matched = [
        i
        for i, one in enumerate(results)
        if (one.is_matched and (not one.problem or one.meta.is_shape_mismatch)) or one.site in absent
    ]
    ours = [results[i] for i in matched]
    params = [params_of(one, sites) for one in ours]
    return matched, params, Graph(make_nodes(ours, params, sites))


class Judge:
    """Judges all sites of a comparison: floors depend on inputs and on the same site in other layers."""

    def __init__(
        self, results: Sequence[PairResult], sites: Mapping[str, SiteInfo], standards: Standards | None = None
    ) -> None:
        """``results`` in execution order; ``sites`` of the runs."""
        self._results = results
        self._standards = standards or Standards()
        self.matched, params, self.graph = compared_graph(results, sites, self._standards.missing_gradients)
        ours = [results[i] for i in self.matched]
        self.inputs: list[Inputs] = self.graph.all_inputs
        alone = {one.site.rpartition(":")[0]: one.extras.softmax_condition for one in results if not one.is_matched}
        alone = {path: floor for path, floor in alone.items() if floor}
        facts = ComparisonFacts(
            alone,
            self._standards.kv_cache_epsilon,
            self._standards.time_embeddings,
            self._standards.unmatched_norms,
            self._standards.kink_crossings,
            self._standards.inherited_attention,
        )
        self._model = ErrorModel(ours, self.graph, params, facts, self._standards.disabled)
        trim_heap()  # findings take as much space as the arrays from which floors were computed
        self._behind: set[int] = set()
        """Nodes above their floor, and everything downstream of them."""

    def findings(self) -> list[Finding]:
        """One finding per site, in execution order."""
        findings: list[Finding] = []
        within: set[str] = set()  # judged sites within their floor, where that matters
        node = 0  # index of the next compared site
        for i, one in enumerate(self._results):
            is_node = node < len(self.matched) and self.matched[node] == i
            judged = self._judge_matched(one, node, findings, within) if is_node else _unmatched(one, i)
            findings.append(self._allowed(judged) if judged.verdict.is_bad else judged)
            is_bad = findings[-1].verdict.is_bad
            if self._standards.changes and not is_bad:
                within.add(one.site)
            if is_node and (is_bad or self._is_behind(node)):
                self._behind.add(node)
            node += is_node
        return findings

    def base(self, node: int) -> float:
        """The error that the module of a node adds itself; 0 if rounding does not apply."""
        return self._model.local_error(node)

    def _allowed(self, finding: Finding) -> Finding:
        """The finding, made to pass if the user allows it to differ."""
        names = {finding.site, *finding.result.pair.names()}
        glob = next((each.text for each in self._standards.allowed if any(map(each.matches, names))), None)
        if glob is None:
            return finding
        notes = (f"{ALLOWED}: {finding.verdict} ({glob})", *finding.notes)
        return structs.replace(
            finding, verdict=Verdict.CLOSE, added_error_ratio=0.0, judged_by=f"--allow-differ {glob}", notes=notes
        )

    def _is_behind(self, node: int) -> bool:
        return bool(self._behind) and not self._behind.isdisjoint(self.inputs[node].nodes)

    def _judge_matched(self, one: PairResult, node: int, findings: list[Finding], within: set[str]) -> Finding:
        how, order = self.inputs[node].how, self.matched[node]
        if not one.is_matched:
            return _absent(one, order, self._standards.missing_gradients[one.site], how)
        if one.meta.is_shape_mismatch:
            return _misfit(one, order, how)
        if one.extras.replica_problem:
            notes = (one.extras.replica_problem,)
            how_far: dict[str, Any] = {"test": "replicas", "error": 1.0, "judged_by": "equality"}
            return _finding(one, order, Verdict.DIFFERS, **how_far, notes=notes)
        rule = self._rule(one)
        odd = one.num_nonfinite_mismatch
        if odd and not (rule is not None and rule.sees_nonfinite):
            by: dict[str, Any] = {"test": "nonfinite", "judged_by": "equality", "inputs": how}
            return _finding(one, order, Verdict.NONFINITE, error=float(odd), **by)
        if rule is not None and one.metrics is not None:
            return self._by_rule(one, node, order, findings, rule)
        if rule is None and self._standards.tolerance is None and one.metrics is not None and one.num_unequal:
            names = dict.fromkeys((one.site, *one.names))
            floors = [each[name]() for each in self._standards.quantized for name in names if name in each]
            if floors:
                return _by_quantization(one, order, floors, how)
            if self._standards.are_weights and self._standards.measured_floor is None and one.distribution is not None:
                return _by_cast(one, order, how)
        if self._standards.tolerance is not None and one.metrics is not None and not one.is_exact:
            return _by_tolerance(one, order, self._standards.tolerance, how)
        judged = (
            self._by_floor(one, node, order, findings)
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

    def _by_rule(self, one: PairResult, node: int, order: int, findings: list[Finding], rule: Rule) -> Finding:
        judged = (
            self._by_floor(one, node, order, findings)
            if self._model.is_numeric(node)
            else _finding(one, order, Verdict.SAME)
        )
        values = measures_of(one.metrics, one.distribution, judged.ratio)
        if rule.holds(values):
            verdict = Verdict.SAME if judged.verdict is Verdict.SAME and not one.num_unequal else Verdict.CLOSE
            return structs.replace(judged, verdict=verdict, test="rule", judged_by=f"rule {rule.text}")
        said = ", ".join(
            f"{name} is {values[name]:.4g}" for name in sorted(rule.require.names) if values[name] is not None
        )
        notes = (f"breaks the rule {rule.text}: {said}", *judged.notes)
        return structs.replace(
            judged,
            verdict=Verdict.DIFFERS,
            test="rule",
            judged_by=f"rule {rule.text}",
            added_error_ratio=math.inf,
            notes=notes,
        )

    def _by_equality(self, one: PairResult, order: int, within: set[str]) -> Finding:
        if not one.num_unequal:
            return _finding(one, order, Verdict.SAME, judged_by="equality")
        if one.site.endswith(_OUTPUT_SETTINGS):
            notes = ("an argument that selects what is returned, not what is computed",)
            test = "plain" if one.basis == "value" else "exact"
            return _finding(one, order, Verdict.CLOSE, test=test, judged_by="equality", notes=notes)
        if one.basis == "value":
            by_value: dict[str, Any] = {"test": "plain", "added_error_ratio": math.inf, "judged_by": "equality"}
            return _finding(one, order, Verdict.DIFFERS, error=float(one.num_unequal), **by_value)
        change = self._standards.changes.get(one.site)
        if change is not None and not change.is_unexplained and (not change.scores or change.scores in within):
            return _finding(one, order, Verdict.CLOSE, test="exact", judged_by="equality", notes=(change.sentence,))
        follows = change is not None and not change.is_unexplained  # follows from scores that exceed their own floor
        by: dict[str, Any] = {
            "test": "exact",
            "added_error_ratio": 0.0 if follows else math.inf,
            "judged_by": "equality",
        }
        by["notes"] = (change.sentence,) if change is not None else ()
        return _finding(one, order, Verdict.DIFFERS, error=float(one.num_unequal), **by)

    def _by_floor(self, one: PairResult, node: int, order: int, findings: list[Finding]) -> Finding:
        how = self.inputs[node].how
        if one.is_equal and not one.extras.permuted:
            verdict = Verdict.CLOSE if one.num_unequal else Verdict.SAME
            return _finding(one, order, verdict, inputs=how, judged_by="equality")
        if not self.inputs[node].ops and how == "aliased":  # the bytes of another site: its verdict applies
            other = findings[self.matched[self.inputs[node].nodes[0]]]
            if other.basis == one.basis and other.judged_by in ("rounding", "noise_run"):
                same: dict[str, Any] = {"error": other.error, "floor": other.floor, "row_floor": other.row_floor}
                same["floor_effects"] = self._effects(one, self.inputs[node].nodes[0])
                return _finding(
                    one, order, other.verdict, **same, test=other.test, inputs=how, judged_by=other.judged_by
                )
        if one.extras.permuted and not _is_within_one_rounding(one):  # which moves no value to another place
            assert one.distribution is not None
            by: dict[str, Any] = {
                "test": "permuted",
                "added_error_ratio": math.inf,
                "judged_by": "rounding",
                "inputs": how,
            }
            return _finding(one, order, Verdict.DIFFERS, error=one.distribution.errors[-1], **by)
        error, limit, test, row_floor, added_error_ratio = self._model.floor(
            node, is_behind_culprit=self._is_behind(node)
        )
        noise = self._standards.measured_floor
        by_noise = noise.judged(one, self._model.local_error(node)) if noise is not None else None
        if by_noise is not None:  # errors of inputs above their own floor are not the site's own
            error, limit, test, row_floor = by_noise
            beyond = max((findings[self.matched[i]].ratio for i in self.inputs[node].nodes if i < node), default=0.0)
            added_error_ratio = ratio_of(error, limit) / max(1.0, beyond)
        # An estimate differs if the whole of its confidence interval is above the floor.
        margin = LOW if one.basis == "sketch" else 1.0
        return _finding(
            one,
            order,
            Verdict.DIFFERS if ratio_of(error * margin, limit) > 1.0 else Verdict.CLOSE,
            error=error,
            floor=limit,
            row_floor=row_floor,
            test=test,
            added_error_ratio=added_error_ratio,
            inputs=how,
            judged_by="rounding" if by_noise is None else "noise_run",
            floor_effects=self._effects(one, node) if by_noise is None else (),
        )

    def _effects(self, one: PairResult, node: int) -> tuple[FloorEffect, ...]:
        """The effects that made the floor of a node, if ``one`` is to be explained."""
        if not any(glob.matches(one.site) for glob in self._standards.explained):
            return ()
        return self._model.explain(node, is_behind_culprit=self._is_behind(node))


def _by_tolerance(one: PairResult, order: int, tolerance: tuple[float, float], how: str) -> Finding:
    assert one.metrics is not None
    atol, rtol = tolerance
    added_error_ratio = float(one.metrics.num_over_tolerance > 0)
    if not one.metrics.num_over_tolerance:
        verdict = Verdict.SAME if one.metrics.num_equal == one.metrics.num_elements else Verdict.CLOSE
        return _finding(one, order, verdict, test="tolerance", inputs=how, judged_by="tolerance")
    notes = (
        f"{one.metrics.num_over_tolerance:,} of {one.metrics.num_elements:,} elements beyond atol {atol:g} + "
        f"rtol {rtol:g}",
    )
    return _finding(
        one,
        order,
        Verdict.DIFFERS,
        error=float(one.metrics.num_over_tolerance),
        test="tolerance",
        judged_by="tolerance",
        added_error_ratio=added_error_ratio,
        inputs=how,
        notes=notes,
    )


def _by_quantization(one: PairResult, order: int, floors: Sequence[Any], how: str) -> Finding:
    """A weight against its quantized form: within the error of rounding to the nearest code, or not."""
    assert one.metrics is not None
    rel_l2, max_abs = (sum(getattr(floor, name) for floor in floors) for name in ("rel_l2", "max_abs"))
    ratio = max(one.metrics.rel_l2 / rel_l2, one.metrics.max_abs / max_abs if max_abs else 0.0)
    by: dict[str, Any] = {"error": one.metrics.rel_l2, "floor": rel_l2, "judged_by": "quantization", "inputs": how}
    if ratio <= 1:
        return _finding(one, order, Verdict.CLOSE, test="quantization", **by)
    note = (
        f"beyond the error of its quantizer: rel_l2 {one.metrics.rel_l2:.2e}, rounding explains {rel_l2:.2e}; "
        f"max_abs {one.metrics.max_abs:.2e}, rounding explains {max_abs:.2e}"
    )
    return _finding(one, order, Verdict.DIFFERS, test="quantization", added_error_ratio=ratio, notes=(note,), **by)


def _by_cast(one: PairResult, order: int, how: str) -> Finding:
    """A weight of two checkpoints: equal, or as far apart as casts to their dtypes leave each element and row."""
    assert one.metrics is not None
    assert one.distribution is not None
    kinds = [name for name in one.dtypes if dtypes.is_float(name)]
    half_ulp = sum(dtypes.epsilon(name or "") / 2 for name in kinds) if len(set(one.dtypes)) == 2 else 0.0
    floor = _CAST_MARGIN * half_ulp
    error = max(one.distribution.errors[len(QUANTILES) - 1], one.distribution.peak)
    by: dict[str, Any] = {"error": error, "floor": floor, "test": "weights", "judged_by": "cast", "inputs": how}
    if error <= floor:
        return _finding(one, order, Verdict.CLOSE, **by)
    what = f"of which a cast explains {floor:.1e}" if floor else "and no cast explains it, because the dtypes are equal"
    count, total = one.metrics.num_elements - one.metrics.num_equal, one.metrics.num_elements
    note = f"{count:,} of {total:,} elements differ by up to {error:.2e} relative to their magnitude, {what}"
    ratio = error / floor if floor else math.inf
    return _finding(one, order, Verdict.DIFFERS, added_error_ratio=ratio, notes=(note,), **by)


def _unmatched(one: PairResult, order: int) -> Finding:
    if not one.is_matched:
        return _finding(one, order, Verdict.ONLY_TARGET if one.meta.baseline is None else Verdict.ONLY_BASELINE)
    return _finding(one, order, Verdict.SHAPE, notes=(one.problem,))


def _misfit(one: PairResult, order: int, how: str) -> Finding:
    """Whole tensors of different shapes differ from the first step on."""
    assert one.pair.target is not None
    first = one.pair.target.firings[0].step
    read = structs.replace(one.values, steps=(StepResult(first, 0, 0.0, 1.0, 1.0),))
    seen = structs.replace(one, values=read)
    by: dict[str, Any] = {"test": "shape", "added_error_ratio": math.inf, "judged_by": "equality", "inputs": how}
    return _finding(seen, order, Verdict.SHAPE, error=1.0, **by, notes=(one.problem,))


def _absent(one: PairResult, order: int, note: str, how: str) -> Finding:
    """A missing gradient counts as zeros: all of it differs."""
    (series,) = (side for side in (one.pair.baseline, one.pair.target) if side is not None)
    steps = tuple(StepResult(step, 0, 0.0, 1.0, 1.0) for step in dict.fromkeys(f.step for f in series.firings))
    by: dict[str, Any] = {
        "test": "missing_gradient",
        "added_error_ratio": math.inf,
        "judged_by": "equality",
        "inputs": how,
    }
    seen = structs.replace(one, values=structs.replace(one.values, steps=steps))
    return _finding(seen, order, Verdict.DIFFERS, error=1.0, **by, notes=(note,))


def _finding(one: PairResult, order: int, verdict: Verdict, *, notes: tuple[str, ...] = (), **judged: Any) -> Finding:
    """A finding on a site, with the members that were ``judged``."""
    return Finding(one, verdict, order, **judged, notes=(*notes, *one.notes) if notes else one.notes)


def _is_within_one_rounding(one: PairResult) -> bool:
    """Whether no row is off by more than one rounding: then neighbours of nearly one value may be exchanged by it."""
    if one.basis != "values" or one.distribution is None:
        return False
    error = max(one.distribution.errors[-1], one.distribution.peak)
    return error <= min(map(dtypes.epsilon, one.dtypes), default=0.0)
