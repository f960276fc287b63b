"""Width: the lines of a report, and their display width."""

from collections.abc import Iterator
from typing import NamedTuple

_NARROW = dict.fromkeys(map(ord, "…×Δ·"))
"""Non-ASCII characters of our own that take one column each."""


class Line(NamedTuple):
    """One line of the report; rich's own class would require importing rich even without color."""

    plain: str
    style: str = ""
    """Style in rich's syntax."""


def display_width(shown: str) -> int:
    """Return the number of screen columns that a string takes."""
    if shown.isascii() or shown.translate(_NARROW).isascii():
        return len(shown)
    from rich.cells import cell_len  # lazy import: loading its tables is slow

    return cell_len(shown)


def wrap_line(line: Line, width: int, indent: int) -> Iterator[Line]:
    """Yield the line, broken between words if it is too long; continuation lines start in column ``indent``."""
    shown, is_empty = line.plain[:indent], True
    for word in line.plain[indent:].split(" "):
        if not is_empty and display_width(shown) + 1 + display_width(word) > width:
            yield Line(shown.rstrip(), line.style)
            shown, is_empty = " " * indent, True
        if word or not is_empty:
            shown += word if is_empty else f" {word}"
            is_empty = False
    yield Line(shown, line.style)
