"""Answer: the last three lines of a report: the counts, the verdict, and the next command."""

import shlex
from typing import TYPE_CHECKING

from tapscope import text
from tapscope.comparator.finding import Finding, Verdict
from tapscope.comparator.localise import Divergence

if TYPE_CHECKING:
    from tapscope.comparator.compare import Report

_ALWAYS = (Verdict.SAME, Verdict.CLOSE, Verdict.DIFFERS)
_WORDS = {
    Verdict.SHAPE: "not comparable",
    Verdict.ONLY_BASELINE: "only in baseline",
    Verdict.ONLY_TARGET: "only in target",
}


def answer(report: "Report") -> list[str]:
    """Three lines."""
    return [_counts(report), _verdict(report), f"next: {_next(report)}"]


def share(ratio: float) -> str:
    """error / floor: ``0.45``, ``2.6``, ``130``; the exponent only beyond thousands."""
    if 0.01 <= ratio < 9.95:
        return f"{ratio:.2f}" if ratio < 1 else f"{ratio:.1f}"
    return f"{ratio:.0f}" if 9.95 <= ratio < 9999.5 else text.number(ratio)


def _counts(report: "Report") -> str:
    counts = {v: sum(f.verdict is v for f in report.findings) for v in Verdict}
    return " · ".join(f"{n:,} {_WORDS.get(v, v)}" for v, n in counts.items() if n or v in _ALWAYS)


def _verdict(report: "Report") -> str:
    divergence = report.first_divergence
    if divergence is not None:
        return _diverges(report, divergence)
    odd = next((f for f in report.findings if f.verdict.is_bad), None)
    if odd is not None:
        return f"cannot be compared: {odd.site}: {odd.notes[0] if odd.notes else odd.verdict}"
    partial = report.coverage.partial
    if partial:
        allowed = " (allowed)" if report.options.allow_partial else ""
        return f"agrees as far as it goes, but on partial data{allowed}: {partial[0]}{_more(len(partial) - 1)}"
    return f"agrees{_up_to_fork(report)}: {_how_close(report)}"


def _up_to_fork(report: "Report") -> str:
    """Greedy runs may part in their tokens: what comes after was computed from other tokens and is not compared."""
    forks, unseen = report.coverage.forks, sum(report.coverage.rows_forked)
    if not forks or not unseen:
        return ""
    first = min(forks, key=lambda fork: fork.position)
    where = f"position {first.position} of request {first.request}"
    return f" up to where the tokens part ({where}; {unseen:,} later rows not compared)"


def _more(count: int) -> str:
    return f", and {count} more" if count > 0 else ""


def _how_close(report: "Report") -> str:
    closest = report.closest_call
    if closest is None:
        if any(f.verdict is Verdict.CLOSE for f in report.findings):
            return "everything within the tolerance"
        return "every compared value is equal"
    return (
        f"the largest error is {share(closest.ratio)} of what rounding explains, at {closest.site} ({_amount(closest)})"
    )


def _diverges(report: "Report", divergence: Divergence) -> str:
    finding = divergence.finding
    parts = [f"diverges at {divergence.module or '(root)'}, step {divergence.step}"]
    if divergence.site.rpartition(":")[0] != divergence.module:
        parts[0] = f"diverges at {divergence.module or '(root)'} (seen at {divergence.site}), step {divergence.step}"
    if divergence.place is not None:
        rank = f", rank {divergence.place.rank}" if divergence.place.rank is not None else ""
        parts.append(f"{_extent(finding)} {divergence.place.text()}{rank}")
    parts += [_amount(finding), divergence.evidence]
    if len(report.divergences) > 1:
        others = text.plural(len(report.divergences) - 1, "module")
        parts.append(f"{others} more on their own account, next {report.divergences[1].module}")
    if report.coverage.partial:
        parts.append("on partial data")
    return "; ".join(parts)


def _extent(finding: Finding) -> str:
    words = {"typical": "most tokens", "gain": "most tokens", "element": "most tokens", "tail": "some tokens"}
    if finding.test not in (*words, "row"):
        return "worst in" if finding.worst is not None and finding.worst.position is not None else "worst at"
    if finding.worst is not None and finding.worst.position is None:
        return "worst at"
    return f"{words.get(finding.test, 'single tokens')}, worst in"


def _amount(finding: Finding) -> str:
    if finding.test == "nonfinite":
        return f"{int(finding.error):,} values not finite on one side only"
    if finding.test == "exact":
        return f"{int(finding.error):,} rows of integers unequal"
    if finding.test in ("replicas", "tolerance", "permuted"):
        return finding.notes[0] if finding.notes else f"max |Δ| {text.number(finding.error)}"
    if finding.test == "gain":
        return f"scaled by {finding.error:.1%}, rounding explains {finding.floor:.2%}"
    what = "largest element off by" if finding.test == "element" else "error"
    return f"{what} {text.number(finding.error)}, rounding explains {text.number(finding.floor)}"


def _next(report: "Report") -> str:
    divergence = report.first_divergence
    if divergence is not None:
        side = divergence.finding.target
        site = side.site if side else divergence.site
        return f"tapscope show {shlex.quote(report.target.path)} {shlex.quote(site)} --step {divergence.step}"
    odd = next((f for f in report.findings if f.verdict.is_bad), None)
    if odd is not None or report.coverage.partial:
        return f"tapscope info {shlex.quote(report.target.path)}"
    return f"tapscope view {shlex.quote(report.target.path)}"
