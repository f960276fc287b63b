"""Screen with all values of a tensor, or of both sides of a finding, and a cursor."""

import math
from collections.abc import Callable, Mapping

from rich.text import Text
from textual import on
from textual.app import ComposeResult
from textual.await_complete import AwaitComplete
from textual.widgets import Static

from tapscope.core.errors import ConfigError, TapscopeError
from tapscope.core.formatting import count
from tapscope.core.formatting import site as shorten
from tapscope.dashboard.keymap import CELL_KEYS, bindings
from tapscope.dashboard.model.overview import Overview
from tapscope.dashboard.model.permalink import Permalink, parse_permalink
from tapscope.dashboard.model.tile import cell
from tapscope.dashboard.model.token_strip import TokenStrip
from tapscope.dashboard.model.value_search import find, largest
from tapscope.dashboard.model.value_table import EmptyValueTable, ValueTable, parse_index
from tapscope.dashboard.overview_text import histogram_lines, metrics_text, profile_lines, token_lines
from tapscope.dashboard.screens.tensor_workers import (
    MapReady,
    OverviewReady,
    PlaceFound,
    ReadFailed,
    TensorWorkersScreen,
    TokensReady,
)
from tapscope.dashboard.widgets.line_input import LineInput
from tapscope.dashboard.widgets.literal_text import literal
from tapscope.dashboard.widgets.status_bar import KeyBar
from tapscope.dashboard.widgets.tensor_map import TensorMap
from tapscope.dashboard.widgets.value_grid import CELLS, SIDES, ValueGrid

VIEWS = ("histogram", "magnitudes", "channels", "rows", "tokens")
SUMMARY_LINES = 8
MIN_TITLE = 24
"""Minimum width of the tensor's name in the title, in columns; the list of sides is shown only if this much remains."""
CELL_WORDS = """
Rows read 0:5 for position 5 of request 0, with the id of the token where it is known.
Darker cells differ more, relative to the largest difference around. Bold: not finite.
The map joins neighbors by their maximum: 1 to 9 from the smallest to the largest on a log scale, % not finite,
= equal, of one run ∅ zero."""


class TensorScreen(TensorWorkersScreen):
    """Grid of values, overview of all values, and details of the value under the cursor."""

    SPECS = CELL_KEYS
    BINDINGS = bindings(SPECS)
    WORDS = CELL_WORDS
    PANES = (CELLS,)
    LIST = CELLS
    AUTO_FOCUS = f"#{CELLS}"

    def __init__(
        self,
        table: ValueTable,
        title: str,
        place: tuple[int, int] = (0, 0),
        runs: Mapping[str, str] | None = None,
    ) -> None:
        """``title`` is the site; ``place`` is the initial (row, column); ``runs`` is as :attr:`KeymapScreen.runs`."""
        super().__init__()
        self._take_tensor(table, title, place, runs or {})

    def _take_tensor(self, table: ValueTable, title: str, place: tuple[int, int], runs: Mapping[str, str]) -> None:
        self._place, self._runs = place, dict(runs)
        self.values, self._title, self.pane = table, title, CELLS
        self.view = VIEWS[0]
        self._overview: Overview | None = None
        self._tokens: TokenStrip | None = None
        self._order = "position"
        self._more_than: float | None = None
        self._has_map = False

    def compose(self) -> ComposeResult:
        """Yield title, values, heat map, overview, value under the cursor, input lines, and key bar."""
        yield Static("", id="status", markup=False)
        yield ValueGrid(self.values)
        whole = TensorMap(self.values)
        whole.display = False
        yield whole
        yield Static("", id="summary", markup=False)
        yield Static("", id="value", markup=False)
        yield LineInput(id="find")
        yield LineInput(id="line")
        yield KeyBar()

    def on_mount(self) -> None:
        """Show the tensor with the cursor at the initial position, and compute the overview."""
        self.grid, self.map = self.query_one(ValueGrid), self.query_one(TensorMap)
        self._begin()

    def show(self, table: ValueTable, title: str, place: tuple[int, int], runs: Mapping[str, str]) -> None:
        """Show another tensor on this screen; same arguments as the constructor."""
        self.cancel_workers()
        self._take_tensor(table, title, place, runs)
        if hasattr(self, "grid"):  # otherwise on_mount shows the tensor
            self._begin()

    def _begin(self) -> None:
        self.grid.set_table(self.values)
        self.map.set_table(self.values)
        self.grid.go(*self._place)
        self._show_map(False)
        self.track(self.load_overview(self.values))

    def dismiss(self, result: Permalink | None = None) -> AwaitComplete:
        """Close the screen and release the values; the screen itself is reused for the next tensor."""
        closed = super().dismiss(result)
        self.cancel_workers()
        self._take_tensor(EmptyValueTable(), "", (0, 0), {})
        self.grid.set_table(self.values)
        self.map.set_table(self.values)
        return closed

    def on_resize(self) -> None:
        """Redraw for the new size."""
        self._draw()

    @property
    def active(self) -> ValueGrid | TensorMap:
        """The value grid, or the heat map of the whole tensor."""
        return self.map if self.map.display else self.grid

    @property
    def search_text(self) -> str:
        """Always empty: this screen has no search."""
        return ""

    def search(self, text: str) -> None:
        """Do nothing: this screen has no search."""

    def draw_keys(self) -> None:
        """Show the keys that currently have an effect."""
        works = {"side": self.values.is_pair, "next_above": self._more_than is not None,
                 "token_order": self.view == "tokens", "open_cell": self.map.display}  # fmt: skip
        self.query_one(KeyBar).set_keys([s for s in self.specs if s.label and works.get(s.id, True)])

    # --- answers of the workers -------------------------------------------------------------------

    @on(OverviewReady)
    def _take_overview(self, message: OverviewReady) -> None:
        if self.accept(message):
            self._overview = message.overview
            self._draw()

    @on(TokensReady)
    def _take_tokens(self, message: TokensReady) -> None:
        if self.accept(message):
            self._tokens = message.strip
            self._draw()

    @on(MapReady)
    def _take_map(self, message: MapReady) -> None:
        if not self.accept(message):
            return
        self._has_map = True
        self.map.set_map(message.whole)
        self.map.show_place(self.grid.row, self.grid.column)
        self._draw()

    @on(PlaceFound)
    def _take_place(self, message: PlaceFound) -> None:
        if not self.accept(message):
            return
        if message.place is None:
            self.say(message.nothing)
            return
        self._show_map(False)
        self.grid.go(*message.place)

    @on(ReadFailed)
    def _take_read_failure(self, message: ReadFailed) -> None:
        if not self.accept(message):
            return
        self.say(f"The values cannot be read: {message.error}")

    @on(ValueGrid.Moved)
    @on(TensorMap.Moved)
    def _moved(self) -> None:
        self.draw_keys()
        self._draw()

    def _show_map(self, shown: bool) -> None:
        """Switch between the heat map of the whole tensor and the values."""
        self.map.display, self.grid.display = shown, not shown
        self.active.focus()
        self.draw_keys()
        self._draw()

    # --- keys -------------------------------------------------------------------------------------

    def action_move_column(self, delta: int) -> None:
        """Move the cursor by ``delta`` columns."""
        self.active.move_column(delta)

    def action_column_ends(self, direction: int) -> None:
        """Move the cursor to the first or last column."""
        self.active.column_ends(direction)

    def action_map(self) -> None:
        """Switch between the heat map of the whole tensor and its values."""
        self._show_map(not self.map.display)
        if self.map.display and not self._has_map:
            self.track(self.load_map(self.values))
        else:
            self.map.show_place(self.grid.row, self.grid.column)

    def action_zoom(self) -> None:
        """Go from a cell of the heat map to the largest value in the cell."""
        place = self.map.rectangle
        if self.map.display and place is not None:
            self._search(lambda table: largest(table, *place), "")

    def action_go(self) -> None:
        """Prompt for an index and go there."""
        self.open_line("an index such as 3,17, or a row and a column", "", self._go)

    def _go(self, text: str) -> str:
        try:
            place = self.values.place(parse_index(text))
        except ConfigError as error:
            return str(error)
        self._show_map(False)
        self.grid.go(*place)
        return ""

    def _search(self, search: Callable[[ValueTable], tuple[int, int] | None], nothing: str) -> None:
        self.track(self.load_place(self.values, search, nothing))

    def action_nonfinite(self, direction: int) -> None:
        """Go to the next or previous non-finite value."""
        row, column = self.grid.row, self.grid.column
        word = "after" if direction > 0 else "before"
        self._search(lambda table: find(table, row, column, direction), f"All values {word} this one are finite.")

    def action_threshold(self) -> None:
        """Prompt for the threshold of :meth:`action_above`."""
        self.open_line(f"a number that {self._value_label} exceeds, e.g. 1e-3", "", self._above)

    @property
    def _value_label(self) -> str:
        return "|Δ|" if self.values.is_pair else "|x|"

    def _above(self, text: str) -> str:
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not number >= 0.0:
            return f"invalid number {text!r}: expected a number of at least 0, e.g. 1e-3"
        self._more_than = number
        self.action_above(1)
        return ""

    def action_above(self, direction: int) -> None:
        """Go to the next or previous value above the threshold."""
        number, row, column = self._more_than, self.grid.row, self.grid.column
        if number is None:
            self.action_threshold()
            return
        word = "after" if direction > 0 else "before"
        nothing = f"No {self._value_label} {word} this value is above {number:g}."
        self._search(lambda table: find(table, row, column, direction, number), nothing)

    def action_largest(self) -> None:
        """Go to the largest value."""
        self._search(largest, "")

    def action_side(self) -> None:
        """Cycle through difference, target and baseline."""
        if not self.values.is_pair:
            self.say("This is one run; open two to see differences.")
            return
        self.grid.next_side()
        self._draw()

    def action_view(self) -> None:
        """Show the next view of the overview."""
        self.view = VIEWS[(VIEWS.index(self.view) + 1) % len(VIEWS)]
        if self.view == "tokens" and self._tokens is None:
            self.track(self.load_tokens(self.values, self._order))
        self.draw_keys()
        self._draw()

    def action_token_order(self) -> None:
        """Toggle between tokens sorted by position and by error."""
        self._order = "error" if self._order == "position" else "position"
        self.view = "tokens"
        self.track(self.load_tokens(self.values, self._order))

    @property
    def runs(self) -> dict[str, str]:
        """Runs of the screen below."""
        return self._runs

    @property
    def link(self) -> str:
        """Permalink of the value under the cursor."""
        return self.values.link(self.grid.row, self.grid.column)

    def open_link(self, at: Permalink) -> None:
        """Go to a value of this tensor; any other link is passed to the screen below."""
        here = parse_permalink(self.link)
        if (at.run, at.site) != (here.run, here.site) or (not self.values.is_pair and at.step != here.step):
            self.dismiss(at)
            return
        try:
            place = self.values.place_of(at)
        except ConfigError as error:
            self.say(str(error))
            return
        self._show_map(False)
        self.grid.go(*place)

    def action_copy(self) -> None:
        """Copy the permalink of the value under the cursor."""
        link = self.link
        self.app.copy_to_clipboard(link)
        self.say(f"copied: {link}")

    def action_back(self) -> None:
        """Close the input line, else the heat map, else the screen."""
        if self.map.display and not self.query_one("#line").has_class("-open"):
            self._show_map(False)
        else:
            super().action_back()

    def _key(self, id: str) -> str:
        """Return the first key of an action in display form."""
        return next(spec.shown.split(" ")[0] for spec in self.specs if spec.id == id)

    # --- text -------------------------------------------------------------------------------------

    def _draw(self) -> None:
        if not self.is_mounted or not hasattr(self, "grid"):
            return
        table, width = self.values, max(self.size.width - 2, 20)
        kinds = " → ".join(dict.fromkeys(table.dtypes))
        size = f"{count(table.num_rows)} × {count(table.num_columns)} {kinds}"
        side = f" · {self.grid.side}" if table.is_pair else ""
        room = width - len(size) - len(side) - 5
        sides = f" ({self._key('side')}: {', '.join(SIDES)})" if table.is_pair else ""
        if room - len(sides) >= MIN_TITLE:  # otherwise the name of the tensor takes precedence
            side, room = side + sides, room - len(sides)
        title = literal(Text(f" {shorten(self._title, max(room, 16))} · {size}{side}", style="bold"))
        self.query_one("#status", Static).update(title, layout=False)
        lines = self._summary_lines(width)[:SUMMARY_LINES]
        self.query_one("#summary", Static).update(Text("\n").join(map(literal, lines)), layout=False)
        if self.map.display:
            self.query_one("#value", Static).update(literal(Text(f" {self.map.text()}", style="bold")), layout=False)
            return
        try:
            text = value_text(table, self.grid.row, self.grid.column, width)
        except TapscopeError as error:
            text = f"cannot be read: {error}"
        self.query_one("#value", Static).update(literal(Text(f" {text}", style="bold")), layout=False)

    def _summary_lines(self, width: int) -> list[Text]:
        overview = self._overview
        if overview is None:
            return [Text("Reading all values ...", style="dim")]
        head = Text(
            f"{metrics_text(overview, is_pair=self.values.is_pair)} · {self.view} ({self._key('view')}: more)",
            style="dim",
        )
        sides: tuple[str, ...] = ("baseline", "target") if self.values.is_pair else ("target",)
        if self.view == "histogram":
            return [head, *histogram_lines(overview.values, width, sides)]
        if self.view == "magnitudes":
            sides += ("difference",) if self.values.is_pair else ()
            return [head, *histogram_lines(overview.magnitudes, width, sides)]
        if self.view == "tokens":
            return [head, *token_lines(self._tokens, width, self._key("token_order"))]
        cells = overview.channels if self.view == "channels" else overview.rows
        return [head, *profile_lines(cells, overview.what, width)]


def value_text(table: ValueTable, row: int, column: int, width: int) -> str:
    """Describe the value under the cursor in one line; the sides are not named if ``width`` is too small."""
    at = cell(table, row, column)
    place = at.index or f"row {at.row}, column {at.column}"
    if not table.is_pair:
        return f"{place} · {at.label} · {at.target}"
    ulps = "" if at.ulps == "-" else f" · {at.ulps} ULP"
    where, difference = f"{place} · step {table.step(row)}, {at.label} · ", f" · Δ {at.difference}{ulps}"
    named = f"{where}baseline {at.baseline} · target {at.target}{difference}"
    return named if len(named) <= width else f"{where}{at.baseline} → {at.target}{difference}"
