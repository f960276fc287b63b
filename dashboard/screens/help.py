"""Scrollable text over another screen, and the help screen that lists all keys."""

from collections.abc import Iterable, Iterator, Sequence
from textwrap import wrap

from rich.console import Console
from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from tapscope.dashboard.keymap import BY_ID, KeySpec, bindings
from tapscope.dashboard.widgets.line_input import LineInput
from tapscope.dashboard.widgets.literal_text import literal, plain_title

BROWSE_WORDS = """
Glyphs: % holds nan or inf, ∅ is all zeros, > the cursor (› in a pane without the keys), ▾ ▸ folds.
Blocks ▁▂▃▄▅▆▇█ are the largest |x| of each row, % a row with a non-finite value, · a row of zeros.
A tensor's rows read 0:5 for position 5 of request 0."""
DIFF_WORDS = """
Glyphs: = same, ~ close (no more than rounding explains), ! differs, # cannot be compared,
% NaN or infinity on one side, < only in the baseline, > only in the target, · nothing compared, ◂ the culprit.
Heat map: 1 to 9 are decades above the noise floor, so 3 is up to 1,000 × what rounding explains.
error ÷ floor above 1 is more than rounding explains. Rows read 0:5 for position 5 of request 0."""

_HELP_CELLS = 58
"""Width of a help line, without its key column."""
_AROUND_TEXT = 6
"""Columns taken by border, padding and scroll bar."""


def help_text(specs: Sequence[KeySpec], pane: str, words: str = BROWSE_WORDS) -> Text:
    """Return the help: every action once, with its id for ``--key ID=KEYS``, grouped by pane.

    ``words`` is the explanation of the rest of the screen, appended at the end.
    """
    here = [spec for spec in specs if pane in spec.panes]
    everywhere = [spec for spec in specs if not spec.panes]
    elsewhere = [spec for spec in specs if spec.panes and pane not in spec.panes]
    text = Text()
    for heading, group in ((f"In this pane ({pane})", here), ("Everywhere", everywhere), ("In other panes", elsewhere)):
        if group:
            text.append(f"{heading}\n", style="bold")
        for spec in group:
            text.append(f"  {spec.shown:<10}", style="bold")
            first, *more = wrap(f"{spec.help}  ({spec.id})", _HELP_CELLS)
            text.append(f" {first}\n").append("".join(f"{'':13}{line}\n" for line in more))
    return text.append(words.strip("\n"))


def _wrap_with_indent(line: Text, console: Console, width: int, indent: int) -> Iterator[Text]:
    """Wrap a line at word boundaries if it exceeds ``width``; continuation lines are indented by ``indent``."""
    if line.cell_len <= width:
        yield line
        return
    first = line.wrap(console, width)[0]
    yield first
    rest = line[len(first) :]
    for part in rest[len(rest.plain) - len(rest.plain.lstrip()) :].wrap(console, width - indent):
        yield Text(" " * indent) + part


class TextScreen(ModalScreen[None]):
    """Scrollable text over another screen; esc, q or ? closes it."""

    BINDINGS = bindings(
        BY_ID[i] for i in ("up", "down", "page_up", "page_down", "first", "last", "back", "help", "account", "quit")
    )

    def __init__(self, title: str, text: Text, *, indent: int | None = None) -> None:
        """With ``indent``, use the full width and indent continuation lines; None shows a narrow box."""
        super().__init__(classes=None if indent is None else "-wide-text")
        self._title, self._text, self._indent = title, text, indent

    def compose(self) -> ComposeResult:
        """Yield one scrolling text box."""
        with VerticalScroll(id="help") as box:
            box.border_title = plain_title(f"{self._title} · esc closes")
            box.can_focus = False
            yield Static(self._wrapped(), id="help-text", markup=False)

    def _wrapped(self) -> Text:
        lines: Iterable[Text] = self._text.split(allow_blank=True)
        if self._indent is not None:
            width = max(self.app.size.width - _AROUND_TEXT, 2 * self._indent)
            lines = [part for line in lines for part in _wrap_with_indent(line, self.app.console, width, self._indent)]
        return Text("\n").join(map(literal, lines))

    def on_resize(self) -> None:
        """Wrap the lines for the new size."""
        if self._indent is not None:
            self.query_one("#help-text", Static).update(self._wrapped())

    def action_move(self, delta: int) -> None:
        """Scroll by ``delta`` lines."""
        self.query_one("#help").scroll_relative(y=delta, animate=False, immediate=True)

    def action_page(self, direction: int) -> None:
        """Scroll by one page."""
        box = self.query_one("#help")
        box.scroll_relative(y=direction * box.size.height, animate=False, immediate=True)

    def action_ends(self, direction: int) -> None:
        """Scroll to the top or the bottom."""
        box = self.query_one("#help")
        box.scroll_to(y=0 if direction < 0 else box.max_scroll_y, animate=False, immediate=True)

    def action_back(self) -> None:
        """Close the text."""
        self.dismiss()

    action_help = action_back
    action_account = action_back

    async def action_quit(self) -> None:
        """Close the text instead of the app; q on the screen below quits."""
        self.dismiss()


class HelpScreen(TextScreen):
    """Help that lists the keys of the screen below; / searches."""

    BINDINGS = bindings([BY_ID["find"]])
    AUTO_FOCUS = ""

    def __init__(self, specs: Sequence[KeySpec], pane: str, words: str = BROWSE_WORDS) -> None:
        find = next((spec.shown for spec in specs if spec.id == "find"), BY_ID["find"].shown)
        super().__init__(f"help · {find} searches", help_text(specs, pane, words))
        self._specs, self._pane, self._words = specs, pane, words

    def compose(self) -> ComposeResult:
        """Yield the list of keys and the search line."""
        yield from super().compose()
        yield LineInput(placeholder="part of a key, an id or a description", id="help-find")

    def action_find(self) -> None:
        """Open the search line."""
        line = self.query_one("#help-find", Input)
        line.add_class("-open")
        line.focus()

    @on(Input.Changed, "#help-find")
    def _find_changed(self, event: Input.Changed) -> None:
        part = event.value.strip().lower()
        specs = [spec for spec in self._specs if part in f"{spec.shown} {spec.id} {spec.help} {spec.label}".lower()]
        text = help_text(specs, self._pane, "" if part else self._words) if specs else Text(f"No key matches {part!r}.")
        self.query_one("#help-text", Static).update(Text("\n").join(map(literal, text.split(allow_blank=True))))

    @on(Input.Submitted, "#help-find")
    def _find_submitted(self) -> None:
        self.query_one("#help-find").remove_class("-open")
        self.set_focus(None)

    def action_back(self) -> None:
        """End the search if one is active, else close the help."""
        line = self.query_one("#help-find", Input)
        if line.has_class("-open") or line.value:
            line.value = ""
            self._find_submitted()
        else:
            self.dismiss()
