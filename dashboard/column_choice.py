"""ColumnChoice: which columns of the lists the user has chosen, kept in the user's state directory."""

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
    """``tapscope/columns.json`` in the user's state directory."""
    return state_path("columns.json")


class ColumnChoice:
    """The choices of one file; those of this process only, without a file."""

    def __init__(self, path: Path | None) -> None:
        """Raises ConfigError for a file that cannot be read."""
        self._path = path
        file = read_state(path, _File, SCHEMA, _MAX_BYTES) if path is not None else None
        self._lists = file.lists if file is not None else {}

    def of(self, name: str) -> tuple[str, ...] | None:
        """Columns of the list of this name; None where those that fit are shown."""
        return self._lists.get(name)

    def set(self, name: str, columns: Sequence[str] | None) -> None:
        """Choose columns, or with None those that fit. Raises ConfigError if the file cannot be written."""
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
