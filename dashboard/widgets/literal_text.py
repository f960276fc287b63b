"""Literal rendering of strings from files: markup and control characters have no effect on the terminal."""

from rich.text import Text
from textual.content import Content

from tapscope.core.formatting import printable


def plain_title(text: str) -> Content | None:
    """Return a border title without markup; None if ``text`` is empty."""
    return Content(printable(text)) if text else None


def literal(text: Text) -> Text:
    """Replace control characters of ``text`` in place by visible ones of the same width, and return it."""
    text.plain = printable(text.plain)
    return text
