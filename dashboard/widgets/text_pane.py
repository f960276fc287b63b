"""TextPane: a scrolling text about one thing, in several views."""

from collections.abc import Sequence
from typing import ClassVar

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Static

from tapscope.dashboard.widgets.literal_text import literal, plain_title


class TextPane(VerticalScroll, can_focus=True, inherit_bindings=False):
    """Base of the lower panes. Subclasses say what is in the title and in the text."""

    VIEWS: ClassVar[tuple[str, ...]]

    def __init__(self, id: str) -> None:
        super().__init__(id=id, classes="pane")
        self.view = self.VIEWS[0]
        self._titles = ("", "")
        self._num_rows = 0
        """Of the text; where they fit before and after, nothing is laid out again."""

    def compose(self) -> ComposeResult:
        """One text."""
        yield Static("", id=f"{self.id}-text", markup=False)

    def title_text(self, width: int) -> str:
        """What stands in the border, ``width`` cells wide; empty for nothing."""
        raise NotImplementedError

    def lines(self, width: int, height: int) -> Sequence[Text]:
        """The text for the size at hand."""
        raise NotImplementedError

    def next_view(self) -> None:
        """The next view, and around."""
        self.view = self.VIEWS[(self.VIEWS.index(self.view) + 1) % len(self.VIEWS)]
        self.scroll_to_top()
        self.draw()

    def scroll_to_top(self) -> None:
        """Show the first line."""
        if self.scroll_offset.y:  # scrolling draws everything
            self.scroll_home(animate=False)

    def move(self, delta: int) -> None:
        """Scroll by lines."""
        self.scroll_relative(y=delta, animate=False)

    def page(self, direction: int) -> None:
        """Scroll by a page."""
        self.scroll_relative(y=direction * self.size.height, animate=False)

    def ends(self, direction: int) -> None:
        """Scroll to the top or the bottom."""
        self.scroll_to(y=0 if direction < 0 else self.max_scroll_y, animate=False)

    def on_resize(self, event: events.Resize) -> None:
        """What fits has changed."""
        self.draw()

    def draw(self) -> None:
        """Redraw the text."""
        titles = self.title_text(self.outer_size.width), self.view
        if titles != self._titles:
            self._titles = titles
            self.border_title, self.border_subtitle = map(plain_title, titles)
        width = max(self.size.width - 1, 20)
        lines = self.lines(width, max(self.size.height, 4))
        num_rows = sum(max(-(-line.cell_len // width), 1) for line in lines)
        is_taller = num_rows != self._num_rows and max(num_rows, self._num_rows) > self.size.height
        is_wrapped = any(line.cell_len > self.size.width for line in lines)
        self._num_rows = num_rows
        self.query_one(Static).update(Text("\n").join(map(literal, lines)), layout=is_taller or is_wrapped)
