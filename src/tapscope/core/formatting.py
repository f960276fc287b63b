"""Shared formatting of numbers, sizes, shapes and sites for every report and screen."""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any


def number(value: float | None) -> str:
    """Format with two significant digits, e.g. ``1.9e+00``; ``0`` for zero, ``-`` for None."""
    if value is None:
        return "-"
    if math.isnan(value) or math.isinf(value):
        return str(value)
    return "0" if value == 0 else f"{value:.1e}"


def count(value: int) -> str:
    """Format with thousands separators: ``1132`` -> ``1,132``."""
    return f"{value:,}"


def plural(value: int, noun: str) -> str:
    """Format a count with its noun: ``1 record``, ``1,132 records``."""
    return f"{value:,} {noun}{'' if value == 1 else 's'}"


def listed(items: Sequence[object], limit: int = 4) -> str:
    """Join the first ``limit`` items and count the rest: ``q, k, v, o and 3 more``."""
    shown = ", ".join(map(str, items[:limit]))
    return f"{shown} and {len(items) - limit:,} more" if len(items) > limit else shown


def size(nbytes: float) -> str:
    """Format bytes in decimal units, with one decimal below ten: ``58 MB``, ``1.2 GB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if nbytes < 1000:
            return f"{nbytes:.1f} {unit}" if nbytes < 10 and unit != "B" else f"{nbytes:.0f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.1f} TB"


BLOCKS = "▁▂▃▄▅▆▇█"


def duration(seconds: float) -> str:
    """Format a time with three significant digits: ``1.5 s``, ``45 ms``, ``120 µs``."""
    scale, unit = (1.0, "s") if seconds >= 1.0 or seconds == 0.0 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
    value = seconds * scale
    return f"{value:,.0f} {unit}" if value >= 99.95 else f"{value:.3g} {unit}"


def block(value: float, top: float) -> str:
    """Return the block character for ``value`` relative to ``top``, in eighths of a cell; ``·`` for zero."""
    if value <= 0 or top <= 0:
        return "·"
    return BLOCKS[min(math.floor(value / top * len(BLOCKS)), len(BLOCKS) - 1)]


def shape(sizes: Iterable[int]) -> str:
    """Format a shape: ``(7, 1024)`` -> ``7×1024``; ``scalar`` for no axes."""
    return "×".join(map(str, sizes)) or "scalar"


def site(text: str, width: int) -> str:
    """Shorten a site to ``width`` but keep its layer: ``…layers.12.….o_proj:out``; without a layer, cut the middle."""
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
    """Shorten ``text`` to ``width`` by cutting its middle; two thirds go to the tail, which identifies a site."""
    if len(text) <= width:
        return text
    if width <= 3:
        return text[len(text) - width :]
    tail = (width - 1) * 2 // 3
    return f"{text[: width - 1 - tail]}…{text[len(text) - tail :]}"


def short(value: object, width: int = 60) -> str:
    """Return ``repr(value)`` for a message, truncated to ``width`` characters."""
    written = repr(value)
    return written if len(written) <= width else f"{written[:width]}…"


_UNSAFE = "\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff"
"""Control characters (C0, DEL, C1), line separators, bidirectional marks and surrogates. Terminals interpret them, they
change the displayed order of text, or they cannot be encoded."""
_is_unsafe = re.compile(f"[{_UNSAFE}]").search
_each_unsafe = re.compile(f"[{_UNSAFE}]").sub


def printable(text: str) -> str:
    """Replace every character that a terminal would interpret by a visible one; the length is unchanged.

    Control characters become Unicode control pictures (``␛`` for ESC, ``␊`` for a newline), others become ``\ufffd``.

    Everything printed or drawn passes through here, because names come from untrusted files.
    """
    return text if text.isprintable() else _each_unsafe(_picture, text)


def _picture(match: re.Match[str]) -> str:
    code = ord(match[0])
    return chr(0x2400 + code) if code < 0x20 else "\u2421" if code == 0x7F else "\ufffd"


def json_line(item: dict[str, Any]) -> str:
    """Serialize an object to one line of JSON: non-finite numbers become null, unsafe characters (see
    :func:`printable`) are escaped, e.g. as ``\\u009b``."""
    try:
        line = _ENCODE(item)
    except ValueError:
        line = _ENCODE(finite_or_none(item))
    return _each_unsafe(lambda match: f"\\u{ord(match[0]):04x}", line) if _is_unsafe(line) else line


_ENCODE = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


def finite_or_none(value: Any) -> Any:
    """Return a copy of ``value`` for JSON: non-finite floats become None, tuples become lists."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): finite_or_none(item) for key, item in value.items()}
    return [finite_or_none(item) for item in value] if isinstance(value, list | tuple) else value


def did_you_mean(word: str, known: Iterable[str], synonyms: Mapping[str, str] = MappingProxyType({})) -> str:
    """Return `` (did you mean diff?)`` if a known word is similar to ``word``, otherwise an empty string.

    Leading dashes are ignored. ``synonyms`` maps a word used by other tools, without dashes, to a replacement; the
    first word of the replacement must be in ``known``.
    """
    import difflib  # imported lazily: slow to import, rarely needed

    bare, named = word.lstrip("-"), {each.lstrip("-"): each for each in known}
    other = synonyms.get(bare, "")
    if other and other.split()[0].strip("-,") in named:
        return f" (did you mean {other}?)"
    near = difflib.get_close_matches(bare, list(named), 1, 0.6)
    return f" (did you mean {named[near[0]]}?)" if near else ""
