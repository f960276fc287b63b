"""Bar with the four-line answer of a comparison, visible if the terminal is tall enough."""

from collections.abc import Sequence

from rich.text import Text
from textual import events
from textual.widgets import Static

from tapscope.core.formatting import middle
from tapscope.dashboard.model.fact import Fact
from tapscope.dashboard.widgets.literal_text import literal

_LABEL = 6
"""Width of the label at the start of a line, in columns."""


class AnswerBar(Static):
    """Answer below the status bar: one line per fact, shortened in the middle if too long."""

    def __init__(self) -> None:
        super().__init__("", id="answer", markup=False)
        self._facts: Sequence[Fact] = ()

    def set_answer(self, facts: Sequence[Fact]) -> None:
        """Show the facts of another answer."""
        self._facts = facts
        self.set_class(bool(facts), "-known")
        self._draw()

    @property
    def is_complete(self) -> bool:
        """Whether every line is visible in full; computed from the screen size, so valid before layout."""
        return not self.screen.has_class("-low") and all(len(fact.text) <= self._room for fact in self._facts)

    def on_resize(self, event: events.Resize) -> None:
        """Redraw for the new size."""
        self._draw()

    @property
    def _room(self) -> int:
        return max(self.screen.size.width - _LABEL - 2, 8)

    def _draw(self) -> None:
        lines = [
            Text(f" {fact.label:<{_LABEL}}", style="bold").append(middle(fact.text, self._room), style="not bold")
            for fact in self._facts
        ]
        self.update(Text("\n").join(map(literal, lines)), layout=False)
