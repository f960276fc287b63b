"""Folding: decide which findings get a row of their own; ranges of similar findings share a row."""

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, overload

from msgspec import Struct

from tapscope.comparator.facts import Place
from tapscope.comparator.report.answer import share
from tapscope.comparator.verdict.finding import Finding, Verdict
from tapscope.core import formatting

if TYPE_CHECKING:
    from tapscope.comparator.report.report import Report


_ALONE = {Verdict.ONLY_BASELINE: "only in baseline", Verdict.ONLY_TARGET: "only in target"}
STRETCH = " … "
"""Separator between the first and the last site of a range."""


class Row(Struct, frozen=True):
    """One row of the table."""

    verdict: Verdict
    cells: tuple[str, ...] = ()
    """Cells in the order of the table columns; empty for a row without columns."""
    note: str = ""
    """Text of a row without columns, for sites that only one run has."""


class _EveryRow(Sequence[Row]):
    """One row per finding, created on access, because there may be a million findings."""

    def __init__(self, findings: Sequence[Finding]) -> None:
        self._findings = findings

    def __len__(self) -> int:
        return len(self._findings)

    @overload
    def __getitem__(self, index: int) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...
    def __getitem__(self, index: int | slice) -> Row | Sequence[Row]:
        return _EveryRow(self._findings[index]) if isinstance(index, slice) else _row(self._findings[index])


def fold_rows(report: "Report", top: int | None) -> tuple[Sequence[Row], list[str]]:
    """Return (rows, sentences on hidden findings). If ``top`` is None, every finding has its own row.

    Otherwise, adjacent findings that pass share one row, and so do all sites that only one run has. Bad findings are
    limited to ``top``, producers before downstream ones.
    """
    if top is None:
        return _EveryRow(report.findings), []
    shown = _shown(report.findings, top)
    rows: list[Row] = []
    hidden = [f for f in report.findings if f.verdict.is_bad and id(f) not in shown]
    kept = [f for f in report.findings if not f.verdict.is_orphan and (not f.verdict.is_bad or id(f) in shown)]
    for is_bad, group in groupby(kept, key=lambda f: f.verdict.is_bad):
        members = list(group)
        if is_bad or len(members) == 1:
            rows += map(_row, members)
        else:
            rows.append(_stretch(members))
    for verdict in (Verdict.ONLY_BASELINE, Verdict.ONLY_TARGET):
        alone = [f for f in report.findings if f.verdict is verdict]
        rows += [_row(alone[0])] if len(alone) == 1 else [_orphans(verdict, alone)] if alone else []
    return _shorten(rows, top), _describe_hidden(hidden) + _cut(rows, top)


def _row(finding: Finding) -> Row:
    if not finding.verdict.is_orphan:
        return Row(finding.verdict, _cells(finding))
    side = finding.baseline or finding.target
    shape = formatting.shape(side.shape) if side and side.dtype else "value"
    return Row(finding.verdict, note=f"{finding.site}  {_ALONE[finding.verdict]}, {shape}")


def _orphans(verdict: Verdict, alone: Sequence[Finding]) -> Row:
    return Row(verdict, note=f"{len(alone):,} sites {_ALONE[verdict]}: {alone[0].site}{STRETCH}{alone[-1].site}")


def _shown(findings: Sequence[Finding], top: int) -> set[int]:
    bad = [f for f in findings if f.verdict.is_bad]
    bad.sort(key=lambda f: (f.role != "producer", f.order))
    return {id(f) for f in bad[:top]}


def _stretch(members: Sequence[Finding]) -> Row:
    verdict = next((f.verdict for f in members if f.verdict is Verdict.CLOSE), members[0].verdict)
    numbers = [f.metrics for f in members if f.metrics]
    ratio = max((f.ratio for f in members), default=0.0)
    return Row(
        verdict,
        (
            f"{members[0].site}{STRETCH}{members[-1].site}",
            str(verdict),
            formatting.plural(len(members), "site"),
            formatting.number(_largest(n.max_abs for n in numbers)) if numbers else "-",
            formatting.number(_largest(n.rel_l2 for n in numbers)) if numbers else "-",
            share(ratio) if verdict is Verdict.CLOSE else "-",
            "",
        ),
    )


def _largest(values: Iterable[float]) -> float:
    """Return the maximum; nan if any value is nan."""
    return max(values, key=lambda value: math.inf if math.isnan(value) else value)


def _shorten(rows: list[Row], top: int) -> list[Row]:
    """Return at most three times ``top`` rows: alternating ranges may be as numerous as sites."""
    limit = 3 * top
    if len(rows) <= limit:
        return rows
    bad = [i for i, row in enumerate(rows) if row.verdict.is_bad]
    centre = bad[0] if bad else 0
    start = max(0, min(centre - limit // 2, len(rows) - limit))
    return rows[start : start + limit]


def _cut(rows: list[Row], top: int) -> list[str]:
    cut = len(rows) - 3 * top
    return [f"{cut} more lines of sites that agree or are in one run only; --all lists every site"] if cut > 0 else []


def _describe_hidden(hidden: Sequence[Finding]) -> list[str]:
    if not hidden:
        return []
    downstream = sum(f.role == "downstream" for f in hidden)
    if all(f.verdict is Verdict.SHAPE for f in hidden):
        verb = "cannot be compared"
    else:
        verb = "differs" if len(hidden) == 1 else "differ"
    where = ", all downstream" if downstream == len(hidden) else f", {downstream:,} of them downstream"
    return [f"{len(hidden):,} more {verb}{where if downstream else ''}; --all lists them"]


def _format_place(place: Place) -> str:
    if place.position is None:
        return f"{place.text()} step {place.step}"
    return f"{formatting.middle(place.request or '', 12)}:{place.position} step {place.step}"


def _cells(finding: Finding) -> tuple[str, ...]:
    """Return the cells of one finding, in the order of the table header."""
    side = finding.target or finding.baseline
    numbers, worst = finding.metrics, finding.worst
    ratio = share(finding.ratio) if finding.floor > 0 else "-"
    where = "" if worst is None or finding.verdict is Verdict.SAME else _format_place(worst)
    return (
        finding.site,
        str(finding.verdict),
        formatting.shape(side.shape) if side else "-",
        formatting.number(numbers.max_abs if numbers else None),
        formatting.number(numbers.rel_l2 if numbers else None),
        ratio,
        where,
    )
