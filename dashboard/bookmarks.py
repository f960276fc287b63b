"""Bookmarks: named links to places in runs, kept in the user's state directory."""

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
    """A place and its name."""

    name: str
    link: str
    """Permalink."""
    runs: tuple[str, ...]
    """Paths of the run, or of baseline and target, that were open."""


@dataclass(frozen=True, slots=True)
class _File:
    schema: str
    bookmarks: tuple[Bookmark, ...]


def bookmarks_path() -> Path:
    """``tapscope/bookmarks.json`` in the user's state directory."""
    return state_path("bookmarks.json")


def path_text(path: Path) -> str:
    """A path that ``tapscope view`` opens from any working directory: an absolute path, or a URL."""
    return str(path) if url_of(path) is not None else str(path.absolute())


class Bookmarks:
    """The bookmarks of one file, which several processes may change."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> tuple[Bookmark, ...]:
        """In the order in which they were set; empty without a file. Raises ConfigError."""
        file = read_state(self.path, _File, SCHEMA, MAX_BYTES)
        return file.bookmarks if file is not None else ()

    def add(self, bookmark: Bookmark) -> None:
        """Append a bookmark; one of the same name is replaced. Raises ConfigError."""
        if not 0 < len(bookmark.name) <= MAX_NAME:
            raise ConfigError(f"a bookmark needs a name of 1 to {MAX_NAME} characters")
        self._change(lambda known: (*(each for each in known if each.name != bookmark.name), bookmark))

    def remove(self, name: str) -> None:
        """Delete the bookmark of this name, if there is one. Raises ConfigError."""
        self._change(lambda known: tuple(each for each in known if each.name != name))

    def _change(self, change: Callable[[tuple[Bookmark, ...]], tuple[Bookmark, ...]]) -> None:
        """Read and write under a lock, as another process may do so too."""
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.with_suffix(".lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                text = msgspec.json.format(msgspec.json.encode(_File(SCHEMA, change(self.read()))))
                with replacing(self.path) as file:
                    file.write(text)
        except OSError as error:
            raise ConfigError(f"cannot write {self.path}: {error.strerror or error}") from None
