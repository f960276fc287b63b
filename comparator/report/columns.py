"""Columns: lay out the rows of a report as a table that fits the screen."""

from collections.abc import Collection, Iterator, Sequence

from tapscope.comparator.report.folding import STRETCH, Row
from tapscope.comparator.report.width import Line, display_width, wrap_line
from tapscope.comparator.verdict.finding import Verdict
from tapscope.core import formatting

_STYLES = {
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


def table_lines(rows: Sequence[Row], width: int) -> Iterator[Line]:
    """Yield a header, a rule, and one line per row, for a screen of ``width`` columns."""
    # Numbers are never truncated: a narrow screen first drops columns, then cuts the middle of site names.
    kept = [i for i in range(len(_HEADS)) if not (i == _SHAPE and width < 96) and not (i == _WORST and width < 76)]
    widths = [display_width(_HEADS[i]) for i in kept]
    for row in rows:
        if row.cells:
            widths = [max(known, _room(row.cells[i])) for known, i in zip(widths, kept, strict=True)]
    rest = sum(widths[1:]) + 2 * len(widths)
    longest, widths[0] = widths[0], max(min(widths[0], width - rest), min(widths[0], _MIN_SITE))
    numeric = [i in _NUMBERS for i in kept]
    yield Line(_line("  ", [_HEADS[i] for i in kept], widths, numeric), style="bold")
    yield Line("─" * min(width, sum(widths) + 2 * len(widths)))
    alike = _alike(rows, widths[0]) if widths[0] < longest else ()
    for row in rows:
        yield from _row(row, [row.cells[i] for i in kept] if row.cells else [], widths, numeric, width, alike)


def _row(
    row: Row, cells: list[str], widths: list[int], numeric: list[bool], width: int, alike: Collection[str]
) -> Iterator[Line]:
    """Yield one row in columns; a name that would look like another one when truncated gets a line of its own."""
    lead, style = f"{row.verdict.glyph} ", _STYLES[row.verdict]
    if not cells:
        yield from wrap_line(Line(lead + row.note, style), width, 2)
        return
    if cells[0] in alike:
        yield Line(lead + cells[0], style)
        lead, cells = "  ", ["", *cells[1:]]
    yield Line(_line(lead, cells, widths, numeric), style)


def _alike(rows: Sequence[Row], width: int) -> set[str]:
    """Return the names that look like another name when truncated to the column."""
    shown: dict[str, set[str]] = {}
    for row in rows:
        if row.cells and display_width(row.cells[0]) > width:
            shown.setdefault(_site(row.cells[0], width), set()).add(row.cells[0])
    return {name for names in shown.values() if len(names) > 1 for name in names}


def _room(cell: str) -> int:
    """Return the width that a cell needs; a range of sites gets at most ``_STRETCH``, because its ends matter less."""
    return min(display_width(cell), _STRETCH) if STRETCH in cell else display_width(cell)


def _line(lead: str, cells: Sequence[str], widths: list[int], numeric: list[bool]) -> str:
    shown = [_site(cells[0], widths[0]), *cells[1:]]
    padded = []
    for cell, width, right in zip(shown, widths, numeric, strict=True):
        space = " " * (width - display_width(cell))
        padded.append(space + cell if right else cell + space)
    return (lead + "  ".join(padded)).rstrip()


def _site(site: str, width: int) -> str:
    """Return a site, or both ends of a range of sites, each truncated in the middle."""
    first, dots, last = site.partition(STRETCH)
    if not dots or display_width(site) <= width:
        return formatting.site(site, width)
    room = width - len(STRETCH)
    half = max(room - display_width(last), room // 2)
    shown = formatting.site(first, half)
    return shown + STRETCH + formatting.site(last, room - display_width(shown))
