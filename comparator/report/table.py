"""Table: a report for people. Glyph and word carry the meaning, colour only repeats it; the last three lines are the
answer."""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from tapscope import text
from tapscope.comparator.facts import Place
from tapscope.comparator.report.answer import answer, counts, share
from tapscope.comparator.report.details import details
from tapscope.comparator.report.fold import STRETCH, Row, fold
from tapscope.comparator.verdicts.finding import Finding, Verdict

if TYPE_CHECKING:
    from tapscope.comparator.report.outcome import Header, Report

STYLES = {
    Verdict.SAME: "dim",
    Verdict.CLOSE: "dim",
    Verdict.DIFFERS: "bold orange1",
    Verdict.SHAPE: "bold orange1",
    Verdict.NONFINITE: "bold orange1",
    Verdict.ONLY_BASELINE: "cyan",
    Verdict.ONLY_TARGET: "cyan",
}
_HEADS = ("site", "verdict", "shape", "max |Δ|", "rel l2", "err/floor", "worst req:pos")
_SHAPE, _WORST, _NUMBERS = 2, 6, (3, 4, 5)
_MIN_SITE, _STRETCH = 16, 60
_NARROW = dict.fromkeys(map(ord, "…×Δ·"))
"""What our own texts have beyond ASCII: one column each."""
TOP = 12
"""Rows of the table, when nobody asks for more."""


class Line(NamedTuple):
    """One line of the report; rich's own would have to be imported where nobody sees a colour."""

    plain: str
    style: str = ""
    """As rich has it."""


def render(report: "Report", *, width: int = 100, top: int | None = TOP) -> Iterator[Line]:
    """The lines of the report for a screen of ``width`` columns; ``top`` rows of findings, None for every one."""
    yield from _headers(report)
    yield Line("")
    rows, hidden = fold(report, top)
    yield from _table(rows, width)
    yield from map(Line, _unlike(report.findings, top))
    for line in hidden:
        yield Line(f"   … {line}")
    yield Line("")
    yield from map(Line, details(report.findings, top))
    yield from _ending(report, top)


def account(report: "Report") -> Iterator[Line]:
    """The report without its findings: both runs, what was covered, assumed and missing, and the answer."""
    yield from _headers(report)
    yield Line("")
    yield from _ending(report, None)


def _ending(report: "Report", top: int | None) -> Iterator[Line]:
    yield from _coverage(report, top)
    yield Line(f"verdicts  {counts(report)}")
    yield from map(Line, answer(report))


def _headers(report: "Report") -> Iterator[Line]:
    cells = [_header(which, side) for which, side in (("baseline", report.baseline), ("target", report.target))]
    widths = [max(_cells(row[i]) for row in cells) for i in range(len(cells[0]))]
    for row in cells:
        yield Line("  ".join(cell + " " * (w - _cells(cell)) for cell, w in zip(row, widths, strict=True)).rstrip())


def _header(which: str, header: "Header") -> list[str]:
    mesh = " ".join(f"{axis}{size}" for axis, size in header.mesh.items() if size > 1) or "1 rank"
    state = "still open" if header.is_open else ""
    facts = [header.model or "-", header.framework or "-", header.precision, mesh]
    sizes = [text.plural(header.steps, "step"), text.plural(header.records, "record")]
    return [which, header.name, *facts, *sizes, state]


def _unlike(findings: Sequence[Finding], top: int | None) -> Iterator[str]:
    """Why sites cannot be compared, each reason once."""
    reasons: dict[str, list[str]] = {}
    for finding in findings:
        if finding.verdict is Verdict.SHAPE:
            reasons.setdefault(finding.notes[0] if finding.notes else "cannot be compared", []).append(finding.site)
    for reason, sites in list(reasons.items())[: top or None]:
        more = f" and {text.plural(len(sites) - 1, 'more site')}" if len(sites) > 1 else ""
        yield f"# {sites[0]}{more}: {reason}"


def _cells(shown: str) -> int:
    """Columns that a text takes on a screen."""
    if shown.isascii() or shown.translate(_NARROW).isascii():
        return len(shown)
    from rich.cells import cell_len  # its tables take longer to load than all else here

    return cell_len(shown)


def _table(rows: Sequence[Row], width: int) -> Iterator[Line]:
    # Numbers are never shortened: on a narrow screen columns go, then the site gives way, in its middle.
    kept = [i for i in range(len(_HEADS)) if not (i == _SHAPE and width < 96) and not (i == _WORST and width < 76)]
    widths = [_cells(_HEADS[i]) for i in kept]
    for row in rows:
        if row.cells:
            widths = [max(known, _room(row.cells[i])) for known, i in zip(widths, kept, strict=True)]
    rest = sum(widths[1:]) + 2 * len(widths)
    widths[0] = max(min(widths[0], width - rest), min(widths[0], _MIN_SITE))
    numeric = [i in _NUMBERS for i in kept]
    yield Line(_line("  ", [_HEADS[i] for i in kept], widths, numeric), style="bold")
    yield Line("─" * min(width, sum(widths) + 2 * len(widths)))
    for row in rows:
        lead = f"{row.verdict.glyph} "
        note = text.middle(row.note, max(width - 2, _MIN_SITE))
        line = _line(lead, [row.cells[i] for i in kept], widths, numeric) if row.cells else lead + note
        yield Line(line, style=STYLES[row.verdict])


def _room(cell: str) -> int:
    """Columns that a cell asks for; a stretch, of which nobody searches the ends, gives way to the other sites."""
    return min(_cells(cell), _STRETCH) if STRETCH in cell else _cells(cell)


def _line(lead: str, cells: Sequence[str], widths: list[int], numeric: list[bool]) -> str:
    shown = [_site(cells[0], widths[0]), *cells[1:]]
    padded = []
    for cell, width, right in zip(shown, widths, numeric, strict=True):
        space = " " * (width - _cells(cell))
        padded.append(space + cell if right else cell + space)
    return (lead + "  ".join(padded)).rstrip()


def _site(site: str, width: int) -> str:
    """A site, or the two ends of a stretch, each losing its own middle."""
    first, dots, last = site.partition(STRETCH)
    if not dots or _cells(site) <= width:
        return text.site(site, width)
    room = width - len(STRETCH)
    half = max(room - _cells(last), room // 2)
    shown = text.site(first, half)
    return shown + STRETCH + text.site(last, room - _cells(shown))


def _coverage(report: "Report", top: int | None) -> Iterator[Line]:
    coverage = report.coverage
    sites = f"{text.plural(coverage.sites_matched, 'site')} matched"
    alone = f"{coverage.sites_only_baseline:,} only in baseline, {coverage.sites_only_target:,} only in target"
    rows = ""
    if coverage.rows_known:
        rows = f" · rows: {coverage.rows_aligned:,} aligned, {max(coverage.rows_forked):,} forked, "
        rows += f"{sum(coverage.rows_unaligned):,} unaligned"
        again = sum(coverage.rows_again)
        rows += f", {again:,} computed again by one run" if again else ""
        superseded = sum(coverage.rows_superseded)
        rows += f", {superseded:,} of rejected drafts" if superseded else ""
    yield Line(f"coverage  {sites} ({alone}){rows}")
    yield Line(f"matched   {_matched(report)}")
    yield Line(f"judged    {_judged(report)}")
    for fork in coverage.forks[:4]:
        tokens = f"token {fork.baseline_token} against {fork.target_token}"
        yield Line(f"fork      request {fork.request} at position {fork.position}: {tokens}; later rows not compared")
    if len(coverage.forks) > 4:
        yield Line(f"fork      {len(coverage.forks) - 4} more requests; --json lists them")
    for sentence in coverage.warnings:
        yield Line(f"note      {sentence}")
    for sentence in coverage.partial[:top]:
        yield Line(f"missing   {sentence}", style="bold")
    if top is not None and len(coverage.partial) > top:
        more = text.plural(len(coverage.partial) - top, "more sentence")
        yield Line(f"missing   {more} like these; --all lists them", style="bold")


def _matched(report: "Report") -> str:
    """How many sites each pass of the matching paired."""
    passes = Counter(f.matched_by for f in report.findings if not f.verdict.is_orphan)
    return " · ".join(f"{n:,} {name or 'unknown'}" for name, n in passes.most_common())


def _judged(report: "Report") -> str:
    """By what the values were judged, and the verdicts."""
    tolerance = report.options.tolerance
    words = {
        "rounding": "what rounding explains",
        "twin": "the twin run",
        "tolerance": "" if tolerance is None else f"atol {tolerance[0]:g} + rtol {tolerance[1]:g} × |baseline|",
    }
    sources = Counter(words.get(f.judged_by, f.judged_by.partition(" ")[0]) for f in report.findings if f.judged_by)
    return " · ".join(f"{n:,} by {name}" for name, n in sources.most_common())


def _where(place: Place) -> str:
    if place.position is None:
        return f"{place.text()} step {place.step}"
    return f"{text.middle(place.request or '', 12)}:{place.position} step {place.step}"


def cells_of(finding: Finding) -> tuple[str, ...]:
    """The cells of one finding, in the order of the table's head."""
    side = finding.target or finding.baseline
    numbers, worst = finding.numbers, finding.worst
    ratio = share(finding.ratio) if finding.floor > 0 else "-"
    where = "" if worst is None or finding.verdict is Verdict.SAME else _where(worst)
    return (
        finding.site,
        str(finding.verdict),
        text.shape(side.shape) if side else "-",
        text.number(numbers.max_abs if numbers else None),
        text.number(numbers.rel_l2 if numbers else None),
        ratio,
        where,
    )
