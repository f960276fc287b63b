"""Base of panes: lines below a title, of which only the visible ones are drawn."""

from rich.console import Console, ConsoleOptions, RenderResult
from rich.style import Style
from rich.text import Text
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.scrollbar import ScrollBar, ScrollBarRender
from textual.strip import Strip

from tapscope.dashboard.widgets.literal_text import literal, plain_title


class _BlankWhereAllIsVisible(ScrollBarRender):
    """Scrollbar that is drawn blank while all lines are visible.

    Panes always reserve space for it, because showing or hiding a scrollbar would lay out the whole screen twice.
    """

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.window_size:
            yield from super().__rich_console__(console, options)


ScrollBar.renderer = _BlankWhereAllIsVisible


class LineView(ScrollView, can_focus=True, inherit_bindings=False):
    """Base of all scrolling panes."""

    def __init__(self, id: str) -> None:
        super().__init__(id=id, classes="pane")
        self._titles = ("", "")

    def set_title(self, title: str, subtitle: str = "") -> None:
        """Set the upper and lower border titles."""
        if (title, subtitle) != self._titles:  # redrawing the border redraws all lines
            self._titles = title, subtitle
            self.border_title, self.border_subtitle = plain_title(title), plain_title(subtitle)

    @property
    def room(self) -> int:
        """Width of a line without the scrollbar, in cells."""
        return self.scrollable_content_region.width

    def set_height(self, height: int) -> None:
        """Set the number of lines, bypassing Textual's reactive, which would lay out the whole screen."""
        if not self.container_size.height:  # not laid out yet
            self.virtual_size = Size(1, height)
            return
        self.set_reactive(LineView.virtual_size, Size(1, height))
        self.vertical_scrollbar.window_virtual_size = height
        self.scroll_y = self.validate_scroll_y(self.scroll_y)

    def strip(self, text: Text, style: Style) -> Strip:
        """Render ``text`` as a line of the full width."""
        strip = Strip(literal(text).render(self.app.console)).apply_style(style)
        return strip.adjust_cell_length(self.room, style)
