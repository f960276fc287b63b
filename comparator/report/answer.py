"""Answer: the last four lines of a report: what differs by how much, where, why, and the next command."""

from typing import TYPE_CHECKING

from tapscope.comparator.detectors.sampled_tokens import is_logits
from tapscope.comparator.explain.parameter_updates import BATCH
from tapscope.comparator.noise_floor.node import NO_INPUTS
from tapscope.comparator.options import fail_on
from tapscope.comparator.report.next_command import next_command
from tapscope.comparator.verdict.coverage import MODELS_DIFFER, SAME_DIRECTORY, WEIGHTS_MAY_DIFFER
from tapscope.comparator.verdict.finding import Finding, Verdict
from tapscope.comparator.verdict.localise import Divergence
from tapscope.core import formatting
from tapscope.core.site import compact_ranges, layer_of, module_of, port_of
from tapscope.run_format.sketch import HIGH_FACTOR, LOW_FACTOR

if TYPE_CHECKING:
    from tapscope.comparator.report.report import Report

_ALWAYS = (Verdict.SAME, Verdict.CLOSE, Verdict.DIFFERS)
_WORDS = {
    Verdict.SHAPE: "not comparable",
    Verdict.ONLY_BASELINE: "only in baseline",
    Verdict.ONLY_TARGET: "only in target",
}
_NOTED_TESTS = (
    "replicas",
    "tolerance",
    "rule",
    "quantization",
    "weights",
    "permuted",
    "missing_gradient",
    "fp8_grid",
    "activation",
    "rotary_table",
    "plain",
    "shape",
    "recompute",
)
"""Tests whose first note describes the difference."""
_CAUSES = ("missing_gradient", "fp8_grid", "activation")
"""Tests whose first note states a cause rather than an observation."""
LABEL = 10
"""Width of the label column."""


def answer(report: "Report") -> list[str]:
    """Return four lines: ``what``, ``where``, ``why``, and ``next``, which holds a command only."""
    lines = {
        "what": _what_line(report),
        "where": _where_line(report),
        "why": _why(report),
        "next": next_command(report),
    }
    return [f"{label:<{LABEL}}{line}" for label, line in lines.items()]


def counts(report: "Report") -> str:
    """Return the number of findings per verdict, as text."""
    by_verdict = {v: sum(f.verdict is v for f in report.findings) for v in Verdict}
    return " · ".join(f"{n:,} {_WORDS.get(v, v)}" for v, n in by_verdict.items() if n or v in _ALWAYS)


def share(ratio: float) -> str:
    """Return error / floor as text: ``0.45``, ``2.6``, ``130``; with an exponent only from 10,000 on."""
    if 0.01 <= ratio < 9.95:
        return f"{ratio:.2f}" if ratio < 1 else f"{ratio:.1f}"
    return f"{ratio:.0f}" if 9.95 <= ratio < 9999.5 else formatting.number(ratio)


def _what_line(report: "Report") -> str:
    return _outcome(report) + _exit_reason(report)


def _exit_reason(report: "Report") -> str:
    """Return the effect of ``--fail-on`` on the exit code: ignored conditions, or a stricter condition that fails."""
    if report.options.fail_on == fail_on.DEFAULT:
        return ""
    if stricter := report.failed - fail_on.DEFAULT:
        return f"; fails on {', '.join(sorted(stricter))}"
    ignored = (report.met & fail_on.DEFAULT) - report.options.fail_on
    return f"; not in --fail-on: {', '.join(sorted(ignored))}" if ignored and not report.exit_code else ""


def _outcome(report: "Report") -> str:
    divergence, partial = report.first_divergence, report.coverage.partial
    if divergence is not None:
        sentence = f"inputs differ, results agree: {divergence.site}" if _only_inputs(report) else headline(divergence)
        return sentence + ("; on partial data" if partial else "")
    bad = _first_bad(report)
    if bad is not None:
        more = _and_more(report.num_bad - 1, "site")
        return f"cannot be compared: {bad.site}{more}{'; on partial data' if partial else ''}"
    if partial:
        return f"agrees where compared, but the data are partial{' (allowed)' if report.options.allow_partial else ''}"
    if SAME_DIRECTORY in report.coverage.warnings:
        return "agrees with itself"
    return f"agrees{_up_to_fork(report)}"


def _only_inputs(report: "Report") -> bool:
    """Return whether integer inputs of the model differ (such as offset positions), but no result does."""
    given = [divergence.finding for divergence in report.divergences]
    results = [f for f in report.findings if is_logits(f.result) and f.basis in ("values", "hash")]
    is_given = all(f.result.is_exact and port_of(f.site).startswith("in[") for f in given)
    return is_given and bool(results) and not any(f.verdict.is_bad for f in results)


def _why(report: "Report") -> str:
    divergence, partial = report.first_divergence, report.coverage.partial
    if divergence is not None:
        return "; ".join(_reasons(report, divergence))
    bad = _first_bad(report)
    if bad is not None:
        return bad.notes[0] if bad.notes else str(bad.verdict)
    if partial:
        return f"{partial[0]}{_and_more(len(partial) - 1, 'reason')}"
    return SAME_DIRECTORY if SAME_DIRECTORY in report.coverage.warnings else _how_close(report)


def _first_bad(report: "Report") -> Finding | None:
    return next((f for f in report.findings if f.verdict.is_bad), None)


def _up_to_fork(report: "Report") -> str:
    """Return where the tokens of greedy runs diverge; later rows depend on different tokens and are not compared."""
    forks, unseen = report.coverage.forks, max(report.coverage.num_rows_forked)
    if not forks or not unseen:
        return ""
    first = min(forks, key=lambda fork: fork.position)
    where = f"position {first.position} of request {first.request}"
    return f" up to where the tokens diverge ({where}; {unseen:,} later rows not compared)"


def _and_more(count: int, noun: str) -> str:
    return f", and {formatting.plural(count, f'more {noun}')}" if count > 0 else ""


def _how_close(report: "Report") -> str:
    closest = report.max_ratio_finding
    if closest is None:
        if any(f.verdict is Verdict.CLOSE for f in report.findings):
            by_rule = any(f.test == "rule" for f in report.findings)
            return "everything satisfies the rules" if by_rule else "everything within the tolerance"
        return f"every compared value is equal{_by_hash(report)}"
    return f"the largest error is {share(closest.ratio)} of what rounding explains, at {closest.site}"


def _by_hash(report: "Report") -> str:
    """Return text on sites that count as equal because of their recorded hashes."""
    unread, matched = report.coverage.num_sites_unread, report.coverage.num_sites_matched
    if not unread:
        return ""
    some = "" if unread == matched else f"{formatting.plural(unread, 'site')} "
    return f", {some}by recorded hash; --verify reads them"


def cause(divergence: Divergence) -> str:
    """Return the stated cause of a divergence: a clear explanation, or the note of a test that implies its cause.

    Empty if there is neither.
    """
    finding, explained = divergence.finding, divergence.explanation
    if explained is not None and explained.is_clear:
        return explained.text
    return finding.notes[0] if finding.test in _CAUSES and finding.notes else ""


def headline(divergence: Divergence) -> str:
    """Return a sentence on what differs at a divergence, and by how much."""
    finding = divergence.finding
    name = " or ".join(module or "(root)" for module in (divergence.module, *divergence.alternatives))
    path, _, port = divergence.site.rpartition(":")
    seen = port if path == divergence.module else f"seen at {divergence.site}"
    if finding.test == "missing_gradient":
        return f"{name} ({seen}) has no gradient"
    if finding.test == "shape":
        return f"{name} ({seen}) has another shape"
    verb = "is not finite" if finding.verdict is Verdict.NONFINITE else "differs"
    return f"{name} ({seen}) {verb}{f': {size}' if (size := _size(finding)) else ''}"


def _reasons(report: "Report", divergence: Divergence) -> list[str]:
    """Return why the divergence exists, if that is clear, and the evidence for the named module."""
    finding, explained = divergence.finding, divergence.explanation
    reasons = [finding.notes[0]] if finding.test in (*_NOTED_TESTS, "exact") and finding.notes else []
    reasons += [explained.text] if explained is not None and explained.is_clear else []
    shared = _shared(report, divergence)
    reasons += [shared] if shared else []
    reasons += [warning for warning in report.coverage.warnings if warning.startswith(MODELS_DIFFER)]
    needs_no_cause = bool(reasons) or explained is None or divergence.inputs == NO_INPUTS
    unexplained = [] if needs_no_cause else [_unexplained(finding)]
    evidence = divergence.evidence if divergence.is_certain else f"not certain: {divergence.evidence}"
    unrecorded = [warning for warning in report.coverage.warnings if warning.startswith(WEIGHTS_MAY_DIFFER)]
    return [*reasons, evidence, *unexplained, *unrecorded]


def _unexplained(finding: Finding) -> str:
    """Return where to look next if no hypothesis explains the error."""
    return finding.notes[0] if finding.test == "attention" else "no tested hypothesis explains it"


def _shared(report: "Report", divergence: Divergence) -> str:
    """Return a sentence on other modules affected by the same event, if no single module caused it."""
    if not divergence.shared:
        return ""
    is_gradient = divergence.site.endswith(".grad")
    alike = [f for f in report.findings if _is_parameter(f.site, is_gradient) and f.baseline and f.target]
    holders = {module_of(f.site) for f in alike}
    what = "gradients of parameters" if is_gradient else "parameters"
    by = "the optimizer, the clip, the accumulation" if is_gradient else "the optimizer, the checkpoint"
    by = "the batch" if divergence.explanation and divergence.explanation.name == BATCH else by
    more = f"{formatting.plural(len(divergence.shared), 'more module')} of {len(holders):,}"
    return f"the {what} of {more} differ, too: the cause is what they share ({by}), not one module"


def _is_parameter(site: str, is_gradient: bool) -> bool:
    port = port_of(site)
    return port.startswith("param[") and port.endswith(".grad") == is_gradient


def _size(finding: Finding) -> str:
    """Return the size of the difference; empty if a note describes it, see :func:`_reasons`."""
    if finding.test in _NOTED_TESTS:
        return "" if finding.notes else f"max |Δ| {formatting.number(finding.error)}"
    if finding.floor > 0.0 and finding.test not in ("exact", "nonfinite"):
        return f"{share(finding.ratio)} × the floor ({_amount(finding)})"
    return _amount(finding)


def _amount(finding: Finding) -> str:
    if finding.test == "nonfinite":
        return f"{int(finding.error):,} values that are not finite in one run only"
    if finding.test == "exact":
        return f"{int(finding.error):,} rows of integers unequal"
    if finding.test == "scale":
        return f"a common scale off by {finding.error:.1%}, rounding explains {finding.floor:.2%}"
    if finding.test == "channel":
        return f"the scale of one channel off by {finding.error:.1%}, rounding explains {finding.floor:.2%}"
    if finding.basis == "sketch":
        number = formatting.number
        interval = f"95 % interval {number(finding.error * LOW_FACTOR)} to {number(finding.error * HIGH_FACTOR)}"
        estimated = f"error {number(finding.error)} ({interval}), estimated from sketches"
        return f"{estimated}; rounding explains {number(finding.floor)}"
    what = "largest element off by" if finding.test in ("element", "max_element") else "error"
    return f"{what} {formatting.number(finding.error)}, rounding explains {formatting.number(finding.floor)}"


def _where_line(report: "Report") -> str:
    divergence = report.first_divergence
    if divergence is None:
        return _compared(report)
    parts = [f"step {divergence.step}"]
    layer = layer_of(divergence.module) if divergence.module else None
    parts += [f"layer {layer}"] if layer is not None else []
    if divergence.place is None:
        return ", ".join(parts) + _also(report)
    parts += [f"rank {divergence.place.rank}"] if divergence.place.rank is not None else []
    why = divergence.explanation
    if why is not None and why.extent not in ("", parts[0]) and not why.is_clear:
        parts.append(f"only {why.extent}")
    place = divergence.place
    if place.position is None and not place.index:  # a scalar
        return ", ".join(parts) + _also(report)
    where = place.text() + (f", column {place.index[-1]}" if place.position is not None and place.index else "")
    if place.in_shard:
        where += f" (on rank {place.rank}: --slice {','.join(map(str, place.in_shard))})"
    is_limited = parts[-1].startswith("only ")
    return f"{', '.join(parts)}; {_extent(divergence.finding, is_limited)} {where}{_also(report)}"


def _also(report: "Report") -> str:
    """Return text on other modules with an error of their own."""
    others = report.divergences[1:]
    if not others:
        return ""
    return f"; also in {others[0].module or '(root)'}{_and_more(len(others) - 1, 'module')}"


def _compared(report: "Report") -> str:
    """Return the scope of the verdict: number of sites and token rows, and steps."""
    coverage, shift = report.coverage, report.options.shift_steps
    steps = sorted(set().union(*(_steps(finding, shift) for finding in report.findings)))
    rows = f", {formatting.plural(coverage.num_rows_aligned, 'token row')}" if coverage.rows_known else ""
    seen = f", steps {compact_ranges(steps)}" if len(steps) > 1 else ""
    return f"{formatting.plural(coverage.num_sites_matched, 'site')}{rows}{seen}"


def _steps(finding: Finding, shift: int) -> set[int]:
    """Return the target steps that a finding covers, whether values were read or hashes are equal.

    ``shift``: target step number minus baseline step number.
    """
    steps = {result.step for result in finding.steps}
    pair, rows = finding.result.pair, finding.rows
    if finding.basis not in ("hash", "values") or pair.baseline is None or pair.target is None:
        return steps
    if len(steps) == len(pair.target.firings) or rows.num_forked or rows.num_unaligned or rows.num_absent:
        return steps
    every = {firing.step for firing in pair.target.firings}
    return every if rows.num_compared else steps | every & {firing.step + shift for firing in pair.baseline.firings}


def _extent(finding: Finding, is_limited: bool) -> str:
    """Return how many tokens differ, unless the affected rows were already named (``is_limited``)."""
    words = dict.fromkeys(("median_row", "scale", "channel", "element"), "most tokens") | {"p90_p98_row": "some tokens"}
    if is_limited or finding.test not in (*words, "max_row", "max_element"):
        return "worst in" if finding.worst is not None and finding.worst.position is not None else "worst at"
    if finding.worst is not None and finding.worst.position is None:
        return "worst at"
    return f"{words.get(finding.test, 'single tokens')}, worst in"
