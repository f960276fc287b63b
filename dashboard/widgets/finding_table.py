"""FindingTable: the findings of the chosen layer and step."""

from collections.abc import Callable, Sequence

from rich.text import Text

from tapscope.comparator import ErrorMetrics, Finding, Verdict
from tapscope.comparator.report.answer import share
from tapscope.core.formatting import middle, number
from tapscope.core.formatting import site as shorten
from tapscope.dashboard.keymap import FINDINGS
from tapscope.dashboard.layer_grid import step_verdict
from tapscope.dashboard.widgets.row_list import RowList

MEASURES: dict[str, Callable[[ErrorMetrics], str]] = {
    "max |Δ|": lambda n: number(n.max_abs),
    "rel l2": lambda n: number(n.rel_l2),
    "cosine": lambda n: f"{n.cosine:.6f}",
    "equal": lambda n: f"{100 * n.equal / n.count:.1f} %" if n.count else "-",
}
"""Name of a measure -> how it is shown."""
_DROPPED_FIRST = ("matched by", "rel l2", "worst at")
_MIN_SITE = 26
_WORST = 16


class FindingTable(RowList):
    """Right upper pane of the diff screen."""

    def __init__(self) -> None:
        super().__init__(FINDINGS)
        self.findings: Sequence[Finding] = ()
        self._measure = 0
        self._step: int | None = None

    @property
    def finding(self) -> Finding | None:
        """The finding under the cursor."""
        return self.findings[self.cursor] if self.findings else None

    @property
    def measures(self) -> list[str]:
        """The two measures in the list."""
        names = list(MEASURES)
        return [names[(self._measure + i) % len(names)] for i in range(2)]

    def next_measure(self) -> str:
        """Other measures; returns the first."""
        self._measure = (self._measure + 1) % len(MEASURES)
        self.refresh()
        return self.measures[0]

    def set_findings(self, findings: Sequence[Finding], cursor: int, step: int | None = None) -> None:
        """Show these findings; of a ``step`` alone what it shows of them."""
        self.findings, self._step = findings, step
        self.set_num_rows(len(findings), cursor)

    def columns(self, width: int) -> dict[str, int]:
        """Name -> width of the columns that fit next to the site."""
        found = {"÷ floor": 7} | dict.fromkeys(self.measures, 9) | {"worst at": _WORST, "matched by": 16}
        for dropped in ("matched by", self.measures[1], "worst at"):
            if width - 2 - sum(n + 2 for n in found.values()) >= _MIN_SITE:
                break
            del found[dropped]
        return found

    def header(self, width: int) -> Text | None:
        """Names of the columns."""
        if not self.findings:
            return None
        return self._line("", "site", {name: name for name in self.columns(width - 2)}, width - 2)

    def format_row(self, row: int, width: int) -> Text:
        """One finding; numbers are never shortened."""
        finding = self.findings[row]
        numbers, place = finding.numbers, finding.worst
        cells = {name: show(numbers) if numbers else "-" for name, show in MEASURES.items()}
        cells["÷ floor"] = _ratio(finding)
        cells["worst at"] = _place(finding) if place and finding.verdict is not Verdict.SAME else "-"
        cells["matched by"] = finding.matched_by or "-"
        verdict = finding.verdict
        if self._step is not None and finding.basis in ("values", "hash"):
            verdict, of_step = _in_step(finding, self._step)
            cells |= of_step
        line = self._line(verdict.glyph, finding.site, cells, width)
        if verdict.is_bad:
            line.stylize(self.bad_style)
        elif not verdict.is_orphan:
            line.stylize("dim")
        return line

    def _line(self, glyph: str, site: str, cells: dict[str, str], width: int) -> Text:
        names = self.columns(width)
        room = max(width - 2 - sum(n + 2 for n in names.values()), 1)
        line = f"{glyph:<1} {shorten(site, room):<{room}}"
        for name, cells_width in names.items():
            line += f"  {middle(cells[name], cells_width):>{cells_width}}"
        return Text(line)


def _in_step(finding: Finding, step: int) -> tuple[Verdict, dict[str, str]]:
    """What a finding shows in one step, and the cells that are about it alone."""
    result = next((each for each in finding.steps if each.step == step), None)
    if result is None:  # its hashes are equal
        return Verdict.SAME, {"max |Δ|": "0", "rel l2": "0", "÷ floor": "-", "cosine": "-", "equal": "100.0 %"}
    cells = {"max |Δ|": number(result.max_abs), "rel l2": number(result.rel_l2), "cosine": "-", "equal": "-"}
    ratio = share(result.error / finding.row_floor) if finding.row_floor > 0.0 else "-"
    return step_verdict(finding, result), {**cells, "÷ floor": ratio}


def _ratio(finding: Finding) -> str:
    if finding.basis == "none" or finding.verdict.is_orphan or finding.verdict is Verdict.NONFINITE:
        return "-"
    if finding.floor > 0.0:
        return share(finding.ratio)
    return "exact" if finding.test == "exact" and finding.error else "-"


def _place(finding: Finding) -> str:
    place = finding.worst
    if place is None:
        return "-"
    where = f"{place.request}:{place.position}" if place.position is not None else place.text()
    return f"step {place.step} {where}"
