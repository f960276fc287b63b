"""Base of all screens with panes: actions of the shared keys, search line, bookmarks, and column choice."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import cached_property, partial
from typing import ClassVar, Protocol

from textual import events, on
from textual.widgets import Input

from tapscope.core.errors import ConfigError
from tapscope.core.site import module_of
from tapscope.dashboard import messages
from tapscope.dashboard.bookmarks import MAX_NAME, Bookmark, Bookmarks
from tapscope.dashboard.column_choice import ColumnChoice
from tapscope.dashboard.keymap import BOOKMARK_KEYS, COLUMN_KEYS, KeySpec, effective
from tapscope.dashboard.model.permalink import Permalink, parse_permalink
from tapscope.dashboard.screens.bookmarks import BookmarksScreen
from tapscope.dashboard.screens.columns import ColumnsScreen
from tapscope.dashboard.screens.worker_screen import WorkerScreen
from tapscope.dashboard.widgets.column_list import ColumnList
from tapscope.dashboard.widgets.status_bar import KeyBar

TENSOR = "tensor"
"""Name under which the single tensor screen is installed."""


class Pane(Protocol):
    """Pane that can have the focus."""

    def focus(self, scroll_visible: bool = True) -> object:
        """Focus the pane."""

    def move(self, delta: int) -> None:
        """Move the cursor by ``delta`` lines."""

    def page(self, direction: int) -> None:
        """Move the cursor by one page."""

    def ends(self, direction: int) -> None:
        """Move the cursor to the first or last line."""


class KeymapScreen(WorkerScreen):
    """Screen of panes, one of which is focused, with a search line."""

    PANES: ClassVar[tuple[str, ...]]
    """Widget ids of the panes, in tab order."""
    LIST: ClassVar[str]
    """Pane that shows the results of a search."""
    SPECS: ClassVar[Sequence[KeySpec]]
    """Actions of the screen."""
    pane: str
    overrides: Mapping[str, str] = {}
    """The user's key bindings, see :func:`.keymap.parse_overrides`."""
    bookmarks: Bookmarks | None = None
    """Store of bookmarks; None if bookmarks are disabled."""
    columns: ColumnChoice
    """The user's choice of columns."""
    _handle_line: Callable[[str], str]
    """Handler of the input line; returns an error message, or an empty string on success."""

    @cached_property
    def specs(self) -> tuple[KeySpec, ...]:
        """Actions of this screen with the user's key bindings."""
        return effective(self.overrides, self.SPECS)

    @property
    def active(self) -> Pane:
        """The focused pane."""
        raise NotImplementedError

    @property
    def search_text(self) -> str:
        """Text of the active search; empty if there is none."""
        raise NotImplementedError

    def search(self, text: str) -> None:
        """Show the matches of a search; an empty ``text`` ends the search."""
        raise NotImplementedError

    def say(self, sentence: str) -> None:
        """Show a message in place of the key bar until the next action."""
        self.query_one(KeyBar).say(sentence)

    def draw_keys(self) -> None:
        """Show the keys that currently have an effect."""
        raise NotImplementedError

    def activate(self, pane: str) -> None:
        """Focus a pane."""
        if pane != self.pane:  # class changes are slow: Textual matches the style rules of all widgets again
            self.remove_class(f"-at-{self.pane}", update=False)
            self.add_class(f"-at-{pane}")
            self.pane = pane
        self.active.focus()
        self.draw_keys()

    def action_move(self, delta: int) -> None:
        """Move the cursor by ``delta`` lines."""
        self.active.move(delta)

    def action_page(self, direction: int) -> None:
        """Move the cursor by one page."""
        self.active.page(direction)

    def action_ends(self, direction: int) -> None:
        """Move the cursor to the first or last line."""
        self.active.ends(direction)

    def action_pane(self, direction: int) -> None:
        """Focus the next or previous pane."""
        self.activate(self.PANES[(self.PANES.index(self.pane) + direction) % len(self.PANES)])

    def on_click(self, event: events.Click) -> None:
        """Focus the clicked pane."""
        clicked = event.widget.ancestors_with_self if event.widget is not None else ()
        pane = next((node.id for node in clicked if node.id in self.PANES), None)
        if pane is not None:
            self.activate(pane)

    def action_find(self) -> None:
        """Open the search line."""
        line = self.query_one("#find", Input)
        # without a search, all items are shown already
        with nullcontext() if self.search_text else line.prevent(Input.Changed):
            line.value = ""
        line.add_class("-open")
        self.query_one(KeyBar).display = False  # the search line takes its place, so that no pane is resized
        line.focus()

    @on(Input.Changed, "#find")
    def _find_changed(self, event: Input.Changed) -> None:
        if self.query_one("#find").has_class("-open"):
            self.search(event.value.strip())

    @on(Input.Submitted, "#find")
    def _find_submitted(self) -> None:
        self._close_find()

    def _close_find(self) -> None:
        self.query_one("#find").remove_class("-open")
        self.query_one(KeyBar).display = True
        self.activate(self.LIST)

    def open_line(self, placeholder: str, value: str, take: Callable[[str], str]) -> None:
        """Prompt for a line of input; ``take`` handles it and returns an error message if it is invalid."""
        line = self.query_one("#line", Input)
        line.placeholder, line.value, self._handle_line = placeholder, value, take
        line.add_class("-open")
        line.focus()

    @on(Input.Submitted, "#line")
    def _line_submitted(self, event: Input.Submitted) -> None:
        problem = self._handle_line(event.value.strip())
        if problem:
            self.say(problem)
        else:
            self._close_line()

    def _close_line(self) -> None:
        said = self.query_one(KeyBar).said
        self.query_one("#line").remove_class("-open")
        self.activate(self.LIST)
        if said:
            self.say(said)

    def action_back(self) -> None:
        """Close the input line, else end the search, else end the zoom."""
        if self.query_one("#line").has_class("-open"):
            self._close_line()
            return
        is_open = self.query_one("#find").has_class("-open")
        if is_open:
            self._close_find()
        if self.search_text:
            self.search("")
        elif not is_open:
            self.remove_class("-zoomed")
            self.draw_keys()

    def action_zoom(self) -> None:
        """Show the focused pane on the whole screen, or all panes again."""
        self.toggle_class("-zoomed")
        self.draw_keys()

    @on(messages.TableOpened)
    def _take_table(self, message: messages.TableOpened) -> None:
        """Show all values of a tensor on the tensor screen."""
        from tapscope.dashboard.screens.tensor import TensorScreen

        if not self.accept(message):
            return
        if message.table is None or not message.table.num_rows or not message.table.num_columns:
            nothing = "No values to show: they are equal, empty, or were not kept."
            self.say(f"The values cannot be read: {message.problem}" if message.problem else nothing)
            return
        shown = message.table, message.title, message.place, self.runs
        if self.app.is_screen_installed(TENSOR):  # reusing the screen saves composing it: 13 of 20 ms
            screen = self.app.get_screen(TENSOR, TensorScreen)
            screen.show(*shown)
        else:
            screen = TensorScreen(*shown)
            self.app.install_screen(screen, TENSOR)
        if screen not in self.app.screen_stack:
            self.push(screen)

    @on(messages.ModulesReady)
    def _take_modules(self, message: messages.ModulesReady) -> None:
        """Show the module graph on its own screen."""
        from tapscope.dashboard.screens.modules import ModulesScreen

        if self.accept(message):
            self.push(ModulesScreen(message.graph, message.link_of, self.runs, module_of(self.site)))

    def push(self, screen: "KeymapScreen") -> None:
        """Push another screen with the same key bindings and bookmarks; open the permalink that it returns."""
        screen.overrides, screen.bookmarks = self.overrides, self.bookmarks
        self.app.push_screen(screen, self._open_chosen)

    def _open_chosen(self, at: Permalink | None) -> None:
        if at is not None:
            self.open_link(at)

    # --- bookmarks --------------------------------------------------------------------------------

    @property
    def runs(self) -> dict[str, str]:
        """Path -> name of the run, or of baseline and target, on the screen; empty while they are read."""
        raise NotImplementedError

    @property
    def site(self) -> str:
        """Site under the cursor; empty if there is none."""
        return ""

    @property
    def link(self) -> str:
        """Permalink of the place under the cursor; empty if there is none."""
        raise NotImplementedError

    def open_link(self, at: Permalink) -> None:
        """Show the place that a permalink to one of these runs refers to."""
        raise NotImplementedError

    def action_bookmark(self) -> None:
        """Prompt for a name and bookmark the place under the cursor."""
        link = self.link
        if not link or self.bookmarks is None:
            self.say("Nothing here to bookmark.")
        else:
            self.open_line("name of the bookmark", link.partition("/")[2][:MAX_NAME], partial(self._bookmark, link))

    def _bookmark(self, link: str, name: str) -> str:
        assert self.bookmarks is not None
        try:
            self.bookmarks.add(Bookmark(name, link, tuple(self.runs)))
        except ConfigError as error:
            return str(error)
        self.say(f"bookmarked: {name}")
        return ""

    def action_bookmarks(self) -> None:
        """Open the list of bookmarks."""
        if self.bookmarks is not None:
            specs = (*self.specs, *effective(self.overrides, BOOKMARK_KEYS))
            self.app.push_screen(BookmarksScreen(self.bookmarks, specs, self._is_open), self._open_bookmark)

    def _is_open(self, bookmark: Bookmark) -> bool:
        try:
            run = parse_permalink(bookmark.link).run
        except ConfigError:
            return False
        return any(self.runs.get(path) == run for path in bookmark.runs)

    def _open_bookmark(self, bookmark: Bookmark | None) -> None:
        if bookmark is None:
            return
        if not self._is_open(bookmark):
            command = shlex.join(["tapscope", "view", *bookmark.runs, "--at", bookmark.link])
            self.app.copy_to_clipboard(command)
            self.say(f"This bookmark is of another run; copied: {command}")
            return
        self.open_link(parse_permalink(bookmark.link))

    # --- columns ----------------------------------------------------------------------------------

    def show_chosen_columns(self, table: ColumnList) -> None:
        """Show the columns that the user chose earlier for a list."""
        assert table.id is not None
        if (columns := self.columns.of(table.id)) is not None:
            table.choose(columns)

    def open_columns(self, table: ColumnList) -> None:
        """Open the column chooser of a list."""

        def choose(columns: Sequence[str] | None) -> Sequence[str]:
            assert table.id is not None
            table.choose(columns)
            try:
                self.columns.set(table.id, columns)
            except ConfigError as error:
                self.notify(f"chosen for now: {error}", severity="warning", markup=False)
            return self._columns_of(table)

        specs = effective(self.overrides, COLUMN_KEYS)
        self.app.push_screen(ColumnsScreen(table.COLUMNS, self._columns_of(table), choose, specs))

    @staticmethod
    def _columns_of(table: ColumnList) -> Sequence[str]:
        return table.usual() if table.chosen is None else table.chosen

    async def action_quit(self) -> None:
        """Exit the app."""
        self.app.exit()
