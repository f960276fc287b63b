"""Text from files on the screen, taken literally: neither markup nor control characters in it have an effect."""

from rich.text import Text
from textual.content import Content

from tapscope.core.formatting import printable


def plain_title(text: str) -> Content | None:
    """The title of a border, or None for an empty one."""
    return Content(printable(text)) if text else None


def literal(text: Text) -> Text:
    """The text, its control characters replaced in place by visible ones of the same width."""
    text.plain = printable(text.plain)
    return text
