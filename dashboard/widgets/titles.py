"""Titles: text in a border, taken literally (a plain string would be read as markup)."""

from textual.content import Content


def plain_title(text: str) -> Content | None:
    """The title, or None for an empty one."""
    return Content(text) if text else None
