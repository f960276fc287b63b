"""Grid of the values around a cursor that moves over all rows and columns of a tensor."""

from rich.segment import Segment
from rich.style import Style
from rich.text import Text
from textual import events
from textual.geometry import Region
from textual.message import Message
from textual.strip import Strip

from tapscope.core.errors import TapscopeError
from tapscope.core.formatting import printable
from tapscope.dashboard.model.tile import Tile, tile
from tapscope.dashboard.model.value_table import ValueTable
from tapscope.dashboard.theme import heat_style
from tapscope.dashboard.widgets.cell_cursor import CellCursor
from tapscope.dashboard.widgets.literal_text import literal

CELLS = "cells"
SIDES = ("difference", "target", "baseline")
MARGIN_ROWS, MARGIN_COLUMNS = 16, 32
"""Rows and columns read beyond the visible ones, so that most cursor moves read nothing."""
_LABEL = 24
_LEVELS = 9
_HERE, _LABELS, _CURSOR = Style(bold=True), Style(dim=True), Style(reverse=True)
_GAP = Segment(" ")


class ValueGrid(CellCursor):
    """Value grid: reads the tile around the cursor and draws the visible part."""

    class Moved(Message):
        """The cursor moved to another value."""

    def __init__(self, table: ValueTable) -> None:
        super().__init__(id=CELLS, classes="pane")
        self.set_table(table)

    def set_table(self, table: ValueTable) -> None:
        """Show another tensor with the cursor on its first value."""
        self.table = table
        self.row = self.column = 0
        self.side = SIDES[0] if table.is_pair else SIDES[1]
        self._top = self._left = 0
        self._tile: Tile | None = None
        self._drawn: list[list[Segment]] | None = None

    def go(self, row: int, column: int) -> None:
        """Move the cursor to an element, clamped to the table."""
        self.row, self.column = self.table.clamped(row, column)
        self.refresh()
        self.post_message(self.Moved())

    def next_side(self) -> str:
        """Show the next side of a pair; return its name."""
        if self.table.is_pair:
            self.side = SIDES[(SIDES.index(self.side) + 1) % len(SIDES)]
            self.refresh()
        return self.side

    def on_click(self, event: events.Click) -> None:
        """Move the cursor to the clicked value."""
        at = event.get_content_offset(self)
        if at is not None and self._tile is not None and at.y > 0:
            label, wide = self._widths(self._tile)
            if at.x > label:
                self.go(self._top + at.y - 1, self._left + (at.x - label) // (wide + 1))

    def _shown(self, tile: Tile) -> tuple[tuple[str, ...], ...]:
        return {"difference": tile.difference, "target": tile.target, "baseline": tile.baseline}[self.side]

    def _widths(self, tile: Tile) -> tuple[int, int]:
        label = min(max((len(printable(text)) for text in tile.labels), default=1), _LABEL)
        sides = (tile.difference, tile.target, tile.baseline)
        wide = max((len(text) for side in sides for line in side for text in line), default=1)
        return label, max(wide, len(str(tile.num_columns)))

    def _read(self) -> Tile:
        """Return the tile around the cursor; the current one if it contains everything visible."""
        height, width = max(self.size.height - 1, 1), max(self.size.width, 20)
        shown = self._tile
        self._top = _scrolled(self._top, self.row, height, self.table.num_rows)
        for _ in range(2):
            if shown is not None:
                label, wide = self._widths(shown)
                columns = max((width - label) // (wide + 1), 1)
                self._left = _scrolled(self._left, self.column, columns, self.table.num_columns)
                bottom = min(self._top + height, self.table.num_rows)
                right = min(self._left + columns, self.table.num_columns)
                is_there = shown.first_row <= self._top and shown.first_column <= self._left
                last = len(shown.target), len(shown.target[0]) if shown.target else 0
                if is_there and shown.first_row + last[0] >= bottom and shown.first_column + last[1] >= right:
                    return shown
            first = max(self._top - MARGIN_ROWS, 0), max(self.column - width // 2 - MARGIN_COLUMNS, 0)
            shown = self._tile = tile(self.table, *first, height + 2 * MARGIN_ROWS, width + 2 * MARGIN_COLUMNS)
        assert shown is not None
        return shown

    @property
    def text(self) -> str:
        """All lines as drawn."""
        return "\n".join("".join(segment.text for segment in line) for line in self._lines())

    def render_lines(self, crop: Region) -> list[Strip]:
        """Drop the cached lines and render again."""
        self._drawn = None
        return super().render_lines(crop)

    def render_line(self, y: int) -> Strip:
        """Render one line: row label and values, or column numbers; cells with larger differences are darker."""
        base, width = self.rich_style, self.size.width
        if self._drawn is None:
            self._drawn = self._lines()
        line = Strip(self._drawn[y] if y < len(self._drawn) else ())
        return line.apply_style(base).adjust_cell_length(width, base)

    def _lines(self) -> list[list[Segment]]:
        try:
            visible = self._read()
        except TapscopeError as error:
            text = literal(Text(f"The values cannot be read: {error}"))
            return [[Segment(line.plain)] for line in text.wrap(self.app.console, max(self.size.width, 1))]
        label, wide = self._widths(visible)
        columns = max((self.size.width - label) // (wide + 1), 1)
        first, start = self._top - visible.first_row, self._left - visible.first_column
        shown = self._shown(visible)
        lines = [[Segment(" " * label)]]
        for column in range(self._left, min(self._left + columns, visible.num_columns)):
            lines[0].append(Segment(f" {column:>{wide}}", _HERE if column == self.column else _LABELS))
        for at in range(first, min(first + max(self.size.height - 1, 1), len(shown))):
            row = visible.first_row + at
            name = printable(visible.labels[at])[:label]
            line = [Segment(f"{name:>{label}}", _HERE if row == self.row else _LABELS)]
            for i, value in enumerate(shown[at][start : start + columns], start):
                here = (row, visible.first_column + i) == (self.row, self.column)
                line += (_GAP, Segment(f"{value:>{wide}}", _CURSOR if here else self._heat(visible.shares[at][i])))
            lines.append(line)
        return lines

    def _heat(self, share: float | None) -> Style:
        """Return the style for one of :attr:`.Tile.shares`: darker for a larger difference, bold if not finite."""
        if share is None:
            return _HERE
        level = round(share * _LEVELS) if self.table.is_pair else 0
        return (heat_style(self.app.theme, str(level)) or Style()) if level else Style()


def _scrolled(first: int, cursor: int, visible: int, total: int) -> int:
    """Return the first visible index after scrolling just far enough to show the cursor."""
    return max(min(max(first, cursor - visible + 1), cursor, max(total - visible, 0)), 0)
