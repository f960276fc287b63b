"""Address of one value, identical in the terminal, the web page and the report."""

import re
from dataclasses import dataclass
from urllib.parse import quote, unquote

from tapscope.core.errors import ConfigError
from tapscope.core.formatting import printable

_FORM = re.compile(r"(?P<run>[^/]*)/(?P<site>.+)@(?P<step>\d+)\.(?P<rank>\d+)(?P<index>\[(?:\d+(?:,\d+)*)?\])?")


@dataclass(frozen=True, slots=True)
class Permalink:
    """Link to a record or element: ``run/site@step.rank[row,col]``."""

    run: str
    """Name of the run, without its parent directory."""
    site: str
    step: int
    rank: int = 0
    index: tuple[int, ...] | None = None
    """Index along every axis of the recorded tensor; None for the whole tensor."""

    def __str__(self) -> str:
        """Return the link as text, with unsafe characters percent-encoded.

        ``%`` is encoded too, and ``/`` in the name of the run.
        """
        index = "" if self.index is None else f"[{','.join(map(str, self.index))}]"
        return f"{_encoded(self.run, '/%')}/{_encoded(self.site, '%')}@{self.step}.{self.rank}{index}"


def parse_permalink(text: str) -> Permalink:
    """Parse a link; inverse of ``str(permalink)``. Raises ConfigError."""
    match = _FORM.fullmatch(text)
    if match is None:
        raise ConfigError(
            f"invalid link {text!r}: expected RUN/SITE@STEP.RANK or RUN/SITE@STEP.RANK[ROW,COL], "
            "e.g. base/layers.3.mlp:out@0.0[5,17]"
        )
    index = match["index"]
    places = None if index is None else tuple(int(each) for each in index[1:-1].split(",") if each)
    return Permalink(unquote(match["run"]), unquote(match["site"]), int(match["step"]), int(match["rank"]), places)


def _encoded(text: str, reserved: str) -> str:
    """Percent-encode the characters in ``reserved``, and characters that a terminal would interpret."""
    return "".join(
        quote(char, safe="", errors="replace") if char in reserved or printable(char) != char else char for char in text
    )
