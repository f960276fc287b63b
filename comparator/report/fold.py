"""Fold: which findings get a row, and one line for every stretch that says the same."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from tapscope import text
from tapscope.comparator.finding import Finding, Verdict
from tapscope.comparator.report.answer import share

if TYPE_CHECKING:
    from tapscope.comparator.compare import Report


STRETCH = " … "
"""Between the first and the last site of a stretch."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table."""

    verdict: Verdict
    cells: tuple[str, ...]


def fold(report: "Report", top: int | None) -> tuple[list[Row], list[str]]:
    """(rows, sentences on what has none). With ``top`` None every finding has its own row.

    Else neighbours that pass, or that only one run has, become one row; of those that do not pass, producers come
    first and downstream ones are cut off after ``top``.
    """
    from tapscope.comparator.report.table import cells_of

    if top is None:
        return [Row(f.verdict, cells_of(f)) for f in report.findings], []
    shown = _shown(report.findings, top)
    rows: list[Row] = []
    hidden = [f for f in report.findings if f.verdict.is_bad and id(f) not in shown]
    kept = [f for f in report.findings if not f.verdict.is_bad or id(f) in shown]
    for kind, group in groupby(kept, key=_kind):
        members = list(group)
        if kind == "bad" or len(members) == 1:
            rows += [Row(f.verdict, cells_of(f)) for f in members]
        else:
            rows.append(_stretch(members))
    return _shorten(rows, top), _said(hidden) + _cut(rows, top)


def _shown(findings: Sequence[Finding], top: int) -> set[int]:
    bad = [f for f in findings if f.verdict.is_bad]
    bad.sort(key=lambda f: (f.role != "producer", f.order))
    return {id(f) for f in bad[:top]}


def _kind(finding: Finding) -> str:
    if finding.verdict.is_bad:
        return "bad"
    return str(finding.verdict) if finding.verdict.is_orphan else "passes"


def _stretch(members: Sequence[Finding]) -> Row:
    verdict = next((f.verdict for f in members if f.verdict is Verdict.CLOSE), members[0].verdict)
    numbers = [f.numbers for f in members if f.numbers]
    ratio = max((f.ratio for f in members), default=0.0)
    return Row(
        verdict,
        (
            f"{members[0].site}{STRETCH}{members[-1].site}",
            str(verdict),
            text.plural(len(members), "site"),
            text.number(max(n.max_abs for n in numbers)) if numbers else "-",
            text.number(max(n.rel_l2 for n in numbers)) if numbers else "-",
            share(ratio) if verdict is Verdict.CLOSE else "-",
            "",
        ),
    )


def _shorten(rows: list[Row], top: int) -> list[Row]:
    """At most three times ``top`` rows: alternating stretches can be as many as there are sites."""
    limit = 3 * top
    if len(rows) <= limit:
        return rows
    bad = [i for i, row in enumerate(rows) if row.verdict.is_bad]
    centre = bad[0] if bad else 0
    start = max(0, min(centre - limit // 2, len(rows) - limit))
    return rows[start : start + limit]


def _cut(rows: list[Row], top: int) -> list[str]:
    cut = len(rows) - 3 * top
    return [f"{cut} more lines of sites that agree or stand alone; --all lists every site"] if cut > 0 else []


def _said(hidden: Sequence[Finding]) -> list[str]:
    if not hidden:
        return []
    downstream = sum(f.role == "downstream" for f in hidden)
    verb = "differs" if len(hidden) == 1 else "differ"
    what = "all downstream" if downstream == len(hidden) else f"{downstream:,} of them downstream"
    return [f"{len(hidden):,} more {verb}, {what}; --all lists them"]
