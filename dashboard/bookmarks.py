"""Named links to places in runs, stored in the user's state directory."""

import fcntl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from tapscope.core.errors import ConfigError
from tapscope.core.regular_files import replacing
from tapscope.dashboard.state_file import read_state, state_path
from tapscope.remote import url_of

SCHEMA = "tapscope.bookmarks/1"
MAX_BYTES = 4 << 20
MAX_NAME = 100


@dataclass(frozen=True, slots=True)
class Bookmark:
    """A named link to a place in a run or a comparison."""

    name: str
    link: str
    """A permalink, as text."""
    runs: tuple[str, ...]
    """Paths of the open run, or of baseline and target, when the bookmark was set."""


@dataclass(frozen=True, slots=True)
class _File:
    schema: str
    bookmarks: tuple[Bookmark, ...]


def bookmarks_path() -> Path:
    """Return the path ``tapscope/bookmarks.json`` in the user's state directory."""
    return state_path("bookmarks.json")


def path_text(path: Path) -> str:
    """Return the path as text that ``tapscope view`` accepts from any working directory: an absolute path, or a URL."""
    return str(path) if url_of(path) is not None else str(path.absolute())


class Bookmarks:
    """The bookmarks stored in one file, which several processes may modify."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> tuple[Bookmark, ...]:
        """Return the bookmarks in the order in which they were set; empty if the file does not exist. Raises
        ConfigError."""
        file = read_state(self.path, _File, SCHEMA, MAX_BYTES)
        return file.bookmarks if file is not None else ()

    def add(self, bookmark: Bookmark) -> None:
        """Append a bookmark, replacing one with the same name. Raises ConfigError."""
        if not 0 < len(bookmark.name) <= MAX_NAME:
            raise ConfigError(f"a bookmark needs a name of 1 to {MAX_NAME} characters")
        self._change(lambda known: (*(each for each in known if each.name != bookmark.name), bookmark))

    def remove(self, name: str) -> None:
        """Delete the bookmark with this name, if it exists. Raises ConfigError."""
        self._change(lambda known: tuple(each for each in known if each.name != name))

    def _change(self, change: Callable[[tuple[Bookmark, ...]], tuple[Bookmark, ...]]) -> None:
        """Apply ``change`` to the file under a lock, because another process may be writing too."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                text = msgspec.json.format(msgspec.json.encode(_File(SCHEMA, change(self.read()))))
                with replacing(self.path) as file:
                    file.write(text)
        except OSError as error:
            raise ConfigError(f"cannot write {self.path}: {error.strerror or error}") from None
