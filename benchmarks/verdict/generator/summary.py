"""Summary: a line per generated case, and a table of rates."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from benchmarks.verdict.generator.outcome import Fate, GeneratedOutcome

_FATES = (Fate.NAMED, Fate.WRONG, Fate.MISSED, Fate.TOLERATED, Fate.UNDECIDABLE, Fate.CLEAN, Fate.ALARM, Fate.LEFT_OUT)
_HEAD = ("class", *map(str, _FATES), "rate", "extra", "cause", "wrong cause", "no cause", "other step")


def line(outcome: GeneratedOutcome) -> str:
    """Format one line: outcome, name, pairing, bug, named module, cause."""
    fate = outcome.fate.upper() if outcome.fate.is_bad else outcome.fate
    pair = outcome.pairing
    text = f"{fate:<12} {outcome.name:<14} "
    text += f"{pair.model.family:<11} {pair.name:<23} {pair.dtypes:<18}" if pair else ""
    if outcome.bug is not None:
        text += f" {outcome.bug.description}"
        text += f" -> {outcome.named or 'none'}"
        text += f" ({outcome.ratio:.2g} x floor" + (f", {outcome.seen.here:.2g} x rounding)" if outcome.seen else ")")
        text += f" +{outcome.extra}" if outcome.extra else ""
    if outcome.fate is Fate.NAMED:
        return text + (f"  why: {outcome.cause}" if outcome.cause else "")
    return text if not outcome.fate.is_bad else f"{text}  {outcome.detail[:200]}"


def table(cases: Sequence[GeneratedOutcome]) -> list[str]:
    """Return counts and rates: overall, and by operation, tensor, pairing, dtypes and size of the effect."""
    rows = [_HEAD, _row("all", cases)]
    for title, key in _CLASSES:
        groups: dict[str, list[GeneratedOutcome]] = {}
        for case in cases:
            groups.setdefault(key(case), []).append(case)
        rows.append((f"by {title}", *[""] * (len(_HEAD) - 1)))
        rows += [_row(f"  {name}", groups[name]) for name in sorted(groups) if name]
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEAD))]
    return [
        "  ".join(_cell(cell, width, i) for i, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]


def _cell(text: str, width: int, column: int) -> str:
    return text.rjust(width) if column else text.ljust(width)


def _row(name: str, cases: Sequence[GeneratedOutcome]) -> tuple[str, ...]:
    counts = Counter(case.fate for case in cases)
    observable = sum(counts[fate] for fate in (Fate.NAMED, Fate.WRONG, Fate.MISSED))
    named = [case for case in cases if case.fate is Fate.NAMED]
    right = sum(bool(case.cause) and case.is_right_cause for case in named)
    stated = sum(bool(case.cause) for case in named)
    rate = f"{counts[Fate.NAMED] / observable:.0%}" if observable else ""
    extra = f"{sum(case.extra for case in named) / len(named):.2f}" if named else ""
    causes = (right, stated - right, len(named) - stated, sum(not case.is_right_step for case in named))
    return (name, *(str(counts[fate] or "") for fate in _FATES), rate, extra, *(str(count or "") for count in causes))


def _operation(case: GeneratedOutcome) -> str:
    if case.bug is None:
        return ""
    return case.bug.damage.op if case.bug.damage else case.bug.kind


def _visibility(case: GeneratedOutcome) -> str:
    if case.seen is None or not case.seen.is_observable:
        return ""
    return next(
        (name for limit, name in ((30, "10 to 30 x"), (100, "30 to 100 x")) if case.seen.here < limit), "over 100 x"
    )


_CLASSES: tuple[tuple[str, Callable[[GeneratedOutcome], str]], ...] = (
    ("operation", _operation),
    ("where", lambda case: case.bug.kind if case.bug else ""),
    ("pairing", lambda case: case.pairing.name if case.pairing else ""),
    ("dtypes", lambda case: case.pairing.dtypes if case.pairing else ""),
    ("effect / rounding", _visibility),
)


def summary(cases: Sequence[GeneratedOutcome]) -> Iterator[str]:
    """Yield the table and a legend."""
    yield from table(cases)
    yield ""
    seconds = sum(case.seconds for case in cases)
    yield "rate: named bugs / observable bugs; extra: further modules per named bug; causes: of the named bugs"
    yield f"{len(cases)} cases, {seconds:.0f} s in total"


def exit_code(cases: Sequence[GeneratedOutcome]) -> int:
    """Return 1 if an observable bug is missed or misnamed, or a benign change is reported; else 0."""
    return int(any(case.fate in (Fate.WRONG, Fate.MISSED, Fate.ALARM) for case in cases))
