"""Screen with the bookmarks of all runs, to open, copy or delete one."""

from collections.abc import Callable, Sequence

from rich.text import Text
from textual import events
from textual.app import ComposeResult

from tapscope.core.errors import ConfigError
from tapscope.core.formatting import middle, plural
from tapscope.dashboard.bookmarks import Bookmark, Bookmarks
from tapscope.dashboard.keymap import BOOKMARK_KEYS, KeySpec, bindings
from tapscope.dashboard.screens.list_screen import ListScreen
from tapscope.dashboard.widgets.row_list import RowList

BOOKMARKS = "bookmarks"


class BookmarkList(RowList):
    """List of bookmarks with names and links; bookmarks of runs that are not open are dimmed."""

    def __init__(self, is_open: Callable[[Bookmark], bool]) -> None:
        super().__init__(BOOKMARKS)
        self._is_open = is_open
        self.bookmarks: Sequence[Bookmark] = ()

    def set_bookmarks(self, bookmarks: Sequence[Bookmark]) -> None:
        """Show the bookmarks, with those of the open runs first."""
        self.bookmarks = sorted(bookmarks, key=self._is_open, reverse=True)
        self.set_num_rows(len(self.bookmarks), self.cursor)

    def format_row(self, row: int, width: int) -> Text:
        """Format a bookmark: ``wrong scale   target/model.layers.2.mlp.down_proj:out@0.0[5,42]``."""
        shown = self.bookmarks[row]
        label = min(max(len(each.name) for each in self.bookmarks), max(width // 3, 8))
        line = Text(f"{middle(shown.name, label):<{label}}  ")
        line.append(middle(shown.link, max(width - label - 2, 8)))
        if not self._is_open(shown):
            line.stylize("dim")
        return line


class BookmarksScreen(ListScreen[Bookmark]):
    """Bookmark list over another screen, to which the chosen bookmark is returned."""

    BINDINGS = bindings(BOOKMARK_KEYS)
    list: BookmarkList

    def __init__(self, store: Bookmarks, specs: Sequence[KeySpec], is_open: Callable[[Bookmark], bool]) -> None:
        """``is_open`` returns whether a bookmark belongs to the runs on the screen; ``specs`` have the user's keys."""
        super().__init__()
        self._store, self._is_open = store, is_open
        self._key = {spec.id: spec.shown.split(" ")[0] for spec in specs}

    def compose(self) -> ComposeResult:
        """Yield the list."""
        yield BookmarkList(self._is_open)

    def on_mount(self) -> None:
        """Read the bookmark file."""
        self.list = self.query_one(BookmarkList)
        self.list.focus()
        self._read()

    def _read(self) -> None:
        try:
            bookmarks, problem = self._store.read(), ""
        except ConfigError as error:
            bookmarks, problem = (), str(error)
        self.list.empty_text = problem or f"No bookmarks. {self._key['bookmark']} sets one."
        self.list.set_bookmarks(bookmarks)
        keys = ((self._key[id], word) for id, word in _ACTIONS.items())
        self.list.set_title(plural(len(bookmarks), "bookmark"), "  ".join(f"{key} {word}" for key, word in keys))

    @property
    def _chosen(self) -> Bookmark | None:
        return self.list.bookmarks[self.list.cursor] if self.list.bookmarks else None

    def action_open_bookmark(self) -> None:
        """Return the bookmark under the cursor to the screen below."""
        self.dismiss(self._chosen)

    def on_click(self, event: events.Click) -> None:
        """Open a bookmark on double click."""
        if event.chain == 2:
            self.action_open_bookmark()

    def action_delete_bookmark(self) -> None:
        """Delete the bookmark under the cursor."""
        if self._chosen is None:
            return
        try:
            self._store.remove(self._chosen.name)
        except ConfigError as error:
            self.list.set_title(str(error))
            return
        self._read()

    def action_copy(self) -> None:
        """Copy the link of the bookmark under the cursor."""
        if self._chosen is not None:
            self.app.copy_to_clipboard(self._chosen.link)
            self.list.set_title(f"copied: {self._chosen.link}")


_ACTIONS = {"open_bookmark": "open", "delete_bookmark": "delete", "copy": "copy link", "back": "back"}
