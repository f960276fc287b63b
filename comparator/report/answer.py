"""Answer: the last three lines of a report: what differs and by how much, where, and why or what to do next."""

import shlex
from typing import TYPE_CHECKING

from tapscope import text
from tapscope.comparator.report.again import with_dims_that_fit
from tapscope.comparator.report.flags import flags
from tapscope.comparator.verdicts.coverage import ITSELF, UNLIKE
from tapscope.comparator.verdicts.finding import Finding, Verdict
from tapscope.comparator.verdicts.localise import Divergence
from tapscope.site import compact_ranges, layer_of

if TYPE_CHECKING:
    from tapscope.comparator.report.outcome import Report

_ALWAYS = (Verdict.SAME, Verdict.CLOSE, Verdict.DIFFERS)
_WORDS = {
    Verdict.SHAPE: "not comparable",
    Verdict.ONLY_BASELINE: "only in baseline",
    Verdict.ONLY_TARGET: "only in target",
}
_SAID = ("replicas", "tolerance", "rule", "permuted", "absent", "grid", "function")
"""Tests of which the first note says what came of them."""
LABEL = 10
"""Columns of the word that a line begins with."""


def answer(report: "Report") -> list[str]:
    """Three lines: ``what``, ``where``, and ``why`` with the next command, or ``next`` alone."""
    return [_labelled("what", _what(report)), _labelled("where", _where(report)), _last(report)]


def counts(report: "Report") -> str:
    """How many findings have which verdict."""
    found = {v: sum(f.verdict is v for f in report.findings) for v in Verdict}
    return " · ".join(f"{n:,} {_WORDS.get(v, v)}" for v, n in found.items() if n or v in _ALWAYS)


def share(ratio: float) -> str:
    """error / floor: ``0.45``, ``2.6``, ``130``; the exponent only beyond thousands."""
    if 0.01 <= ratio < 9.95:
        return f"{ratio:.2f}" if ratio < 1 else f"{ratio:.1f}"
    return f"{ratio:.0f}" if 9.95 <= ratio < 9999.5 else text.number(ratio)


def _labelled(label: str, sentence: str) -> str:
    return f"{label:<{LABEL}}{sentence}"


def _what(report: "Report") -> str:
    divergence = report.first_divergence
    if divergence is not None:
        return _diverges(report, divergence)
    odd = _odd(report)
    if odd is not None:
        more = _more(sum(f.verdict.is_bad for f in report.findings) - 1, "site")
        said = f"cannot be compared: {odd.site}: {odd.notes[0] if odd.notes else odd.verdict}{more}"
        return "; ".join([said, *_absent(report)])
    partial = report.coverage.partial
    if partial:
        allowed = " (allowed)" if report.options.allow_partial else ""
        reasons = f"{partial[0]}{_more(len(partial) - 1, 'reason')}"
        return f"agrees as far as it goes, but on partial data{allowed}: {reasons}"
    if ITSELF in report.coverage.warnings:
        return f"agrees with itself: {ITSELF}"
    return f"agrees{_up_to_fork(report)}: {_how_close(report)}"


def _odd(report: "Report") -> Finding | None:
    return next((f for f in report.findings if f.verdict.is_bad), None)


def _absent(report: "Report") -> list[str]:
    """Whose ranks never came, which explains what cannot be put together."""
    sides = zip((report.baseline, report.target), report.coverage.ledgers, strict=True)
    return [
        f"{side.name} lacks {'rank' if len(ranks) == 1 else 'ranks'} {compact_ranges(ranks)}"
        for side, ledger in sides
        if (ranks := ledger.missing_ranks)
    ]


def _up_to_fork(report: "Report") -> str:
    """Greedy runs may part in their tokens: what comes after was computed from other tokens and is not compared."""
    forks, unseen = report.coverage.forks, sum(report.coverage.rows_forked)
    if not forks or not unseen:
        return ""
    first = min(forks, key=lambda fork: fork.position)
    where = f"position {first.position} of request {first.request}"
    return f" up to where the tokens part ({where}; {unseen:,} later rows not compared)"


def _more(count: int, noun: str) -> str:
    return f", and {text.plural(count, f'more {noun}')}" if count > 0 else ""


def _how_close(report: "Report") -> str:
    closest = report.closest_call
    if closest is None:
        if any(f.verdict is Verdict.CLOSE for f in report.findings):
            by_rule = any(f.test == "rule" for f in report.findings)
            return "everything obeys the rules" if by_rule else "everything within the tolerance"
        return "every compared value is equal"
    return (
        f"the largest error is {share(closest.ratio)} of what rounding explains, at {closest.site} ({_amount(closest)})"
    )


def _diverges(report: "Report", divergence: Divergence) -> str:
    finding = divergence.finding
    name = " or ".join(module or "(root)" for module in (divergence.module, *divergence.others))
    port = divergence.site.rpartition(":")[2]
    seen = port if divergence.site.rpartition(":")[0] == divergence.module else f"seen at {divergence.site}"
    verb = "is not finite" if finding.verdict is Verdict.NONFINITE else "differs"
    parts = [f"{name} ({seen}) {'has no gradient' if finding.test == 'absent' else verb}: {_size(finding)}"]
    parts.append(divergence.evidence if divergence.is_certain else f"not certain: {divergence.evidence}")
    if shared := _shared(report, divergence):
        parts.append(shared)
    elif len(report.divergences) > 1:
        num = len(report.divergences) - 1
        others = f"{text.plural(num, 'module')} more on {'its' if num == 1 else 'their'} own account"
        parts.append(f"{others}, next {report.divergences[1].module or '(root)'}")
    parts += [warning for warning in report.coverage.warnings if warning.startswith(UNLIKE)]
    if report.coverage.partial:
        parts.append("on partial data")
    return "; ".join(parts)


def _shared(report: "Report", divergence: Divergence) -> str:
    """Where most parameters are off by themselves: no module did that to all of them."""
    if not _is_parameter(divergence.site):
        return ""
    parameters = [f for f in report.findings if _is_parameter(f.site) and f.baseline and f.target]
    own = sum(_is_parameter(d.site) for d in report.divergences)
    if own < 2 or 2 * own <= len(parameters):
        return ""
    why = "it is what they share (the optimizer, the checkpoint) rather than one module's doing"
    return f"so are {own - 1:,} more of {len(parameters):,} parameters: {why}"


def _is_parameter(site: str) -> bool:
    port = site.rpartition(":")[2]
    return port.startswith("param[") and not port.endswith(".grad")


def _size(finding: Finding) -> str:
    if finding.floor > 0.0 and finding.test not in (*_SAID, "exact", "nonfinite"):
        return f"{share(finding.ratio)} × the floor ({_amount(finding)})"
    return _amount(finding)


def _amount(finding: Finding) -> str:
    if finding.test == "nonfinite":
        return f"{int(finding.error):,} values not finite that the other side does not have there"
    if finding.test == "exact":
        said = f"{int(finding.error):,} rows of integers unequal"
        return f"{said}: {finding.notes[0]}" if finding.notes else said
    if finding.test in _SAID:
        return finding.notes[0] if finding.notes else f"max |Δ| {text.number(finding.error)}"
    if finding.test == "gain":
        return f"a common scale off by {finding.error:.1%}, rounding explains {finding.floor:.2%}"
    if finding.test == "channel":
        return f"the scale of one channel off by {finding.error:.1%}, rounding explains {finding.floor:.2%}"
    what = "largest element off by" if finding.test in ("element", "peak") else "error"
    return f"{what} {text.number(finding.error)}, rounding explains {text.number(finding.floor)}"


def _where(report: "Report") -> str:
    divergence = report.first_divergence
    if divergence is None:
        return _compared(report)
    parts = [f"step {divergence.step}"]
    layer = layer_of(divergence.module) if divergence.module else None
    parts += [f"layer {layer}"] if layer is not None else []
    if divergence.place is None:
        return ", ".join(parts)
    parts += [f"rank {divergence.place.rank}"] if divergence.place.rank is not None else []
    why = divergence.explanation
    if why is not None and why.extent and not why.is_clear:
        parts.append(f"only {why.extent}")
    place = divergence.place
    column = f", column {place.index[-1]}" if place.position is not None and place.index else ""
    return f"{', '.join(parts)}; {_extent(divergence.finding)} {place.text()}{column}"


def _compared(report: "Report") -> str:
    """What the verdict is about."""
    coverage, steps = report.coverage, sorted({s.step for f in report.findings for s in f.steps})
    rows = f", {text.plural(coverage.rows_aligned, 'token row')}" if coverage.rows_known else ""
    seen = f", steps {compact_ranges(steps)}" if len(steps) > 1 else ""
    return f"{text.plural(coverage.sites_matched, 'site')}{rows}{seen}"


def _extent(finding: Finding) -> str:
    words = dict.fromkeys(("typical", "gain", "channel", "element"), "most tokens") | {"tail": "some tokens"}
    if finding.test not in (*words, "row", "peak"):
        return "worst in" if finding.worst is not None and finding.worst.position is not None else "worst at"
    if finding.worst is not None and finding.worst.position is None:
        return "worst at"
    return f"{words.get(finding.test, 'single tokens')}, worst in"


def _last(report: "Report") -> str:
    divergence = report.first_divergence
    why = divergence.explanation if divergence is not None else None
    if why is not None and why.is_clear:
        return _labelled("why", f"{why.text}; next: {_next(report)}")
    return _labelled("next", _next(report))


def _next(report: "Report") -> str:
    divergence = report.first_divergence
    if divergence is not None:
        side, run = divergence.finding.target, report.target
        if side is None:  # of a gradient that the target lacks
            side, run = divergence.finding.baseline, report.baseline
        site = side.site if side else divergence.site
        return f"tapscope show {shlex.quote(run.path)} {shlex.quote(site)} --step {divergence.step}"
    if again := with_dims_that_fit(report):
        return again
    if _odd(report) is not None or report.coverage.partial:
        return f"tapscope info {shlex.quote(report.target.path)}"
    return shlex.join(["tapscope", "view", report.baseline.path, report.target.path, *flags(report.options)])
