"""Files in the user's state directory, which persist viewer settings between sessions."""

import os
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec

from tapscope.core.errors import ConfigError
from tapscope.core.regular_files import read_small


class HasSchema(Protocol):
    """Content of a state file."""

    @property
    def schema(self) -> str:
        """Name and version of the format: ``tapscope.NAME/N``."""


Content = TypeVar("Content", bound=HasSchema)


def state_path(name: str) -> Path:
    """Return the path ``tapscope/NAME`` in the user's state directory."""
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "tapscope" / name


def read_state(path: Path, kind: type[Content], schema: str, max_bytes: int) -> Content | None:
    """Return the decoded content of a state file; None if it does not exist.

    Raises ConfigError for a file that cannot be read, is larger than ``max_bytes``, or has another schema.
    """
    try:
        content = msgspec.json.decode(read_small(path, max_bytes), type=kind)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
    if content.schema != schema:
        raise ConfigError(f"cannot read {path}: unknown schema {content.schema!r}, expected {schema!r}")
    return content
