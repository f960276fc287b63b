"""HTML tables for notebooks, safe for names from untrusted files."""

from collections.abc import Iterable, Sequence
from html import escape

from tapscope.core.formatting import printable


def html_table(rows: Iterable[Sequence[str]], header: Sequence[str] = (), title: str = "") -> str:
    """Return an HTML table; markup and control characters in cells are escaped and displayed as text."""
    head = f"<thead>{_row(header, 'th')}</thead>" if header else ""
    body = "".join(_row(row, "td") for row in rows)
    caption = f"<caption>{_text(title)}</caption>" if title else ""
    return f"<table>{caption}{head}<tbody>{body}</tbody></table>"


def _row(cells: Iterable[str], tag: str) -> str:
    shown = "".join(f'<{tag} style="text-align:left">{_text(cell)}</{tag}>' for cell in cells)
    return f"<tr>{shown}</tr>"


def _text(text: str) -> str:
    return escape(printable(text))
