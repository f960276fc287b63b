"""Heat map of a whole tensor, with a cursor over its cells."""

from itertools import groupby

from rich.style import Style
from rich.text import Text
from textual import events
from textual.message import Message

from tapscope.core.formatting import printable
from tapscope.dashboard.model.value_map import ValueMap
from tapscope.dashboard.model.value_table import ValueTable
from tapscope.dashboard.theme import heat_style
from tapscope.dashboard.widgets.cell_cursor import CellCursor

MAP = "map"
_LABEL = 16
_CURSOR = Style(reverse=True, bold=True)


class TensorMap(CellCursor):
    """Heat map of all rows and columns in the available space; adjacent ones share a cell with their maximum."""

    class Moved(Message):
        """The cursor moved to another cell."""

    def __init__(self, table: ValueTable) -> None:
        super().__init__(id=MAP, classes="pane")
        self.set_table(table)

    def set_table(self, table: ValueTable) -> None:
        """Show another tensor, whose heat map is not yet available."""
        self._table = table
        self._whole: ValueMap | None = None
        self._shown: ValueMap | None = None
        self.row = self.column = 0
        """Cell of the cursor, as row and column of the heat map."""
        self._place = 0, 0
        """Element of the table within that cell."""

    def set_map(self, whole: ValueMap) -> None:
        """Show the heat map of the tensor."""
        self._whole = whole
        self._fit()

    @property
    def rectangle(self) -> tuple[tuple[int, int], tuple[int, int]] | None:
        """Half-open ranges of the table's rows and columns under the cursor."""
        shown = self._shown
        return None if shown is None or not shown.rows else (shown.rows[self.row], shown.columns[self.column])

    def text(self) -> str:
        """Describe the cell under the cursor."""
        shown, place = self._shown, self.rectangle
        if shown is None or place is None:
            return "Reading all values ..."
        (top, end), (left, stop) = place
        rows = self._table.label(top) if end - top == 1 else f"{self._table.label(top)} … {self._table.label(end - 1)}"
        columns = str(left) if stop - left == 1 else f"{left} … {stop - 1}"
        what = "max |Δ|" if shown.is_pair else "max |x|"
        return f"rows {rows} · columns {columns} · {what} {shown.text(self.row, self.column)}"

    def on_resize(self, event: events.Resize) -> None:
        """Merge cells again for the new size."""
        self._fit()

    def _fit(self) -> None:
        if self._whole is None or not self.size.width:
            return
        self._shown = self._whole.binned(max(self.size.height - 1, 1), max(self.size.width - _LABEL - 1, 1))
        self.show_place(*self._place)
        self.post_message(self.Moved())

    def show_place(self, row: int, column: int) -> None:
        """Move the cursor to the cell of a table element, once the heat map is available."""
        self._place = row, column
        if self._shown is not None:
            self.row = next((i for i, (_, end) in enumerate(self._shown.rows) if row < end), 0)
            self.column = next((i for i, (_, end) in enumerate(self._shown.columns) if column < end), 0)
            self.refresh()

    def go(self, row: int, column: int) -> None:
        """Move the cursor to a cell, clamped to the existing cells."""
        if self._shown is not None:
            self.row = max(min(row, len(self._shown.rows) - 1), 0)
            self.column = max(min(column, len(self._shown.columns) - 1), 0)
            if (place := self.rectangle) is not None:
                self._place = place[0][0], place[1][0]
        self.refresh()
        self.post_message(self.Moved())

    def on_click(self, event: events.Click) -> None:
        """Move the cursor to the clicked cell."""
        at = event.get_content_offset(self)
        if at is not None and at.y > 0 and at.x > _LABEL:
            self.go(at.y - 1, at.x - _LABEL - 1)

    def render(self) -> Text:
        """Render a heading, and label and cells of each line."""
        shown = self._shown
        if shown is None:
            return Text("Reading all values ...")
        num_rows, num_columns = self._table.num_rows, self._table.num_columns
        joined = f"{len(shown.rows)} × {len(shown.columns)} cells of {num_rows:,} × {num_columns:,} values"
        text = Text(f"{'':{_LABEL}} {joined}"[: max(self.size.width, 1)], style="", no_wrap=True)
        for line, glyphs in enumerate(shown.glyphs()):
            label = printable(self._table.label(shown.rows[line][0]))[:_LABEL]
            text.append(f"\n{label:>{_LABEL}} ", style="bold" if line == self.row else "dim")
            at = self.column if line == self.row else len(glyphs)
            for part, style in ((glyphs[:at], None), (glyphs[at : at + 1], _CURSOR), (glyphs[at + 1 :], None)):
                for glyph, same in groupby(part):
                    text.append(glyph * len(list(same)), style=style or self._style(glyph))
        return text

    def _style(self, glyph: str) -> Style:
        if glyph == "%":
            return Style(bold=True)
        return heat_style(self.app.theme, glyph) or Style(dim=True)
