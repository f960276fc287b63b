"""Report: a line per case, and a summary."""

from collections import Counter
from collections.abc import Sequence

from benchmarks.verdict.outcome import CauseScore, Outcome, Score

_BUGS = (Score.NAMED, Score.ANCESTOR, Score.MISPLACED, Score.MISNAMED, Score.MISSED, Score.FAULTY)
_WORDS = {
    Score.NAMED: "named at the site",
    Score.ANCESTOR: "named at the nearest recorded ancestor",
    Score.MISPLACED: "named at another step, rank or token",
    Score.MISNAMED: "detected but misnamed",
    Score.MISSED: "missed",
    Score.FAULTY: "faulty cases",
    Score.CLEAN: "clean",
    Score.FLAGGED: "flagged",
}


def line(outcome: Outcome) -> str:
    """Format one line: score, name, expected and named module, error / floor, seconds."""
    case = outcome.case
    kind = case.visibility or "benign"
    text = f"{outcome.score.upper() if not outcome.score.is_good else outcome.score:<9} {kind:<7} {case.name:<42}"
    if case.is_bug:
        named = outcome.named or ("" if outcome.site else "none")
        text += f" expected {_expected(outcome):<34} named {_shown(named):<34}"
    elif outcome.named or outcome.site:
        text += f" named {_shown(outcome.named):<34}"
    text += f" {_ratio(outcome.ratio):>8} x floor"
    if outcome.others:
        text += f" +{outcome.others}"
    text += f" {outcome.seconds:6.1f} s"
    if outcome.cause_score is not CauseScore.UNASKED:
        text += f"  cause {_cause(outcome)}"
    if outcome.score is Score.MISPLACED:
        where = ", ".join(f"{name} {value}" for name, value in case.where.items())
        return f"{text}  expected {where}; named {outcome.place}"
    return text if outcome.score.is_good else f"{text}  {outcome.detail[:160]}".rstrip()


def score_lines(outcomes: Sequence[Outcome]) -> list[str]:
    """Return the summary lines: scores, causes, and the number of cases by framework and model."""
    lines = []
    for kind in ("strong", "subtle"):
        counts = Counter(o.score for o in outcomes if o.case.visibility == kind)
        if counts:
            said = ", ".join(f"{counts[s]} {_WORDS[s]}" for s in _BUGS if counts[s])
            lines.append(f"{kind} bugs: {counts.total()}: {said}")
    named = [o for o in outcomes if o.score in (Score.NAMED, Score.ANCESTOR)]
    if named:
        extra, many = sum(o.others for o in named), sum(o.others > 0 for o in named)
        lines.append(
            f"extra modules: {extra / len(named):.2f} per named bug ({len(named)} bugs, {many} with extra modules)"
        )
    lines += [_cause_line(kind, outcomes) for kind in ("strong", "subtle") if _scored(kind, outcomes)]
    counts = Counter(o.score for o in outcomes if not o.case.is_bug)
    if counts:
        said = ", ".join(f"{n} {_WORDS[s]}" for s, n in sorted(counts.items()))
        lines.append(f"benign changes: {counts.total()}: {said}")
    pairs = Counter(f"{o.case.baseline.framework} against {o.case.target.framework}" for o in outcomes)
    lines.append("cases run: " + ", ".join(f"{n} {pair}" for pair, n in pairs.most_common()))
    families = Counter(o.case.family for o in outcomes)
    lines.append("models: " + ", ".join(f"{n} {name}" for name, n in families.most_common()))
    files = len({o.case.path for o in outcomes})
    return [*lines, f"{len(outcomes)} cases of {files} files in {sum(o.seconds for o in outcomes):.0f} s"]


def _scored(kind: str, outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return the named bugs whose file has CAUSE."""
    return [o for o in outcomes if o.case.visibility == kind and o.cause_score is not CauseScore.UNASKED]


def _cause_line(kind: str, outcomes: Sequence[Outcome]) -> str:
    scored = _scored(kind, outcomes)
    counts = Counter(o.cause_score for o in scored)
    right = counts[CauseScore.RIGHT]
    return (
        f"causes of {len(scored)} named {kind} bugs: {right} right ({right / len(scored):.0%}), "
        f"{counts[CauseScore.WRONG]} wrong, {counts[CauseScore.NONE]} not stated"
    )


def _cause(outcome: Outcome) -> str:
    return f"WRONG: {outcome.cause[:160]}" if outcome.cause_score is CauseScore.WRONG else outcome.cause_score


def exit_code(outcomes: Sequence[Outcome]) -> int:
    """Return 1 if a strong bug is missed, a benign change is flagged, or a case is faulty; else 0."""
    bad = [o for o in outcomes if o.score in (Score.FLAGGED, Score.FAULTY)]
    bad += [o for o in outcomes if o.score is Score.MISSED and o.case.visibility == "strong"]
    return int(bool(bad))


def _expected(outcome: Outcome) -> str:
    """Return the first accepted module, or the named one if several are accepted."""
    wanted = outcome.case.expect
    if outcome.score in (Score.NAMED, Score.MISPLACED) and len(wanted) > 1:
        return _shown(outcome.named)
    return _shown(wanted[0]) + (" or ..." if len(wanted) > 1 else "")


def _shown(module: str) -> str:
    return module or "(root)"


def _ratio(ratio: float) -> str:
    return "-" if ratio != ratio else f"{ratio:.2g}" if ratio < 1000 else f"{ratio:.0e}"
