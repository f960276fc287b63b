"""The user's choice of columns per list, stored in the user's state directory."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from tapscope.core.errors import ConfigError
from tapscope.core.regular_files import replacing
from tapscope.dashboard.state_file import read_state, state_path

SCHEMA = "tapscope.columns/1"
_MAX_BYTES = 1 << 16


class _File(msgspec.Struct, frozen=True):
    schema: str
    lists: dict[str, tuple[str, ...]]


def columns_path() -> Path:
    """Return the path ``tapscope/columns.json`` in the user's state directory."""
    return state_path("columns.json")


class ColumnChoice:
    """Chosen columns per list, stored in one file; without a file, kept in memory only."""

    def __init__(self, path: Path | None) -> None:
        """Read the choices; raise ConfigError for a file that cannot be read."""
        self._path = path
        file = read_state(path, _File, SCHEMA, _MAX_BYTES) if path is not None else None
        self._lists = file.lists if file is not None else {}

    def of(self, name: str) -> tuple[str, ...] | None:
        """Return the chosen columns of the list called ``name``; None if it shows as many default columns as fit."""
        return self._lists.get(name)

    def set(self, name: str, columns: Sequence[str] | None) -> None:
        """Choose the columns of a list; None restores the default. Raises ConfigError if the file cannot be written."""
        self._lists = {each: chosen for each, chosen in self._lists.items() if each != name}
        if columns is not None:
            self._lists[name] = tuple(columns)
        if self._path is not None:
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                with replacing(self._path) as file:
                    file.write(msgspec.json.format(msgspec.json.encode(_File(SCHEMA, self._lists))))
            except OSError as error:
                raise ConfigError(f"cannot write {self._path}: {error.strerror or error}") from None
