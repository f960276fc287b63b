"""Table of the findings of the chosen layer and step."""

from collections.abc import Callable, Sequence

from rich.text import Text

from tapscope.comparator import Finding, Verdict
from tapscope.core.formatting import middle
from tapscope.core.formatting import site as shorten
from tapscope.dashboard.keymap import FINDINGS
from tapscope.dashboard.model.diff import Downstream, fold_downstream
from tapscope.dashboard.model.finding import FindingView, finding_view, step_cells
from tapscope.dashboard.widgets.column_list import ColumnList
from tapscope.dashboard.widgets.row_list import column_at

MEASURES: dict[str, Callable[[FindingView], str]] = {
    "max |Δ|": lambda view: view.max_abs.text,
    "rel l2": lambda view: view.rel_l2.text,
    "cosine": lambda view: view.cosine.text,
    "equal": lambda view: view.equal.text,
}
"""Name of a measure -> function that formats the measure of a finding."""
_WIDTHS = (
    {"÷ floor": 7, "error": 9, "floor": 9}
    | dict.fromkeys(MEASURES, 9)
    | {"shape": 14, "dtype": 9, "worst at": 16, "matched by": 16}
)
_MIN_SITE = 26


class FindingTable(ColumnList):
    """Upper right pane of the diff screen."""

    COLUMNS = tuple(_WIDTHS)

    def __init__(self) -> None:
        super().__init__(FINDINGS)
        self.findings: Sequence[Finding] = ()
        self._rows: Sequence[Finding | Downstream] = ()
        self._measure = 0
        self._step: int | None = None

    @property
    def finding(self) -> Finding | None:
        """The finding under the cursor; the first one of folded findings."""
        row = self._rows[self.cursor] if self._rows else None
        return row.findings[0] if isinstance(row, Downstream) else row

    @property
    def measures(self) -> list[str]:
        """Names of the two measures in the table."""
        names = list(MEASURES)
        return [names[(self._measure + i) % len(names)] for i in range(2)]

    def next_measure(self) -> str:
        """Show the next two measures; return the name of the first."""
        self._measure = (self._measure + 1) % len(MEASURES)
        self.refresh()
        return self.measures[0]

    def set_findings(
        self, findings: Sequence[Finding], order: int, step: int | None = None, *, fold: bool = False
    ) -> None:
        """Show these findings, with the cursor on the finding at position ``order``.

        With ``step``, the cells show the results of that step only.
        """
        self.findings, self._step = findings, step
        self._rows = fold_downstream(findings) if fold else findings
        places = (i for i, row in enumerate(self._rows) if order in _orders(row))
        self.set_num_rows(len(self._rows), next(places, 0))

    def columns(self, width: int) -> dict[str, int]:
        """Return name -> width of the columns that fit next to the site."""
        return self.fitting(_WIDTHS, width - 2 - _MIN_SITE, ("matched by", self.measures[1], "worst at"))

    def usual(self) -> Sequence[str]:
        """Return the columns ratio, two measures, place, and matching rule."""
        return "÷ floor", *self.measures, "worst at", "matched by"

    def column_at(self, x: int, width: int) -> str:
        """Return the name of the column at cell ``x`` of a line."""
        return column_at(x, width, self.columns(width))

    def header(self, width: int) -> Text | None:
        """Return the column names."""
        if not self.findings:
            return None
        return self._line("", "site", {name: name for name in self.columns(width - 2)}, width - 2)

    def format_row(self, row: int, width: int) -> Text:
        """Format a finding; numbers are never shortened."""
        finding = self._rows[row]
        if isinstance(finding, Downstream):
            return self._folded(finding, width)
        view = finding_view(finding)
        cells = {name: show(view) for name, show in MEASURES.items()}
        cells |= {"÷ floor": view.ratio.text, "worst at": view.where, "matched by": view.matched_by or "-"}
        side = view.target or view.baseline
        cells |= {"error": view.error.text, "floor": view.floor.text}
        cells |= {"shape": side.shape if side else "-", "dtype": side.dtype if side else "-"}
        verdict = finding.verdict
        if self._step is not None and finding.basis in ("values", "hash"):
            of_step = step_cells(finding, self._step)
            verdict = of_step.verdict
            equal = "100.0 %" if verdict is Verdict.SAME and of_step.ratio.text == "-" else "-"
            cells |= {"max |Δ|": of_step.max_abs.text, "rel l2": of_step.rel_l2.text, "cosine": "-", "equal": equal}
            cells |= {"÷ floor": of_step.ratio.text, "error": "-", "floor": "-"}
        line = self._line(verdict.glyph, finding.site, cells, width)
        if finding.role == "downstream":
            line.stylize("dim")
        elif verdict.is_bad:
            line.stylize(self.bad_style)
        elif not verdict.is_orphan:
            line.stylize("dim")
        return line

    def _folded(self, downstream: Downstream, width: int) -> Text:
        room = max((width - 28) // 2, 8)
        first, last = (shorten(downstream.findings[i].site, room) for i in (0, -1))
        return Text(f"  ↳ {downstream.text}: {first} … {last}"[:width], style="dim")

    def _line(self, glyph: str, site: str, cells: dict[str, str], width: int) -> Text:
        names = self.columns(width)
        room = max(width - 2 - sum(n + 2 for n in names.values()), 1)
        line = f"{glyph:<1} {shorten(site, room):<{room}}"
        for name, cells_width in names.items():
            line += f"  {middle(cells[name], cells_width):>{cells_width}}"
        return Text(line)


def _orders(row: Finding | Downstream) -> set[int]:
    return {each.order for each in row.findings} if isinstance(row, Downstream) else {row.order}
