"""Width: lines of a report, and their display width."""

from collections.abc import Iterator
from typing import NamedTuple

_NARROW = dict.fromkeys(map(ord, "…×Δ·"))
"""Our own characters beyond ASCII: one column each."""


class Line(NamedTuple):
    """One line of the report; rich's own class would have to be imported even without colour."""

    plain: str
    style: str = ""
    """Style in rich's syntax."""


def display_width(shown: str) -> int:
    """Return the number of columns that a string takes on a screen."""
    if shown.isascii() or shown.translate(_NARROW).isascii():
        return len(shown)
    from rich.cells import cell_len  # its tables take longer to load than everything else here

    return cell_len(shown)


def wrap_line(line: Line, width: int, indent: int) -> Iterator[Line]:
    """Yield the line, broken between words if it is too long; continuation lines begin in column ``indent``."""
    shown, is_empty = line.plain[:indent], True
    for word in line.plain[indent:].split(" "):
        if not is_empty and display_width(shown) + 1 + display_width(word) > width:
            yield Line(shown.rstrip(), line.style)
            shown, is_empty = " " * indent, True
        if word or not is_empty:
            shown += word if is_empty else f" {word}"
            is_empty = False
    yield Line(shown, line.style)
