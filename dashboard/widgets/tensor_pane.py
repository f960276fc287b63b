"""TensorPane: the record under the cursor as statistics, histogram or values."""

from collections.abc import Sequence

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Static

from tapscope.dashboard import paint
from tapscope.dashboard.digest import Digest
from tapscope.dashboard.keys import TENSOR
from tapscope.dashboard.rows import RowMap
from tapscope.dashboard.widgets.titles import plain_title
from tapscope.record import Record
from tapscope.text import site as shorten

VIEWS = ("stats", "histogram", "values")


class TensorPane(VerticalScroll, can_focus=True, inherit_bindings=False):
    """Right lower pane of the browse screen."""

    def __init__(self) -> None:
        super().__init__(id=TENSOR, classes="pane")
        self.view = VIEWS[0]
        self.record: Record | None = None
        self.digest: Digest | None = None
        self._rows: RowMap | None = None
        self._facts: list[str] = []
        self._note = ""

    def compose(self) -> ComposeResult:
        """One text."""
        yield Static("", id="tensor-text", markup=False)

    def show(self, record: Record | None, rows: RowMap | None, facts: list[str], note: str) -> None:
        """Show another record; its values follow by :meth:`set_digest`. ``note`` says what is with the values."""
        self.record, self._rows, self._facts, self._note, self.digest = record, rows, facts, note, None
        self.scroll_home(animate=False)
        self.draw()

    def set_digest(self, digest: Digest | None, note: str = "") -> None:
        """Add the values, or say why there are none."""
        self.digest, self._note = digest, note
        self.draw()

    def next_view(self) -> None:
        """Statistics, histogram, values, and around."""
        self.view = VIEWS[(VIEWS.index(self.view) + 1) % len(VIEWS)]
        self.scroll_home(animate=False)
        self.draw()

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
        """Write the text anew for the size at hand."""
        width, height = max(self.size.width - 1, 20), max(self.size.height, 4)
        self._draw_title()
        lines = self._lines(width, height) if self.record else [Text("Choose a record to see its tensor.", style="dim")]
        self.query_one("#tensor-text", Static).update(Text("\n").join(lines))

    def _draw_title(self) -> None:
        title = ""
        if self.record is not None:
            facts = " · ".join(self._facts)
            site = shorten(self.record.key.site, max(self.outer_size.width - len(facts) - 9, 16))
            title = f"{site} · {facts}"
        self.border_title = plain_title(title)
        self.border_subtitle = plain_title(self.view)

    def _lines(self, width: int, height: int) -> Sequence[Text]:
        record, digest = self.record, self.digest
        assert record is not None
        note = [Text(self._note)] if self._note else []
        if self.view == "stats" or digest is None:
            head = paint.what_lines(record, self._rows, width)
            stats = paint.stats_lines(record, width) if record.dtype else []
            return [*head, *stats, *(paint.summary_lines(digest, width) if digest else []), *note]
        if self.view == "histogram":
            return [*paint.histogram_lines(digest.histogram, width, height), *note]
        lines = paint.corner_lines(digest.corner, self._rows, width, max(height - 3, 5))
        lines += paint.summary_lines(digest, width)[1:]
        if digest.around_bad is not None:
            lines += [Text("around it:", style="dim"), *paint.corner_lines(digest.around_bad, self._rows, width, 9)]
        return [*lines, *note]
