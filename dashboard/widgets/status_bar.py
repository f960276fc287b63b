"""Status bar with the run and its state, and key bar with the keys that currently have an effect."""

from collections.abc import Sequence

from rich.text import Text
from textual import events
from textual.widgets import Static

from tapscope.core.formatting import middle
from tapscope.dashboard.keymap import KeySpec
from tapscope.dashboard.model.run_data import Header
from tapscope.dashboard.widgets.literal_text import literal


class StatusBar(Static):
    """First line of the screen: name, facts and state. Facts are dropped if space is short, the state never."""

    def __init__(self) -> None:
        super().__init__("", id="status", markup=False)
        self._header: Header | None = None

    def set_header(self, header: Header) -> None:
        """Show the header of another run or comparison."""
        self._header = header
        self._draw()

    def on_resize(self, event: events.Resize) -> None:
        """Redraw for the new size."""
        self._draw()

    def _draw(self) -> None:
        header = self._header
        if header is not None:
            self.update(literal(status_line(header, self.size.width)), layout=False)


def status_line(header: Header, width: int) -> Text:
    """Format one line of exactly ``width`` cells; longer only if the state alone does not fit."""
    state = header.state
    if header.missing and width >= 100:
        room = max(width - len(state) - len(header.name) - 24, 20)
        state += f": {_reason(header, room)}"
    left = f" tapscope  {middle(header.name, max(width - len(state) - 14, 8))}"
    facts = ""
    for fact in header.facts:
        longer = f"{facts} · {fact}" if facts else f"   {fact}"
        if len(left) + len(longer) + len(state) + 3 > width:
            break
        facts = longer
    gap = max(width - len(left) - len(facts) - len(state) - 1, 1)
    line = Text(left, style="bold").append(facts, style="not bold").append(" " * gap)
    return line.append(state, style="bold" if header.state == "ON DISK" else "bold reverse").append(" ")


def _reason(header: Header, room: int) -> str:
    """Return the first site that differs and the missing data, as far as both fit."""
    if not header.difference:
        return middle(header.missing[0], room)
    prefix, reason = f"{header.difference}; on partial data: ", header.missing[0]
    left = room - len(prefix)
    return prefix + middle(reason, left) if left >= min(len(reason), 20) else middle(header.difference, room)


class KeyBar(Static):
    """Last line of the screen: keys that currently have an effect, or a message."""

    def __init__(self) -> None:
        super().__init__("", id="keys", markup=False)
        self._specs: Sequence[KeySpec] = ()
        self.said = ""
        """Message in place of the keys, until the next action."""

    def set_keys(self, specs: Sequence[KeySpec]) -> None:
        """Show these keys and remove the message."""
        if self.said or specs != self._specs:
            self._specs, self.said = specs, ""
            self._draw()

    def say(self, sentence: str) -> None:
        """Show a message in place of the keys."""
        self.said = sentence
        self._draw()

    def on_resize(self, event: events.Resize) -> None:
        """Redraw for the new size."""
        self._draw()

    def _draw(self) -> None:
        line = literal(Text(f" {self.said}", style="bold")) if self.said else key_line(self._specs, self.size.width)
        self.update(line, layout=False)


def key_line(specs: Sequence[KeySpec], width: int) -> Text:
    """Format the keys: ``/ find  [ ] step  ? help``.

    Adjacent keys with the same label share the label. The last two (help, quit) always fit.
    """
    groups: list[tuple[str, str]] = []
    for spec in specs:
        key = spec.shown.split(" ")[0]
        if groups and groups[-1][1] == spec.label:
            groups[-1] = (f"{groups[-1][0]} {key}", spec.label)
        else:
            groups.append((key, spec.label))
    first, last = groups[:-2], groups[-2:]
    room = width - 1 - sum(len(key) + len(label) + 3 for key, label in last)
    shown = []
    for key, label in first:
        room -= len(key) + len(label) + 3
        if room < 0:
            break
        shown.append((key, label))
    line = Text(" ")
    for key, label in [*shown, *last]:
        line.append(key, style="bold").append(f" {label}  ")
    return line
