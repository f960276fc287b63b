"""Judge, the fifth stage: give every site a verdict by the noise floor and detectors, then find culprits and causes."""

from collections.abc import Mapping, Sequence

from msgspec import Struct, structs

from tapscope.comparator.detectors.detector import Stage
from tapscope.comparator.detectors.exclude_rerouted_rows import supported_changes
from tapscope.comparator.noise_floor.kv_cache_error import kv_cache_epsilon
from tapscope.comparator.noise_floor.measured_floor import MeasuredFloor
from tapscope.comparator.noise_floor.near_zero_rows import unmatched_norms
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.pipeline.detect_reroutes import ScreenedRuns
from tapscope.comparator.verdict.finding import Finding, Verdict
from tapscope.comparator.verdict.judge import Judge, Standards
from tapscope.comparator.verdict.localise import Divergence, localise
from tapscope.comparator.verdict.onsets import early_steps
from tapscope.comparator.verdict.rules import Rule
from tapscope.comparator.verdict.token_rows import tokens_of
from tapscope.core import formatting
from tapscope.core.dtypes import is_float
from tapscope.core.site import Glob, is_parameter
from tapscope.expr.site_pattern import site_pattern
from tapscope.run_format.manifest import CHECKPOINT_FORMAT
from tapscope.run_format.run import Run

_SUBSTITUTED_INPUTS = ("not captured", "unknown")
"""States of a divergence's inputs in which other sites stand in for them."""
_ATTENTION = "attention_outputs"
"""Name of the attention check in the list of detectors that can be disabled."""


class JudgedRuns(Struct, frozen=True):
    """Two runs with a verdict for every site."""

    screened: ScreenedRuns
    """The judged measurements, without token rows that were routed to different experts."""
    findings: list[Finding]
    """In execution order."""
    divergences: list[Divergence]
    """Sites that add an error of their own, in execution order."""
    early: list[int]
    """Target steps to judge again separately, see :mod:`..verdict.onsets`."""


def judge_sites(all_rows: ScreenedRuns, rules: tuple[Rule, ...] = (), noise: MeasuredFloor | None = None) -> JudgedRuns:
    """Judge all sites; ``rules`` and ``noise`` (a measured noise floor) take precedence over the rounding model."""
    measured = all_rows.measured
    opened, analyzer = measured.matched.opened, measured.analyzer
    options, sites = opened.options, measured.matched.sites
    expected = all_rows.detect(Stage.EXPECT, all_rows.evidence)
    # Verdicts by the noise floor. A reroute counts only where the router's scores are within their own floor.
    standards = Standards(
        tolerance=options.tolerance,
        rules=rules,
        measured_floor=noise,
        changes=all_rows.changes,
        unmatched_norms=unmatched_norms(all_rows.results, analyzer.norm_modules),
        kv_cache_epsilon=kv_cache_epsilon([run.manifest for run in opened.runs]),
        time_embeddings=expected.time_embeddings,
        kink_crossings=expected.kink_crossings,
        allowed=tuple(map(site_pattern, options.allow_differ)),
        explained=tuple(map(Glob, options.explain_floor)),
        disabled=options.disabled,
        missing_gradients=expected.missing_gradients,
        are_weights=all(run.manifest.get("format") == CHECKPOINT_FORMAT for run in opened.runs),
        quantized=tuple(run.quantized for run in opened.runs),
    )
    screened = all_rows.without_rerouted_rows()
    judge = Judge(screened.judged, sites, standards)
    findings = judge.findings()
    supported = supported_changes(all_rows.changes, findings, opened.rows.target)
    if supported != all_rows.changes:
        screened = all_rows.without_rerouted_rows(supported)
        judge = Judge(screened.judged, sites, standards)
        findings = judge.findings()
    judge, findings = _with_inherited_errors(judge, findings, screened, standards)
    if noise is None and options.tolerance is None:
        screened, findings = _with_confined_rows(findings, screened, standards)
    # Detectors find errors that their size alone does not reveal.
    left, right = (run.records.of(options.steps_of(side), options.ranks) for side, run in enumerate(opened.runs))
    evidence = structs.replace(
        screened.evidence,
        records=(left, right),
        pointwise=frozenset(node.path for node in judge.graph.nodes if node.is_pointwise),
        findings=findings,
    )
    findings = screened.detect(Stage.REVIEW, evidence).findings
    if _ATTENTION not in options.disabled and any(finding.verdict is Verdict.CLOSE for finding in findings):
        from tapscope.comparator.explain.attention_outputs import first_unexplained  # imported for runs that differ

        if (unexplained := first_unexplained(findings, screened.judged, screened.preparer)) is not None:
            findings = [unexplained if one.order == unexplained.order else one for one in findings]
    # Find the culprits, the places of their errors, and their causes.
    findings, divergences = localise(findings, judge.matched, judge.graph, judge.inputs)
    inputs = _recorded_inputs(judge, divergences, screened)
    divergences = mark_uncertain(divergences, screened.results, inputs, opened.target)
    early = early_steps(findings, divergences, judge)
    divergences = [_with_tokens(each, screened) for each in divergences]
    if divergences:
        from tapscope.comparator.explain.explain import ComparedSites, explain  # imported only if needed

        compared = ComparedSites(screened.judged, judge.matched, judge.inputs, analyzer.preparer)
        divergences = explain(divergences, compared)
    return JudgedRuns(screened, findings, divergences, early)


def _with_inherited_errors(
    judge: Judge, findings: list[Finding], screened: ScreenedRuns, standards: Standards
) -> tuple[Judge, list[Finding]]:
    """Judge again as long as a site's inputs explain its error.

    The candidates are activations that seem to add an error, and an attention output that is the first failure.
    """
    judged, preparer, notes = screened.judged, screened.measured.analyzer.preparer, dict[str, str]()
    while any(finding.verdict.is_bad for finding in findings):
        from tapscope.comparator.explain import recomputed_activations, recomputed_attention  # imported only if needed

        known = standards.inherited_activations
        activations = (
            recomputed_activations.inherited_activations(findings, judged, judge.matched, judge.graph, preparer) - known
        )
        attention = None if activations else recomputed_attention.inherited_error(findings, judged, preparer)
        if attention is not None and attention[0] not in notes:
            errors = {**standards.inherited_attention, attention[0]: attention[1]}
            standards = structs.replace(standards, inherited_attention=errors)
            notes[attention[0]] = recomputed_attention.NOTE
        elif activations:
            standards = structs.replace(standards, inherited_activations=standards.inherited_activations | activations)
            notes |= dict.fromkeys(activations, recomputed_activations.NOTE)
        else:
            break
        judge = Judge(judged, screened.measured.matched.sites, standards)
        findings = [
            structs.replace(one, notes=(*one.notes, notes[one.result.site])) if one.result.site in notes else one
            for one in judge.findings()
        ]
    return judge, findings


def _with_confined_rows(
    findings: list[Finding], screened: ScreenedRuns, standards: Standards
) -> tuple[ScreenedRuns, list[Finding]]:
    """Add the verdicts of the rows that depend on no rerouted row, if any of these rows exceed their floor."""
    preparer = screened.preparer
    all_rows = preparer.left_out()
    before = structs.replace(screened.evidence, findings=findings)
    evidence = screened.detect(Stage.CONFINE, before)
    if evidence.pairs is before.pairs:
        preparer.leave_out_only(all_rows)
        return screened, findings
    confined = structs.replace(screened, results=evidence.pairs)
    judge = Judge(confined.judged, screened.measured.matched.sites, standards)
    _, others = _with_inherited_errors(judge, judge.findings(), confined, standards)
    merged = [new if new.result is not old.result else old for old, new in zip(findings, others, strict=True)]
    if not any(new.verdict.is_bad and new is not old for old, new in zip(findings, merged, strict=True)):
        preparer.leave_out_only(all_rows)
        return screened, findings
    return confined, merged


def _recorded_inputs(judge: Judge, divergences: Sequence[Divergence], screened: ScreenedRuns) -> dict[int, list[str]]:
    """Return a mapping from the order of a divergence's finding to the sites that are, or stand in for, its inputs."""
    wanted, judged = {each.finding.order for each in divergences}, screened.judged
    nodes = [n for n, order in enumerate(judge.matched) if order in wanted]
    given = {n: [judged[judge.matched[i]] for i in judge.inputs[n].nodes] for n in nodes}
    return {judge.matched[n]: [name for one in given[n] for name in one.names] for n in nodes}


def _with_tokens(divergence: Divergence, screened: ScreenedRuns) -> Divergence:
    """Add the rows above the floor in the first step of the divergence."""
    one = screened.judged[divergence.finding.order]
    tokens, count, place = tokens_of(screened.measured.analyzer, one, divergence.finding, divergence.step)
    return structs.replace(divergence, place=place, tokens=tokens, num_tokens=count)


def mark_uncertain(
    divergences: Sequence[Divergence],
    everything: Sequence[PairResult],
    inputs: Mapping[int, Sequence[str]],
    target: Run,
) -> list[Divergence]:
    """Mark divergences as uncertain if a site directly upstream was recorded but not compared.

    If the inputs of a culprit were not captured, the latest preceding sites stand in for them. The error may begin at a
    site between these and the culprit that was excluded: by ``--site``, ``--skip`` or ``--layers``, or because its rows
    or shapes do not match. ``inputs`` maps the order of a finding to the target's names of the sites that stand in for
    its inputs.
    """
    if not any(each.is_certain and each.inputs in _SUBSTITUTED_INPUTS for each in divergences):
        return list(divergences)
    known = {name for one in everything if not (one.exclusion_reason or one.problem) for name in one.names}
    records = target.records
    begun = records.first_seqs()
    forward = records.which(lambda kind: is_float(kind.dtype) and kind.pass_ == "forward")
    left_out = {
        site: seq for site, seq in records.first_seqs(forward).items() if site not in known and not is_parameter(site)
    }
    return [_mark_uncertain(each, begun, left_out, inputs.get(each.finding.order, ())) for each in divergences]


def _mark_uncertain(
    one: Divergence, begun: Mapping[str, int], left_out: Mapping[str, int], before: Sequence[str]
) -> Divergence:
    side = one.finding.target
    if not one.is_certain or one.inputs not in _SUBSTITUTED_INPUTS or side is None or side.site not in begun:
        return one
    first = min((begun[name] for name in before if name in begun), default=-1)
    between = [site for site, seq in left_out.items() if first < seq < begun[side.site]]
    if not between:
        return one
    more = f" and {formatting.plural(len(between) - 1, 'more site')} upstream of it were" if len(between) > 1 else ""
    evidence = f"{one.evidence}; {between[-1]}{more or ' upstream of it was'} recorded but not compared"
    return structs.replace(one, is_certain=False, evidence=evidence)
