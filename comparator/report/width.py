"""Screen: lines of a report, as wide as what they are shown on."""

from collections.abc import Iterator
from typing import NamedTuple

_NARROW = dict.fromkeys(map(ord, "…×Δ·"))
"""What our own texts have beyond ASCII: one column each."""


class Line(NamedTuple):
    """One line of the report; rich's own would have to be imported where nobody sees a colour."""

    plain: str
    style: str = ""
    """As rich has it."""


def display_width(shown: str) -> int:
    """Columns that a text takes on a screen."""
    if shown.isascii() or shown.translate(_NARROW).isascii():
        return len(shown)
    from rich.cells import cell_len  # its tables take longer to load than all else here

    return cell_len(shown)


def wrap_line(line: Line, width: int, indent: int) -> Iterator[Line]:
    """The line, broken between words where it is too long; what follows begins in column ``indent``."""
    shown, is_empty = line.plain[:indent], True
    for word in line.plain[indent:].split(" "):
        if not is_empty and display_width(shown) + 1 + display_width(word) > width:
            yield Line(shown.rstrip(), line.style)
            shown, is_empty = " " * indent, True
        if word or not is_empty:
            shown += word if is_empty else f" {word}"
            is_empty = False
    yield Line(shown, line.style)
