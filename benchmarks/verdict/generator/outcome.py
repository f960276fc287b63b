"""Outcome of one generated case."""

import math
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from benchmarks.verdict.catalogue import Case
from benchmarks.verdict.generator.bug import Bug
from benchmarks.verdict.generator.causes import is_right
from benchmarks.verdict.generator.oracle import Observed
from benchmarks.verdict.generator.pairing import Pairing
from benchmarks.verdict.outcome import Outcome, Score, judged
from tapscope.comparator import Report


class Fate(StrEnum):
    """Score of a generated case."""

    NAMED = "named"
    """An observable bug that was named at its module (or the nearest recorded one)."""
    WRONG = "wrong"
    """An observable bug, but a different module was named."""
    MISSED = "missed"
    """An observable bug, but the report states that the runs agree."""
    TOLERATED = "tolerated"
    """A bug below rounding, and the report states that the runs agree."""
    UNDECIDABLE = "undecidable"
    """A bug near or below rounding, whatever the report states."""
    CLEAN = "clean"
    """A benign change, and the report states that the runs agree."""
    ALARM = "alarm"
    """A benign change that was reported."""
    LEFT_OUT = "left out"
    """The case could not be run, or is inconclusive."""

    @property
    def is_bad(self) -> bool:
        """Whether this is a failure of the tool, or an unusable case."""
        return self in (Fate.WRONG, Fate.MISSED, Fate.ALARM, Fate.LEFT_OUT)


@dataclass(frozen=True, slots=True)
class GeneratedOutcome:
    """The result of one generated case."""

    name: str
    fate: Fate
    bug: Bug | None = None
    seen: Observed | None = None
    named: str = ""
    """The named module."""
    place: str = ""
    ratio: float = math.nan
    """error / floor at the named site."""
    extra: int = 0
    """Number of further modules named."""
    is_right_step: bool = True
    cause: str = ""
    """The stated cause."""
    is_right_cause: bool = False
    detail: str = ""
    seconds: float = 0.0
    pairing: Pairing | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the object of one line of ``--json``."""
        fields = asdict(self) | {"type": "case", "fate": str(self.fate)}
        if self.pairing is not None:
            fields |= {"pair": self.pairing.name, "dtypes": self.pairing.dtypes, "family": self.pairing.model.family}
        return {name: _plain(value) for name, value in fields.items()}


def _plain(value: Any) -> Any:
    """Replace infinities by ``"inf"`` and NaN by null, which JSON cannot represent."""
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    if not isinstance(value, float) or math.isfinite(value):
        return value
    return None if math.isnan(value) else str(value)


def judge_benign(case: Case, report: Report | Exception, *, is_sound: bool) -> GeneratedOutcome:
    """Return the outcome of a benign change; left out if values overflow without a bug."""
    outcome = judged(case, report, 0.0)
    found = _base(outcome, Fate.CLEAN if outcome.score is Score.CLEAN else Fate.ALARM)
    return found if is_sound else replace(found, fate=Fate.LEFT_OUT, detail="values overflow without a bug")


def judge_bug(
    case: Case, bug: Bug, report: Report | Exception, seen: Observed, *, is_alarmed: bool
) -> GeneratedOutcome:
    """Return the outcome of a bug, given the oracle's observation.

    ``is_alarmed`` means that the bug-free target is reported, too.
    """
    outcome = judged(case, report, seen.here)
    found = replace(_base(outcome, _fate(outcome, seen)), bug=bug, seen=seen)
    if is_alarmed:
        return replace(found, fate=Fate.UNDECIDABLE, detail="the target without the bug is reported, too")
    if seen.first and not seen.is_expected:
        return replace(found, fate=Fate.LEFT_OUT, detail=f"the bug changes {seen.first} first")
    if found.fate is not Fate.NAMED or isinstance(report, Exception) or report.first_divergence is None:
        return found
    first = report.first_divergence
    text = outcome.cause
    right_step = first.step in seen.steps
    return replace(found, is_right_step=right_step, cause=text, is_right_cause=bool(text) and is_right(bug, text))


def _fate(outcome: Outcome, seen: Observed) -> Fate:
    is_silent = outcome.score is Score.MISSED
    if seen.is_observable:
        named = outcome.score in (Score.NAMED, Score.ANCESTOR, Score.MISPLACED)
        return Fate.NAMED if named else Fate.MISSED if is_silent else Fate.WRONG
    return Fate.TOLERATED if seen.is_invisible and is_silent else Fate.UNDECIDABLE


def _base(outcome: Outcome, fate: Fate) -> GeneratedOutcome:
    return GeneratedOutcome(
        outcome.case.name,
        fate,
        named=outcome.named,
        place=outcome.place,
        ratio=outcome.ratio,
        extra=outcome.others,
        detail=outcome.detail,
    )


def not_run(case: Case, bug: Bug | None, error: str) -> GeneratedOutcome:
    """Return the outcome of a case that could not be run."""
    return GeneratedOutcome(
        case.name, Fate.LEFT_OUT, bug=bug, detail=error.strip().splitlines()[-1] if error.strip() else error
    )
