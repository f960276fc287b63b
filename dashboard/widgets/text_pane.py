"""Base of panes that show one item as scrolling text, in several views."""

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.selection import Selection
from textual.strip import Strip

from tapscope.dashboard.widgets.line_view import LineView
from tapscope.dashboard.widgets.literal_text import literal


class TextPane(LineView):
    """Base of the lower panes. Subclasses provide title and text."""

    VIEWS: ClassVar[tuple[str, ...]]

    def __init__(self, id: str) -> None:
        super().__init__(id)
        self.view = self.VIEWS[0]
        self._lines: list[Text] = []

    def title_text(self, width: int) -> str:
        """Return the text in the border for a pane of ``width`` cells; may be empty."""
        raise NotImplementedError

    def lines(self, width: int, height: int) -> Sequence[Text]:
        """Return the lines for the given size; longer lines are wrapped at word boundaries."""
        raise NotImplementedError

    @property
    def text(self) -> str:
        """All lines as drawn."""
        return "\n".join(line.plain for line in self._lines)

    def next_view(self) -> None:
        """Show the next view, cyclically."""
        self.view = self.VIEWS[(self.VIEWS.index(self.view) + 1) % len(self.VIEWS)]
        self.scroll_to_top()
        self.draw()

    def scroll_to_top(self) -> None:
        """Scroll to the first line."""
        self.scroll_home(animate=False, immediate=True)

    def move(self, delta: int) -> None:
        """Scroll by ``delta`` lines."""
        # immediate: otherwise one of two quick key presses is lost
        self.scroll_relative(y=delta, animate=False, immediate=True)

    def page(self, direction: int) -> None:
        """Scroll by one page."""
        self.scroll_relative(y=direction * self.size.height, animate=False, immediate=True)

    def ends(self, direction: int) -> None:
        """Scroll to the top or the bottom."""
        self.scroll_to(y=0 if direction < 0 else self.max_scroll_y, animate=False, immediate=True)

    def on_resize(self, event: events.Resize) -> None:
        """Redraw for the new size."""
        self.draw()

    def draw(self) -> None:
        """Compute the lines again and redraw them."""
        self.set_title(self.title_text(self.outer_size.width), self.view)
        width, console = max(self.room, 20), self.app.console
        lines = map(literal, self.lines(width, max(self.size.height, 4)))
        self._lines = [
            part for line in lines for part in ((line,) if line.cell_len <= width else line.wrap(console, width))
        ]
        self.set_height(len(self._lines))
        self.refresh()

    def render_line(self, y: int) -> Strip:
        """Render one line of the widget."""
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
        """Return the text selected with the mouse."""
        return selection.extract(self.text), "\n"

    def selection_updated(self, selection: Selection | None) -> None:
        """Redraw the selection."""
        self.refresh()
