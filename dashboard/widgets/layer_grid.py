"""LayerGrid: the heat map of layers × steps, ranks or tokens; a layer unfolds into its sites."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich.style import Style
from rich.text import Text
from textual import events

from tapscope.comparator import Verdict
from tapscope.core.formatting import middle
from tapscope.core.formatting import site as shorten
from tapscope.dashboard.keymap import LAYERS
from tapscope.dashboard.model.grid import Cell, Grid, GridColumn, worst
from tapscope.dashboard.theme import heat_style
from tapscope.dashboard.widgets.row_list import RowList

_LABEL, _NARROW_LABEL, _SITE_LABEL = 12, 8, 32
_WIDE = 24
"""Cells from which labels give way only where all steps fit then."""


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of the pane: a row of the layers, or one of its sites."""

    layer: int
    site: int | None = None


class LayerGrid(RowList):
    """Left pane of the diff screen; its first line stands for everything."""

    def __init__(self) -> None:
        super().__init__(LAYERS)
        self.layer_rows: Grid | None = None
        self._sites: Grid | None = None
        self._lines: list[_Line] = []
        self._unfolded: set[int] = set()
        self._chosen: int | None = None
        self._span = (0, 0)
        """First column that is shown, and the one after the last."""
        self._culprit: str | None = None
        self._binned: dict[int, tuple[Grid, Grid]] = {}
        self._longest = (0, 1)
        """Characters of the longest label of a row and of a column."""

    @property
    def group(self) -> str | None:
        """Name of the layer under the cursor; None for everything."""
        line = self._line
        return self.layer_rows.rows[line.layer].name if self.layer_rows and line else None

    @property
    def order(self) -> int | None:
        """The finding of the site under the cursor, by its place in execution order."""
        line = self._line
        return line.site if line else None

    @property
    def _line(self) -> _Line | None:
        return self._lines[self.cursor - 1] if 0 < self.cursor <= len(self._lines) else None

    def set_grids(self, layers: Grid, sites: Grid, culprit: str | None) -> None:
        """Show these grids; ``culprit`` is the name of the layer that is marked."""
        self.layer_rows, self._sites, self._culprit = layers, sites, culprit
        self._unfolded.clear()
        self._binned.clear()
        self._span = 0, len(layers.columns)
        self._longest = (
            max([len(row.label) for row in layers.rows], default=0),
            max([len(each.label) for each in layers.columns], default=1),
        )
        self._arrange(0)

    @property
    def axis(self) -> str:
        """What the columns are: ``step``, ``rank`` or ``token``."""
        return self.layer_rows.axis if self.layer_rows is not None else "step"

    def set_chosen(self, column: int | None) -> None:
        """The step or rank that is chosen."""
        if column == self._chosen:
            return
        self._chosen = column
        first, stop = self._span
        at = self._chosen_place
        if at is not None and not first <= at < stop:
            self._show_columns(stop - first)
        self.refresh_line(0)

    @property
    def _chosen_place(self) -> int | None:
        return self.layer_rows.column_of(self._chosen) if self.layer_rows and self._chosen is not None else None

    def zoom_columns(self, direction: int) -> bool:
        """Show half as many columns around the chosen one, or twice as many; whether that changes what is shown."""
        shown = self._span[1] - self._span[0]
        wanted = min(
            (shown + 1) // 2 if direction > 0 else 2 * shown, len(self.layer_rows.columns) if self.layer_rows else 0
        )
        if wanted == shown:
            return False
        self._show_columns(wanted)
        return True

    def _show_columns(self, num: int) -> None:
        """Around the chosen column, else around the middle of those that are shown."""
        assert self.layer_rows is not None
        at = self._chosen_place
        centre = at if at is not None else sum(self._span) // 2
        first = max(min(centre - num // 2, len(self.layer_rows.columns) - num), 0)
        self._span = first, first + num
        self._binned.clear()
        self._draw_title()
        self.refresh()

    def reveal(self, name: str | None) -> None:
        """Move the cursor to a layer without telling the screen."""
        names = [None if line.site is not None else self._layer_name(line) for line in self._lines]
        if name is None:
            self.set_num_rows(self.num_rows, 0)
        elif name in names:
            self.set_num_rows(self.num_rows, names.index(name) + 1)

    def unfold(self, unfolded: bool) -> None:
        """Show or hide the sites of the layer under the cursor."""
        line = self._line
        if line is None or (line.layer in self._unfolded) == unfolded:
            return
        (self._unfolded.add if unfolded else self._unfolded.discard)(line.layer)
        at = next(i for i, each in enumerate(self._lines) if each.layer == line.layer and each.site is None)
        self._arrange(self.cursor if unfolded else at + 1)

    def _arrange(self, cursor: int) -> None:
        self._lines = []
        for i, row in enumerate(self.layer_rows.rows if self.layer_rows else ()):
            self._lines.append(_Line(i))
            if i in self._unfolded:
                self._lines += [_Line(i, order) for order in row.orders]
        self.set_num_rows(len(self._lines) + 1 if self._lines else 0, cursor)
        self._draw_title()

    def _layer_name(self, line: _Line) -> str:
        return self.layer_rows.rows[line.layer].name if self.layer_rows else ""

    def columns(self, width: int) -> Sequence[GridColumn]:
        """The columns that a line of ``width`` cells shows: every step, or bins of steps."""
        return self._grids(width)[0].columns

    def _grids(self, width: int) -> tuple[Grid, Grid]:
        """Layers and sites, with as many columns as fit."""
        assert self.layer_rows is not None
        assert self._sites is not None
        room = max((width - self._label(width) - 4) // self._cell(width), 1)
        if room not in self._binned:
            layers, sites = self.layer_rows.span(*self._span), self._sites.span(*self._span)
            self._binned[room] = layers.binned(room), sites.binned(room)
        return self._binned[room]

    def _cell(self, width: int) -> int:
        """Cells of a column: with room for the step's number, or one where there are many steps."""
        if self.layer_rows is None:
            return 1
        wide, num = self._longest[1] + 1, self._span[1] - self._span[0]
        return wide if num * wide + self._label(width) + 4 <= width else 1

    def _label(self, width: int) -> int:
        wanted = min(max(self._longest[0], len("everything")), _SITE_LABEL if self._unfolded and width > 60 else _LABEL)
        if self._unfolded and width > 60:
            return _SITE_LABEL
        num = self._span[1] - self._span[0]
        gives_way = width < _WIDE or wanted + num + 4 > width
        return _NARROW_LABEL if gives_way else wanted

    def header(self, width: int) -> Text | None:
        """The columns; of bins the first and the last one."""
        if not self._lines:
            return None
        columns, cell = self.columns(width - 2), self._cell(width - 2)
        text = Text(" " * (self._label(width - 2) + 2))
        if cell > 1:
            for each in columns:
                chosen = self._chosen is not None and each.first <= self._chosen <= each.last
                text.append(" " * (cell - len(each.label)))
                text.append(each.label, style="bold reverse" if chosen else "")
            return text
        return text.append_text(_axis(columns, self._chosen))

    def on_resize(self, event: events.Resize) -> None:
        """What fits has changed."""
        super().on_resize(event)
        self._draw_title()

    def _draw_title(self) -> None:
        self.set_title(self.title(), self.subtitle())

    def title(self) -> str:
        """What is shown."""
        num, every = self._span[1] - self._span[0], self.layer_rows.columns if self.layer_rows else ()
        if not self._lines or num == len(every):
            return f"layers × {self.axis}s"
        first, last = every[self._span[0]], every[self._span[1] - 1]
        shown = f"{first.name or first.first}-{last.last_name or last.name or last.last}"
        return f"layers × {self.axis}s {shown} of {len(every)}"

    def subtitle(self) -> str:
        """How columns are joined, where not each has its own."""
        if not self._lines or self.layer_rows is None:
            return ""
        shown, num = len(self.columns(self.room - 2)), self._span[1] - self._span[0]
        return f"{num} {self.axis}s in {shown} columns" if shown < num else ""

    def mark(self, verdict: Verdict) -> str:
        """One character before a row's name."""
        return verdict.glyph

    def format_row(self, row: int, width: int) -> Text:
        """A layer or a site: its worst verdict, its name, and a cell for every column."""
        label = self._label(width)
        assert self.layer_rows is not None
        if row == 0:
            return Text(
                f"{self.mark(worst(each.verdict for each in self.layer_rows.rows))} {middle('everything', label)}"
            )
        line = self._lines[row - 1]
        layers, sites = self._grids(width)
        grid, at = (layers, line.layer) if line.site is None else (sites, line.site)
        shown = grid.rows[at]
        name = middle(shown.label, label) if line.site is None else f" {shorten(shown.label, label - 1)}"
        bold = Style(bold=True) if shown.is_cause else Style()
        text = Text(f"{self.mark(shown.verdict)} {name:<{label}}", style=self._style(shown.verdict) + bold)
        cell = self._cell(width)
        for i in range(len(grid.columns)):
            each = grid.cell(at, i)
            text.append(" " * (cell - 1)).append(each.glyph, style=self._cell_style(each))
        if line.site is None and shown.name == self._culprit:
            text.append(" ◂", style=self.bad_style)
        return text

    def _style(self, verdict: Verdict | None) -> Style:
        """Orange for what differs, dim for what agrees and where nothing was compared."""
        if verdict is not None and verdict.is_bad:
            return self.bad_style
        return Style() if verdict is not None and verdict.is_orphan else Style(dim=True)

    def _cell_style(self, cell: Cell) -> Style:
        heat = heat_style(self.app.theme, cell.glyph)
        return self._style(cell.verdict) if heat is None else heat


def _axis(columns: Sequence[GridColumn], chosen: int | None) -> Text:
    """Labels above columns of one cell, as many as do not touch."""
    cells = [" "] * len(columns)
    free = 0
    for i, each in enumerate(columns):
        label = each.name or str(each.first)
        if i >= free and i + len(label) <= len(columns) and (i == 0 or i % 10 == 0):
            cells[i : i + len(label)] = label
            free = i + len(label) + 1
    text = Text("".join(cells))
    for i, each in enumerate(columns):
        if chosen is not None and each.first <= chosen <= each.last:
            text.stylize("bold reverse", i, i + 1)
    return text
