"""RemotePath: a path that represents an fsspec URL."""

import re
from pathlib import Path, PosixPath

_URL = re.compile(r"([a-z][a-z0-9+.-]+):/+(.*)", re.DOTALL)


class RemotePath(PosixPath):
    """A path displayed as the URL it represents; it does not exist in the local filesystem."""

    def __str__(self) -> str:
        return _normalized(super().__str__())


def path_of(text: str) -> Path:
    """Return the path of a run, a :class:`RemotePath` if ``text`` is a URL."""
    return Path(text) if url_of(text) is None else RemotePath(text)


def url_of(path: str | Path) -> str | None:
    """Return the URL that ``path`` represents, even after :class:`~pathlib.Path` has collapsed its slashes; None for a
    local path."""
    text = str(path)
    return _normalized(text).rstrip("/") if _URL.fullmatch(text) and not Path(text).exists() else None


def _normalized(text: str) -> str:
    match = _URL.fullmatch(text)
    if match is None:
        return text
    return f"{match[1]}://{'/' if match[1] in ('file', 'local') else ''}{match[2]}"
