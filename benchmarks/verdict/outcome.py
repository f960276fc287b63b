"""Outcome: the result and score of one case."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from benchmarks.verdict.catalogue import Case
from tapscope.comparator import Divergence, Report
from tapscope.comparator.report.answer import cause
from tapscope.core.site import Glob


class Score(StrEnum):
    """Score of a case."""

    NAMED = "named"
    """A bug that was named at its site."""
    ANCESTOR = "ancestor"
    """A bug whose site was not recorded on both sides, named at the nearest recorded enclosing module."""
    MISNAMED = "misnamed"
    """A bug that was detected, but a different module was named."""
    MISPLACED = "misplaced"
    """The module is correct, but the step, rank, request or position is not."""
    MISSED = "missed"
    """A bug, but the report states that the runs agree."""
    FAULTY = "faulty"
    """An invalid case: its patch changes no tensor, or it cannot be run."""
    CLEAN = "clean"
    """A benign change, and the report states that the runs agree."""
    FLAGGED = "flagged"
    """A benign change that was reported."""

    @property
    def is_good(self) -> bool:
        """Whether the score is the expected result."""
        return self in (Score.NAMED, Score.ANCESTOR, Score.CLEAN)


class CauseScore(StrEnum):
    """Score of the cause stated for a named bug."""

    UNASKED = ""
    """Not scored: the case is not a named bug, or its file has no CAUSE."""
    RIGHT = "right"
    WRONG = "wrong"
    """The stated cause is not accepted by CAUSE."""
    NONE = "none"
    """No cause was stated."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one case."""

    case: Case
    score: Score
    named: str = ""
    """The named module."""
    site: str = ""
    """The site of the divergence."""
    place: str = ""
    """The named step, rank, request and position."""
    ratio: float = math.nan
    """error / floor at the named site; of the largest ratio if no module was named."""
    others: int = 0
    """Number of further modules named."""
    effect: float = 0.0
    """Largest relative L2 change due to the patch at any site."""
    detail: str = ""
    """Evidence of the finding, or the reason for its absence."""
    cause: str = ""
    """The stated cause."""
    cause_score: CauseScore = CauseScore.UNASKED
    seconds: float = 0.0

    def timed(self, seconds: float) -> "Outcome":
        """Return the outcome with its duration."""
        return replace(self, seconds=seconds)


def failed(case: Case, error: Exception) -> Outcome:
    """Return the outcome of a case that could not be run."""
    lines = str(error).strip().splitlines() or [""]  # the last line of a rank's traceback is the error
    detail = f"{type(error).__name__}: {lines[-1].strip() if 'Traceback' in lines[0] else lines[0]}"
    return Outcome(case, Score.FAULTY, detail=detail)


def judged(case: Case, report: Report | Exception, effect: float) -> Outcome:
    """Return the outcome of a comparison."""
    if isinstance(report, Exception):
        score = Score.MISNAMED if case.is_bug else Score.FLAGGED
        return Outcome(case, score, effect=effect, detail=f"{type(report).__name__}: {report}")
    first = report.first_divergence
    if first is None:
        call = report.max_ratio_finding
        score, detail = _unnamed(case, report)
        return Outcome(case, score, ratio=call.ratio if call else 0.0, effect=effect, detail=detail)
    score = _score(case, report, first) if case.is_bug else Score.FLAGGED
    others = len(report.divergences) - 1
    named = Outcome(case, score, first.module, first.site, _place_text(first))
    stated = cause(first)
    return replace(
        named,
        ratio=first.finding.ratio,
        others=others,
        effect=effect,
        detail=first.evidence,
        cause=stated,
        cause_score=_cause_score(case, score, stated),
    )


def _cause_score(case: Case, score: Score, stated: str) -> CauseScore:
    if not case.cause or score not in (Score.NAMED, Score.ANCESTOR):
        return CauseScore.UNASKED
    if not stated:
        return CauseScore.NONE
    accepted = any(re.search(expression, stated, re.IGNORECASE) for expression in case.cause)
    return CauseScore.RIGHT if accepted else CauseScore.WRONG


def _unnamed(case: Case, report: Report) -> tuple[Score, str]:
    odd = next((f for f in report.findings if f.verdict.is_bad), None)
    detail = f"{odd.site} {odd.verdict}: {'; '.join(odd.notes)}" if odd else "; ".join(report.coverage.partial)
    if not case.is_bug:
        return (Score.FLAGGED if report.exit_code else Score.CLEAN), detail
    return (Score.MISNAMED if report.exit_code else Score.MISSED), detail


def _score(case: Case, report: Report, first: Divergence) -> Score:
    score = Score.NAMED
    if not any(_fits(glob, first) for glob in case.expect):
        recorded = {f.site.rpartition(":")[0] for f in report.findings if f.baseline and f.target}
        if first.module not in {_nearest(glob, recorded) for glob in case.expect}:
            return Score.MISNAMED
        score = Score.ANCESTOR
    return score if _place_fits(case, first) else Score.MISPLACED


def _fits(glob: str, first: Divergence) -> bool:
    if ":" in glob:
        return Glob(glob).matches(first.site)
    return first.module == glob or (bool(glob) and Glob(glob).matches(first.module))


def _nearest(glob: str, recorded: set[str]) -> str | None:
    """Return the nearest recorded ancestor of the expected module; None if that module was recorded."""
    path = glob.partition(":")[0]
    if _is_recorded(path, recorded):
        return None
    while path and not _is_recorded(path, recorded):
        path = path.rpartition(".")[0]
    return path


def _is_recorded(path: str, recorded: set[str]) -> bool:
    return path in recorded or (bool(path) and any(Glob(path).matches(one) for one in recorded if one))


def _place_text(first: Divergence) -> str:
    if first.place is None:
        return f"step {first.step}"
    rank = "" if first.place.rank is None else f", rank {first.place.rank}"
    return f"step {first.step}{rank}, {first.place.text()}"


def _place_fits(case: Case, first: Divergence) -> bool:
    found = {"step": first.step}
    if first.place is not None:
        found |= {name: getattr(first.place, name) for name in ("rank", "request", "position")}
    return all(found.get(name) in (_several(value)) for name, value in case.where.items())


def _several(value: object) -> Sequence[object]:
    return value if isinstance(value, list | tuple) else (value,)
