"""One way to print numbers, bytes, shapes and sites, for every report and screen."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any


def number(value: float | None) -> str:
    """Two significant digits, never shortened further: ``1.9e+00``; ``0`` for zero, ``-`` for None."""
    if value is None:
        return "-"
    if math.isnan(value) or math.isinf(value):
        return str(value)
    return "0" if value == 0 else f"{value:.1e}"


def count(value: int) -> str:
    """``1132`` -> ``1,132``."""
    return f"{value:,}"


def plural(value: int, noun: str) -> str:
    """``1 record``, ``1,132 records``."""
    return f"{value:,} {noun}{'' if value == 1 else 's'}"


def listed(items: Sequence[object], limit: int = 4) -> str:
    """The first ``limit`` items and the number of the others: ``q, k, v, o and 3 more``."""
    shown = ", ".join(map(str, items[:limit]))
    return f"{shown} and {len(items) - limit:,} more" if len(items) > limit else shown


def size(nbytes: float) -> str:
    """Decimal units with one decimal below ten: ``58 MB``, ``1.2 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.1f} {unit}" if nbytes < 10 and unit != "B" else f"{nbytes:.0f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


BLOCKS = "▁▂▃▄▅▆▇█"


def duration(seconds: float) -> str:
    """``1.5 s``, ``45 ms``, ``120 µs``: three digits."""
    scale, unit = (1.0, "s") if seconds >= 1.0 or seconds == 0.0 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
    value = seconds * scale
    return f"{value:,.0f} {unit}" if value >= 99.95 else f"{value:.3g} {unit}"


def block(value: float, top: float) -> str:
    """The height of ``value`` relative to ``top``, in eighths of a cell; ``·`` for zero."""
    if value <= 0 or top <= 0:
        return "·"
    return BLOCKS[min(math.floor(value / top * len(BLOCKS)), len(BLOCKS) - 1)]


def shape(sizes: Iterable[int]) -> str:
    """``(7, 1024)`` -> ``7×1024``; ``scalar`` for no axes."""
    return "×".join(map(str, sizes)) or "scalar"


def site(text: str, width: int) -> str:
    """Shorten a site and keep its layer: ``…layers.12.….o_proj:out``; without a layer, cut the middle."""
    if len(text) <= width:
        return text
    match = re.search(r"(?:^|\.)((?:(?!\d+\.)[^.:]*\.)?\d+)(?=[.:])", text)
    if match is None:
        return middle(text, width)
    for layer in (match[1], match[1].rpartition(".")[2]):
        if len(shown := f"…{layer}{text[match.end() :]}") <= width:
            return shown
    head = f"…{layer}{text[match.end()]}"
    return head + middle(text[match.end() + 1 :], width - len(head)) if width - len(head) >= 8 else middle(text, width)


def middle(text: str, width: int) -> str:
    """Cut the middle: the tail of a site identifies it."""
    if len(text) <= width:
        return text
    if width <= 3:
        return text[len(text) - width :]
    tail = (width - 1) * 2 // 3
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def short(value: object, width: int = 60) -> str:
    """``repr`` for a message, cut after ``width`` characters."""
    written = repr(value)
    return written if len(written) <= width else f"{written[:width]}…"


_UNSAFE = "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff"
"""Control characters (C0, DEL, C1), line separators, marks of bidirectional text, surrogates: terminals
interpret them, they change what a reader sees, or they cannot be encoded."""
_is_unsafe = re.compile(f"[{_UNSAFE}]").search
_each_unsafe = re.compile(f"[{_UNSAFE}]").sub


def printable(text: str) -> str:
    """The string with every character that a terminal would interpret replaced by a visible one, of equal length:
    control characters by their Unicode control pictures (``␛`` for ESC, ``␊`` for a newline), the others by ``\ufffd``.

    Everything printed or drawn passes through here, because names come from untrusted files.
    """
    return text if text.isprintable() else _each_unsafe(_picture, text)


def _picture(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"


def json_line(item: dict[str, Any]) -> str:
    """One object on one line; numbers that are not finite become null, as JSON has none; unsafe characters (see
    :func:`printable`) are escaped as ``\\u009b``."""
    try:
        line = _ENCODE(item)
    except ValueError:
        line = _ENCODE(finite_or_none(item))
    return _each_unsafe(lambda match: f"\\u{ord(match[0]):04x}", line) if _is_unsafe(line) else line


_ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def finite_or_none(value: Any) -> Any:
    """``value``, with None for numbers in it that are not finite, as JSON has none; tuples become lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite_or_none(item) for key, item in value.items()}
    return [finite_or_none(item) for item in value] if isinstance(value, list | tuple) else value


def did_you_mean(word: str, known: Iterable[str], synonyms: Mapping[str, str] = MappingProxyType({})) -> str:
    """`` (did you mean diff?)`` where a known word is near, else nothing; the dashes of flags do not count.

    ``synonyms``: a word of other tools, without dashes -> what to write here; its first word must be known.
    """
    import difflib  # takes a while, and few lines are wrong

    bare, named = word.lstrip("-"), {each.lstrip("-"): each for each in known}
    other = synonyms.get(bare, "")
    if other and other.split()[0].strip("-,") in named:
        return f" (did you mean {other}?)"
    near = difflib.get_close_matches(bare, list(named), 1, 0.6)
    return f" (did you mean {named[near[0]]}?)" if near else ""
