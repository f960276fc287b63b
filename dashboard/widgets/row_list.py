"""Base of lists with a cursor, of which only the visible rows are formatted."""

from collections.abc import Mapping
from typing import ClassVar

from rich.style import Style
from rich.text import Text
from textual import events
from textual.message import Message
from textual.strip import Strip

from tapscope.dashboard.widgets.line_view import LineView


class RowList(LineView):
    """List of rows with a cursor. Subclasses format rows; the cost does not depend on the number of rows."""

    COMPONENT_CLASSES: ClassVar[set[str]] = {"row-list--cursor", "row-list--header", "row-list--bad"}

    class Moved(Message):
        """The cursor moved to another row."""

        def __init__(self, row_list: "RowList") -> None:
            super().__init__()
            self.row_list = row_list

        @property
        def control(self) -> "RowList":
            """The list, for ``@on`` selectors."""
            return self.row_list

    class HeaderClicked(Message):
        """A column name in the header was clicked."""

        def __init__(self, row_list: "RowList", column: str) -> None:
            super().__init__()
            self.row_list, self.column = row_list, column

        @property
        def control(self) -> "RowList":
            """The list, for ``@on`` selectors."""
            return self.row_list

    def __init__(self, id: str) -> None:
        super().__init__(id)
        self.num_rows = 0
        self.cursor = 0
        self.empty_text = ""
        """Text shown if there are no rows; suggests the next action."""

    def header(self, width: int) -> Text | None:
        """Return the line above the rows, or None."""
        return None

    def column_at(self, x: int, width: int) -> str:
        """Return the name of the column at cell ``x`` of a line; empty if there is none."""
        return ""

    def format_row(self, row: int, width: int) -> Text:
        """Format a row to ``width`` cells; called for visible rows only."""
        raise NotImplementedError

    @property
    def bad_style(self) -> Style:
        """Style of bad rows: orange."""
        return self.get_component_rich_style("row-list--bad", partial=True)

    def set_num_rows(self, num_rows: int, cursor: int) -> None:
        """Show another number of rows; does not post :class:`Moved`."""
        self.num_rows = num_rows
        self.cursor = max(min(cursor, num_rows - 1), 0)
        self.set_height(num_rows + self._num_header)
        self._follow()
        self.refresh()

    def move(self, delta: int) -> None:
        """Move the cursor by ``delta`` rows."""
        self.go(self.cursor + delta)

    def page(self, direction: int) -> None:
        """Move the cursor by one page."""
        self.go(self.cursor + direction * max(self.size.height - self._num_header - 1, 1))

    def ends(self, direction: int) -> None:
        """Move the cursor to the first or last row."""
        self.go(0 if direction < 0 else self.num_rows - 1)

    def go(self, row: int) -> None:
        """Move the cursor to a row, clamped to the existing rows."""
        row = max(min(row, self.num_rows - 1), 0)
        if row != self.cursor:
            for changed in (self.cursor, row):
                self.refresh_line(changed + self._num_header)
            self.cursor = row
            self._follow()
            self.post_message(self.Moved(self))

    @property
    def _num_header(self) -> int:
        return 0 if self.header(self.room) is None else 1

    def _follow(self) -> None:
        """Scroll just far enough to show the cursor."""
        visible = max(self.size.height - self._num_header, 1)
        top = round(self.scroll_offset.y)
        wanted = min(max(top, self.cursor - visible + 1), self.cursor)
        if wanted != top:
            self.scroll_to(y=wanted, animate=False, immediate=True)

    def on_resize(self, event: events.Resize) -> None:
        """Keep the cursor visible."""
        self._follow()

    def on_focus(self) -> None:
        """Redraw the cursor, which looks different in the focused pane."""
        self.refresh()

    def on_blur(self) -> None:
        """Redraw the cursor, see :meth:`on_focus`."""
        self.refresh()

    def on_click(self, event: events.Click) -> None:
        """Move the cursor to the clicked row; a click in the header posts :class:`HeaderClicked`."""
        at = event.get_content_offset(self)
        if at is not None and at.y < self._num_header:
            if column := self.column_at(at.x - 2, self.room - 2):
                self.post_message(self.HeaderClicked(self, column))
            return
        row = at.y - self._num_header + self.scroll_offset.y if at is not None else -1
        if 0 <= row < self.num_rows:
            self.go(row)

    def render_line(self, y: int) -> Strip:
        """Render one line of the widget; the header does not scroll."""
        width = self.room
        header = self.header(width)
        base = self.rich_style
        if not self.num_rows:
            return self.strip(self._empty_line(y, width), base)
        if header is not None and y == 0:
            return self.strip(Text("  ").append_text(header), self.get_component_rich_style("row-list--header"))
        row = y - (header is not None) + round(self.scroll_offset.y)
        if row >= self.num_rows:
            return Strip.blank(width, base)
        is_cursor = row == self.cursor
        mark = "  " if not is_cursor else "> " if self.has_focus else "› "
        line = Text(mark).append_text(self.format_row(row, width - 2))
        return self.strip(line, self.get_component_rich_style("row-list--cursor") if is_cursor else base)

    def _empty_line(self, y: int, width: int) -> Text:
        lines = Text(self.empty_text).wrap(self.app.console, max(width - 2, 1))
        return Text(" ").append_text(lines[y]) if y < len(lines) else Text()


def column_at(x: int, width: int, columns: Mapping[str, int]) -> str:
    """Return the column at cell ``x`` of a line with the site first and ``columns`` (name -> width) at its end."""
    start = width - sum(wide + 2 for wide in columns.values())
    if x < start:
        return "site"
    for name, wide in columns.items():
        start += wide + 2
        if x < start:
            return name
    return ""
