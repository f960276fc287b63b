"""TextPane: a scrolling text about one thing, in several views."""

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.selection import Selection
from textual.strip import Strip

from tapscope.dashboard.widgets.line_view import LineView
from tapscope.dashboard.widgets.literal_text import literal


class TextPane(LineView):
    """Base of the lower panes. Subclasses say what is in the title and in the text."""

    VIEWS: ClassVar[tuple[str, ...]]

    def __init__(self, id: str) -> None:
        super().__init__(id)
        self.view = self.VIEWS[0]
        self._lines: list[Text] = []

    def title_text(self, width: int) -> str:
        """The text in the border, ``width`` cells wide; empty for nothing."""
        raise NotImplementedError

    def lines(self, width: int, height: int) -> Sequence[Text]:
        """The text for the size at hand; longer lines are broken between words."""
        raise NotImplementedError

    @property
    def text(self) -> str:
        """All lines as they are drawn."""
        return "\n".join(line.plain for line in self._lines)

    def next_view(self) -> None:
        """The next view, and around."""
        self.view = self.VIEWS[(self.VIEWS.index(self.view) + 1) % len(self.VIEWS)]
        self.scroll_to_top()
        self.draw()

    def scroll_to_top(self) -> None:
        """Show the first line."""
        self.scroll_home(animate=False, immediate=True)

    def move(self, delta: int) -> None:
        """Scroll by lines."""
        self.scroll_relative(y=delta, animate=False, immediate=True)  # else of two keys in a row one is lost

    def page(self, direction: int) -> None:
        """Scroll by a page."""
        self.scroll_relative(y=direction * self.size.height, animate=False, immediate=True)

    def ends(self, direction: int) -> None:
        """Scroll to the top or the bottom."""
        self.scroll_to(y=0 if direction < 0 else self.max_scroll_y, animate=False, immediate=True)

    def on_resize(self, event: events.Resize) -> None:
        """Lay the content out again for the new size."""
        self.draw()

    def draw(self) -> None:
        """Redraw the text."""
        self.set_title(self.title_text(self.outer_size.width), self.view)
        width, console = max(self.room, 20), self.app.console
        lines = map(literal, self.lines(width, max(self.size.height, 4)))
        self._lines = [
            part for line in lines for part in ((line,) if line.cell_len <= width else line.wrap(console, width))
        ]
        self.set_height(len(self._lines))
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """One line of the screen."""
        row = y + round(self.scroll_offset.y)
        if row >= len(self._lines):
            return Strip.blank(self.room, self.rich_style)
        line, selection = self._lines[row], self.text_selection
        span = selection.get_span(row) if selection is not None else None
        if span is not None:
            start, end = span
            line = line.copy()
            style = self.screen.get_component_rich_style("screen--selection")
            line.stylize(style, start, end if end >= 0 else len(line))
        return self.strip(line, self.rich_style).apply_offsets(0, row)

    def get_selection(self, selection: Selection) -> tuple[str, str]:
        """The text that the mouse has selected."""
        return selection.extract(self.text), "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        """Draw what is selected now."""
        self.refresh()
