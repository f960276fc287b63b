"""Screen to choose the columns of a list."""

from collections.abc import Callable, Sequence

from rich.text import Text
from textual import events
from textual.app import ComposeResult

from tapscope.dashboard.keymap import COLUMN_KEYS, KeySpec, bindings
from tapscope.dashboard.screens.list_screen import ListScreen
from tapscope.dashboard.widgets.row_list import RowList

COLUMNS = "columns"


class _Names(RowList):
    def __init__(self, names: Sequence[str], shown: set[str]) -> None:
        super().__init__(COLUMNS)
        self.names, self.shown = names, shown

    def format_row(self, row: int, width: int) -> Text:
        """Format a column name with its state: ``[x] rms``."""
        name = self.names[row]
        return Text(f"[{'x' if name in self.shown else ' '}] {name}"[:width])


class ColumnsScreen(ListScreen[None]):
    """Column chooser over a list, to which each change is applied immediately."""

    BINDINGS = bindings(COLUMN_KEYS)
    list: _Names

    def __init__(
        self,
        names: Sequence[str],
        shown: Sequence[str],
        choose: Callable[[Sequence[str] | None], Sequence[str]],
        specs: Sequence[KeySpec],
    ) -> None:
        """``choose`` applies the chosen columns, or the default ones for None, and returns the columns now shown."""
        super().__init__()
        self._names, self._shown, self._choose = names, set(shown), choose
        self._key = {spec.id: spec.shown.split(" ")[0] for spec in specs}

    def compose(self) -> ComposeResult:
        """Yield the list."""
        yield _Names(self._names, self._shown)

    def on_mount(self) -> None:
        """Show the names."""
        self.list = self.query_one(_Names)
        self.list.focus()
        self.list.set_num_rows(len(self._names), 0)
        keys = (f"{self._key[id]} {word}" for id, word in _ACTIONS.items())
        self.list.set_title("columns", "  ".join(keys))

    def action_toggle_column(self) -> None:
        """Show or hide the column under the cursor."""
        shown = self._shown ^ {self._names[self.list.cursor]}
        self._set([name for name in self._names if name in shown])

    def action_usual_columns(self) -> None:
        """Show as many default columns as fit."""
        self._set(None)

    def _set(self, columns: Sequence[str] | None) -> None:
        self._shown.clear()
        self._shown.update(self._choose(columns))
        self.list.refresh()

    def on_click(self, event: events.Click) -> None:
        """Toggle a column on double click."""
        if event.chain == 2:
            self.action_toggle_column()


_ACTIONS = {"toggle_column": "show or hide", "usual_columns": "usual ones", "back": "back"}
