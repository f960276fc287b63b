"""Judge: give every site a verdict, based on its error, the errors of its inputs, and its noise floor."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
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
from tapscope.core.site import Glob, module_of
from tapscope.expr.site_pattern import SitePattern
from tapscope.run_format.index import SiteInfo
from tapscope.run_format.sketch import LOW_FACTOR
from tapscope.tensor_files.quantization import QuantizationFloor

_IGNORED_SETTINGS = tuple(
    f":in[{name}]"
    for name in (
        "use_cache",
        "return_dict",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "logits_to_keep",
        "packed_seq",
    )
)
"""Arguments that do not affect the value of any token row. Those of transformers select which values a forward returns
and caches; `logits_to_keep` may contain row numbers, which depend on the other requests of the step. `packed_seq` of
Megatron's rotary embedding says that the batch is packed, which is a layout."""
_CAST_MARGIN = 1.01
"""Multiple of half a unit in the last place that a cast may cause: rows are summed in floating point."""
ALLOWED = "allowed to differ"
"""Beginning of the note on a site that differs and is allowed to."""


class Standards(Struct, frozen=True, kw_only=True):
    """The standards by which sites are judged, in addition to the error model."""

    tolerance: tuple[float, float] | None = None
    """(atol, rtol) that replaces every floor."""
    rules: tuple[Rule, ...] = ()
    """Conditions that replace the floor of matching sites."""
    measured_floor: MeasuredFloor | None = None
    """The noise floor measured by a noise run."""
    changes: Mapping[str, ChoiceChange] = field(default_factory=dict)
    """Site of integers -> reason why its values may differ."""
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
    inherited_activations: frozenset[str] = frozenset()
    """See :attr:`~.floor_inputs.ComparisonFacts.inherited_activations`."""
    allowed: tuple[SitePattern, ...] = ()
    """Sites that may differ."""
    explained: tuple[Glob, ...] = ()
    """Sites whose findings list the effects that make up their floor."""
    disabled: frozenset[str] = frozenset()
    """Names of disabled noise floor effects."""
    missing_gradients: Mapping[str, str] = field(default_factory=dict)
    """Site of a gradient that one run should have but lacks -> sentence for the report."""
    are_weights: bool = False
    """Whether both runs are checkpoints. No value was computed, so only a cast explains a difference."""
    quantized: tuple[Mapping[str, Callable[[], QuantizationFloor]], ...] = ()
    """For each run: site of a dequantized weight -> the error that its quantizer explains."""


def compared_graph(
    results: Sequence[PairResult], sites: Mapping[str, SiteInfo], absent: Collection[str] = ()
) -> tuple[list[int], list[Params], Graph]:
    """Return (indices of the compared results, parameters of their modules, their dataflow graph).

    ``results`` must be in execution order. Results of ``absent`` sites are included.
    """
    matched = [
        i
        for i, result in enumerate(results)
        if (result.is_matched and (not result.problem or result.meta.is_shape_mismatch)) or result.site in absent
    ]
    ours = [results[i] for i in matched]
    params = [params_of(result, sites) for result in ours]
    return matched, params, Graph(make_nodes(ours, params, sites))


class Judge:
    """Judges all sites of a comparison together: a floor depends on the inputs and on the same site in other layers."""

    def __init__(
        self, results: Sequence[PairResult], sites: Mapping[str, SiteInfo], standards: Standards | None = None
    ) -> None:
        """Build the dataflow graph and the error model.

        ``results`` must be in execution order; ``sites`` is the module metadata of both runs.
        """
        self._results = results
        self._standards = standards or Standards()
        self.matched, params, self.graph = compared_graph(results, sites, self._standards.missing_gradients)
        ours = [results[i] for i in self.matched]
        self.inputs: list[Inputs] = self.graph.all_inputs
        unmatched = {
            module_of(result.site): result.extras.softmax_condition for result in results if not result.is_matched
        }
        unmatched = {path: condition for path, condition in unmatched.items() if condition}
        facts = ComparisonFacts(
            unmatched,
            self._standards.kv_cache_epsilon,
            self._standards.time_embeddings,
            self._standards.unmatched_norms,
            self._standards.kink_crossings,
            self._standards.inherited_attention,
            self._standards.inherited_activations,
        )
        self._model = ErrorModel(ours, self.graph, params, facts, self._standards.disabled)
        trim_heap()  # findings take as much space as the arrays from which floors were computed
        self._downstream: set[int] = set()
        """Nodes above their floor, and all nodes downstream of these."""

    def findings(self) -> list[Finding]:
        """Return one finding per site, in execution order."""
        findings: list[Finding] = []
        within: set[str] = set()  # sites within their floor; tracked only if choices changed
        node = 0  # index of the next compared site
        for i, result in enumerate(self._results):
            is_node = node < len(self.matched) and self.matched[node] == i
            judged = self._judge_matched(result, node, findings, within) if is_node else _unmatched(result, i)
            findings.append(self._allowed(judged) if judged.verdict.is_bad else judged)
            is_bad = findings[-1].verdict.is_bad
            if self._standards.changes and not is_bad:
                within.add(result.site)
            if is_node and (is_bad or self._is_downstream(node)):
                self._downstream.add(node)
            node += is_node
        return findings

    def base(self, node: int) -> float:
        """Return the error that the module of a node adds by itself; 0 if rounding does not apply."""
        return self._model.local_error(node)

    def _allowed(self, finding: Finding) -> Finding:
        """Return the finding, turned into a pass if the user allows the site to differ."""
        names = {finding.site, *finding.result.pair.names()}
        glob = next((each.text for each in self._standards.allowed if any(map(each.matches, names))), None)
        if glob is None:
            return finding
        notes = (f"{ALLOWED}: {finding.verdict} ({glob})", *finding.notes)
        return structs.replace(
            finding, verdict=Verdict.CLOSE, added_error_ratio=0.0, judged_by=f"--allow-differ {glob}", notes=notes
        )

    def _is_downstream(self, node: int) -> bool:
        return bool(self._downstream) and not self._downstream.isdisjoint(self.inputs[node].nodes)

    def _judge_matched(self, result: PairResult, node: int, findings: list[Finding], within: set[str]) -> Finding:
        source, order = self.inputs[node].source, self.matched[node]
        if not result.is_matched:
            return _missing_gradient(result, order, self._standards.missing_gradients[result.site], source)
        if result.meta.is_shape_mismatch:
            return _shape_mismatch(result, order, source)
        if result.extras.replica_problem:
            notes = (result.extras.replica_problem,)
            return _finding(
                result, order, Verdict.DIFFERS, test="replicas", error=1.0, judged_by="equality", notes=notes
            )
        rule = self._rule(result)
        mismatch = result.num_nonfinite_mismatch
        if mismatch and not (rule is not None and rule.sees_nonfinite):
            return _finding(
                result,
                order,
                Verdict.NONFINITE,
                error=float(mismatch),
                test="nonfinite",
                inputs=source,
                judged_by="equality",
            )
        if rule is not None and result.metrics is not None:
            return self._by_rule(result, node, order, findings, rule)
        if rule is None and self._standards.tolerance is None and result.metrics is not None and result.num_unequal:
            names = dict.fromkeys((result.site, *result.names))
            floors = [each[name]() for each in self._standards.quantized for name in names if name in each]
            if floors:
                return _by_quantization(result, order, floors, source)
            if (
                self._standards.are_weights
                and self._standards.measured_floor is None
                and result.distribution is not None
            ):
                return _by_cast(result, order, source)
        if self._standards.tolerance is not None and result.metrics is not None and not result.is_exact:
            return _by_tolerance(result, order, self._standards.tolerance, source)
        judged = (
            self._by_floor(result, node, order, findings)
            if self._model.is_numeric(node)
            else self._by_equality(result, order, within)
        )
        if rule is None:
            return judged
        why = "needs values, and only statistics were captured: the floor decides"
        if result.basis == "value":
            why = "applies to tensors; a plain value must be equal, unless --allow-differ matches it"
        return structs.replace(judged, notes=(*judged.notes, f"{rule.text} {why}"))

    def _rule(self, result: PairResult) -> Rule | None:
        if not self._standards.rules:
            return None
        return find_rule(self._standards.rules, (result.site, *result.names))

    def _by_rule(self, result: PairResult, node: int, order: int, findings: list[Finding], rule: Rule) -> Finding:
        judged = (
            self._by_floor(result, node, order, findings)
            if self._model.is_numeric(node)
            else _finding(result, order, Verdict.SAME)
        )
        values = measures_of(result.metrics, result.distribution, judged.ratio)
        if rule.holds(values):
            verdict = Verdict.SAME if judged.verdict is Verdict.SAME and not result.num_unequal else Verdict.CLOSE
            return structs.replace(judged, verdict=verdict, test="rule", judged_by=f"rule {rule.text}")
        reported = ", ".join(
            f"{name} is {values[name]:.4g}" for name in sorted(rule.require.names) if values[name] is not None
        )
        notes = (f"breaks the rule {rule.text}: {reported}", *judged.notes)
        return structs.replace(
            judged,
            verdict=Verdict.DIFFERS,
            test="rule",
            judged_by=f"rule {rule.text}",
            added_error_ratio=math.inf,
            notes=notes,
        )

    def _by_equality(self, result: PairResult, order: int, within: set[str]) -> Finding:
        if not result.num_unequal:
            return _finding(result, order, Verdict.SAME, judged_by="equality")
        if result.site.endswith(_IGNORED_SETTINGS):
            notes = ("an argument that does not affect the values of token rows",)
            test = "plain" if result.basis == "value" else "exact"
            return _finding(result, order, Verdict.CLOSE, test=test, judged_by="equality", notes=notes)
        if result.basis == "value":
            return _finding(
                result,
                order,
                Verdict.DIFFERS,
                error=float(result.num_unequal),
                test="plain",
                added_error_ratio=math.inf,
                judged_by="equality",
            )
        change = self._standards.changes.get(result.site)
        if change is not None and not change.is_unexplained and (not change.scores or change.scores in within):
            return _finding(result, order, Verdict.CLOSE, test="exact", judged_by="equality", notes=(change.sentence,))
        follows = change is not None and not change.is_unexplained  # its scores exceed their own floor
        return _finding(
            result,
            order,
            Verdict.DIFFERS,
            error=float(result.num_unequal),
            test="exact",
            added_error_ratio=0.0 if follows else math.inf,
            judged_by="equality",
            notes=(change.sentence,) if change is not None else (),
        )

    def _by_floor(self, result: PairResult, node: int, order: int, findings: list[Finding]) -> Finding:
        source = self.inputs[node].source
        if result.is_equal and not result.extras.permuted:
            verdict = Verdict.CLOSE if result.num_unequal else Verdict.SAME
            return _finding(result, order, verdict, inputs=source, judged_by="equality")
        if not self.inputs[node].ops and source == "aliased":  # same bytes as another site, so the same verdict
            other = findings[self.matched[self.inputs[node].nodes[0]]]
            if other.basis == result.basis and other.judged_by in ("rounding", "noise_run"):
                return _finding(
                    result,
                    order,
                    other.verdict,
                    error=other.error,
                    floor=other.floor,
                    row_floor=other.row_floor,
                    test=other.test,
                    inputs=source,
                    judged_by=other.judged_by,
                    floor_effects=self._effects(result, self.inputs[node].nodes[0]),
                )
        if result.extras.permuted and not _is_within_one_rounding(result):  # larger than rounding: values really moved
            assert result.distribution is not None
            return _finding(
                result,
                order,
                Verdict.DIFFERS,
                error=result.distribution.errors[-1],
                test="permuted",
                added_error_ratio=math.inf,
                inputs=source,
                judged_by="rounding",
            )
        error, limit, test, row_floor, added_error_ratio = self._model.floor(
            node, is_downstream=self._is_downstream(node)
        )
        noise = self._standards.measured_floor
        by_noise = noise.judged(result, self._model.local_error(node)) if noise is not None else None
        if by_noise is not None:  # errors of inputs above their own floor are not the site's own
            error, limit, test, row_floor = by_noise
            beyond = max((findings[self.matched[i]].ratio for i in self.inputs[node].nodes if i < node), default=0.0)
            added_error_ratio = ratio_of(error, limit) / max(1.0, beyond)
        # An estimated error exceeds the floor only if its whole confidence interval does.
        margin = LOW_FACTOR if result.basis == "sketch" else 1.0
        return _finding(
            result,
            order,
            Verdict.DIFFERS if ratio_of(error * margin, limit) > 1.0 else Verdict.CLOSE,
            error=error,
            floor=limit,
            row_floor=row_floor,
            test=test,
            added_error_ratio=added_error_ratio,
            inputs=source,
            judged_by="rounding" if by_noise is None else "noise_run",
            floor_effects=self._effects(result, node) if by_noise is None else (),
        )

    def _effects(self, result: PairResult, node: int) -> tuple[FloorEffect, ...]:
        """Return the effects that make up the floor of a node, if ``explained`` selects the site; empty otherwise."""
        if not any(glob.matches(result.site) for glob in self._standards.explained):
            return ()
        return self._model.explain(node, is_downstream=self._is_downstream(node))


def _by_tolerance(result: PairResult, order: int, tolerance: tuple[float, float], source: str) -> Finding:
    assert result.metrics is not None
    atol, rtol = tolerance
    if not result.metrics.num_over_tolerance:
        verdict = Verdict.SAME if result.metrics.num_equal == result.metrics.num_elements else Verdict.CLOSE
        return _finding(result, order, verdict, test="tolerance", inputs=source, judged_by="tolerance")
    notes = (
        f"{result.metrics.num_over_tolerance:,} of {result.metrics.num_elements:,} elements beyond atol {atol:g} + "
        f"rtol {rtol:g}",
    )
    return _finding(
        result,
        order,
        Verdict.DIFFERS,
        error=float(result.metrics.num_over_tolerance),
        test="tolerance",
        judged_by="tolerance",
        added_error_ratio=1.0,
        inputs=source,
        notes=notes,
    )


def _by_quantization(result: PairResult, order: int, floors: Sequence[QuantizationFloor], source: str) -> Finding:
    """Judge a weight and its quantized form by the error of rounding to the nearest code."""
    assert result.metrics is not None
    rel_l2, max_abs = sum(floor.rel_l2 for floor in floors), sum(floor.max_abs for floor in floors)
    ratio = max(result.metrics.rel_l2 / rel_l2, result.metrics.max_abs / max_abs if max_abs else 0.0)
    by: dict[str, Any] = {"error": result.metrics.rel_l2, "floor": rel_l2, "inputs": source}
    by |= {"test": "quantization", "judged_by": "quantization"}
    if ratio <= 1:
        return _finding(result, order, Verdict.CLOSE, **by)
    note = (
        f"beyond the error of its quantizer: rel_l2 {result.metrics.rel_l2:.2e}, rounding explains {rel_l2:.2e}; "
        f"max_abs {result.metrics.max_abs:.2e}, rounding explains {max_abs:.2e}"
    )
    return _finding(result, order, Verdict.DIFFERS, added_error_ratio=ratio, notes=(note,), **by)


def _by_cast(result: PairResult, order: int, source: str) -> Finding:
    """Judge a weight of two checkpoints: equal, or within the error of casts to their dtypes in each element and
    row."""
    assert result.metrics is not None
    assert result.distribution is not None
    kinds = [name for name in result.dtypes if dtypes.is_float(name)]
    half_ulp = sum(dtypes.epsilon(name or "") / 2 for name in kinds) if len(set(result.dtypes)) == 2 else 0.0
    floor = _CAST_MARGIN * half_ulp
    error = max(result.distribution.errors[len(QUANTILES) - 1], result.distribution.peak)
    by: dict[str, Any] = {"error": error, "floor": floor, "test": "weights", "judged_by": "cast", "inputs": source}
    if error <= floor:
        return _finding(result, order, Verdict.CLOSE, **by)
    cast = f"a cast explains {floor:.1e}" if floor else "no cast explains it, because the dtypes are equal"
    count, total = result.metrics.num_elements - result.metrics.num_equal, result.metrics.num_elements
    note = f"{count:,} of {total:,} elements differ, by up to {error:.2e} of their magnitude; {cast}"
    ratio = error / floor if floor else math.inf
    return _finding(result, order, Verdict.DIFFERS, added_error_ratio=ratio, notes=(note,), **by)


def _unmatched(result: PairResult, order: int) -> Finding:
    if not result.is_matched:
        return _finding(result, order, Verdict.ONLY_TARGET if result.meta.baseline is None else Verdict.ONLY_BASELINE)
    return _finding(result, order, Verdict.SHAPE, notes=(result.problem,))


def _shape_mismatch(result: PairResult, order: int, source: str) -> Finding:
    """Return a finding for tensors of different shapes: they differ as a whole, from the first step on."""
    assert result.pair.target is not None
    first = result.pair.target.firings[0].step
    return _wholly_different(result, order, Verdict.SHAPE, "shape", [first], result.problem, source)


def _missing_gradient(result: PairResult, order: int, note: str, source: str) -> Finding:
    """Return a finding for a missing gradient, which counts as zeros: it differs as a whole in every step."""
    (series,) = (side for side in (result.pair.baseline, result.pair.target) if side is not None)
    steps = dict.fromkeys(firing.step for firing in series.firings)
    return _wholly_different(result, order, Verdict.DIFFERS, "missing_gradient", steps, note, source)


def _wholly_different(
    result: PairResult, order: int, verdict: Verdict, test: str, steps: Iterable[int], note: str, source: str
) -> Finding:
    """Return a finding on values that were not compared, with a relative error of 1 in each of ``steps``."""
    values = structs.replace(result.values, steps=tuple(StepResult(step, 0, 0.0, 1.0, 1.0) for step in steps))
    return _finding(
        structs.replace(result, values=values),
        order,
        verdict,
        error=1.0,
        test=test,
        added_error_ratio=math.inf,
        inputs=source,
        judged_by="equality",
        notes=(note,),
    )


def _finding(
    result: PairResult, order: int, verdict: Verdict, *, notes: tuple[str, ...] = (), **judged: Any
) -> Finding:
    """Return a finding on a site, with the members in ``judged``."""
    return Finding(result, verdict, order, **judged, notes=(*notes, *result.notes) if notes else result.notes)


def _is_within_one_rounding(result: PairResult) -> bool:
    """Return whether no row differs by more than one rounding, which can exchange nearly equal neighbors."""
    if result.basis != "values" or result.distribution is None:
        return False
    error = max(result.distribution.errors[-1], result.distribution.peak)
    return error <= min(map(dtypes.epsilon, result.dtypes), default=0.0)
