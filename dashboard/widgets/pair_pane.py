"""PairPane: the finding under the cursor as measures, tokens or values."""

from collections.abc import Sequence

from rich.text import Text
from textual import events
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.widgets import Static

from tapscope.comparator import Closeup, Finding
from tapscope.dashboard import pair
from tapscope.dashboard.keys import PAIR
from tapscope.dashboard.widgets.titles import plain_title
from tapscope.text import site as shorten

VIEWS = ("measures", "tokens", "values")


class PairPane(VerticalScroll, can_focus=True, inherit_bindings=False):
    """Right lower pane of the diff screen."""

    def __init__(self) -> None:
        super().__init__(id=PAIR, classes="pane")
        self.view = VIEWS[0]
        self.finding: Finding | None = None
        self.closeup: Closeup | None = None
        self._step: int | None = None
        self._above: Sequence[str] = ()
        self._note = ""

    def compose(self) -> ComposeResult:
        """One text."""
        yield Static("", id="pair-text", markup=False)

    def show(self, finding: Finding | None, step: int | None, above: Sequence[str], note: str) -> None:
        """Show another finding; its rows follow by :meth:`set_closeup`. ``above`` stands before it."""
        self.finding, self._step, self._above, self._note, self.closeup = finding, step, above, note, None
        self.scroll_home(animate=False)
        self.draw()

    def set_closeup(self, closeup: Closeup | None, note: str = "") -> None:
        """Add the rows, or say why there are none."""
        self.closeup, self._note = closeup, note
        self.draw()

    def next_view(self) -> None:
        """Measures, tokens, values, and around."""
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
        site = self.finding.site if self.finding else ""
        self.border_title = plain_title(shorten(site, max(self.outer_size.width - 8, 16)))
        self.border_subtitle = plain_title(self.view)
        lines = (
            self._lines(width, height) if self.finding else [Text("Choose a finding to see both sides.", style="dim")]
        )
        self.query_one("#pair-text", Static).update(Text("\n").join(lines))

    def _lines(self, width: int, height: int) -> list[Text]:
        finding, seen = self.finding, self.closeup
        assert finding is not None
        note = [Text(self._note, style="dim")] if self._note else []
        if self.view == "measures" or seen is None:
            strip = [pair.strip_line(seen, self._step, width)] if seen is not None else []
            above = [Text(line) for line in self._above]
            return [*above, *pair.measure_lines(finding, width), *strip, *note, *pair.note_lines(finding, width)]
        if self.view == "tokens":
            return [pair.strip_line(seen, self._step, width), *pair.token_lines(seen, self._step, width, height * 4)]
        return [*pair.value_lines(seen, width), pair.strip_line(seen, self._step, width)]
