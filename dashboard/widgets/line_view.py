"""LineView: lines below a title, of which only the visible ones are ever drawn."""

from rich.console import Console, ConsoleOptions, RenderResult
from rich.style import Style
from rich.text import Text
from textual.geometry import Size
from textual.scroll_view import ScrollView
from textual.scrollbar import ScrollBar, ScrollBarRender
from textual.strip import Strip

from tapscope.dashboard.widgets.literal_text import literal, plain_title


class _BlankWhereAllIsVisible(ScrollBarRender):
    """Scrollbars of panes are always there: one that came or went would lay out the whole screen twice."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self.window_size:
            yield from super().__rich_console__(console, options)


ScrollBar.renderer = _BlankWhereAllIsVisible


class LineView(ScrollView, can_focus=True, inherit_bindings=False):
    """Base of every pane."""

    def __init__(self, id: str) -> None:
        super().__init__(id=id, classes="pane")
        self._titles = ("", "")

    def set_title(self, title: str, subtitle: str = "") -> None:
        """Text in the border."""
        if (title, subtitle) != self._titles:  # drawing a border draws every line
            self._titles = title, subtitle
            self.border_title, self.border_subtitle = plain_title(title), plain_title(subtitle)

    @property
    def room(self) -> int:
        """Cells of a line without the scrollbar."""
        return self.scrollable_content_region.width

    def set_height(self, height: int) -> None:
        """Of all lines. To change the size in Textual's way would lay out the whole screen."""
        if not self.container_size.height:  # not laid out yet
            self.virtual_size = Size(1, height)
            return
        self.set_reactive(LineView.virtual_size, Size(1, height))
        self.vertical_scrollbar.window_virtual_size = height
        self.scroll_y = self.validate_scroll_y(self.scroll_y)

    def strip(self, text: Text, style: Style) -> Strip:
        """A line of the whole width."""
        strip = Strip(literal(text).render(self.app.console)).apply_style(style)
        return strip.adjust_cell_length(self.room, style)
