"""Rule options: parsing, checking and formatting of the words after ``GLOB=KEEP``."""

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from tapscope.core import dtypes
from tapscope.core.errors import RuleError
from tapscope.dumper.rules.byte_size import parse_size, size_text
from tapscope.dumper.rules.int_ranges import Ranges

KINDS = ("in", "out", "tap", "param", "buffer", "grad", "in.grad", "out.grad", "tap.grad", "param.grad")
PASSES = ("forward", "recompute", "backward")
MAX_TEXT = 16384
"""Maximum length of a rule in characters."""

JSON_TEXT = r'"(?:[^"\\]|\\.)*"'
_HEAD = re.compile(rf"\s*(?P<glob>{JSON_TEXT}|[^\s\"].*?)\s*=\s*(?P<keep>[^\s=]*)(?=\s|$)", re.DOTALL)
_WORD = re.compile(rf"\s+(?P<name>[^\s=\"]+)=(?P<value>(?:{JSON_TEXT}|[^\s\"])*)(?=\s|$)", re.DOTALL)
_WHEN = re.compile(r"\s+when=(?P<value>.*)", re.DOTALL)
_ITEM = re.compile(rf"(?P<quoted>{JSON_TEXT})|(?P<bare>[^\s,\"]+)")


class Bare(str):
    """A string that was written without quotes."""

    __slots__ = ()


def split(text: str) -> tuple[tuple[str, str] | None, list[tuple[str, Bare]]]:
    """Split ``GLOB=KEEP a=b when=c d`` into ((GLOB, KEEP), [(a, b), (when, c d)]); raises RuleError.

    The first item is None if the text does not begin with GLOB=KEEP.
    """
    if len(text) > MAX_TEXT:
        raise RuleError(f"rule {short(text)} has {len(text)} characters; a rule has at most {MAX_TEXT}")
    head = _HEAD.match(text)
    if head is None:
        return None, []
    words, at = [], head.end()
    while text[at:].strip():
        match = _WHEN.match(text, at) or _WORD.match(text, at)
        if match is None:
            raise RuleError(
                f"rule {short(text)}: {short(text[at:].strip())} is not OPTION=VALUE; write e.g. steps=0-99"
            )
        words.append((match.groupdict().get("name", "when"), Bare(match["value"])))
        at = match.end()
    return (unquoted(head["glob"]), head["keep"]), words


def short(text: str) -> str:
    """Return the repr of ``text``, shortened to 120 characters for a message."""
    return repr(text if len(text) <= 120 else f"{text[:117]}...")


def glob_text(glob: str) -> str:
    """Return a glob as written at the beginning of a rule, quoted if it contains special characters."""
    plain = glob and not any(each.isspace() or each in "=\",;'" for each in glob)
    return glob if plain else json.dumps(glob)


def split_outside_quotes(text: str, separator: str, times: int = -1) -> list[str]:
    """Split ``text`` at matches of the regex ``separator`` outside quotes, at most ``times`` times (-1: no limit)."""
    parts: list[str] = []
    at = 0
    for match in re.finditer(rf"\"(?:[^\"\\]|\\.)*\"|'(?:[^'\\]|\\.)*'|(?P<cut>{separator})", text, re.DOTALL):
        if match["cut"] is not None and len(parts) != times:
            parts.append(text[at : match.start()])
            at = match.end()
    return [*parts, text[at:]]


def unquoted(text: str) -> str:
    """Decode a double-quoted JSON string; any other text is returned unchanged."""
    return str(json.loads(text, strict=False)) if text.startswith('"') else text


def items(value: Any) -> list[Any]:
    """Split ``a,"b c"`` into [Bare("a"), "b c"]; a list is copied, and any other value becomes a one-item list.

    Raises ValueError for malformed text.
    """
    if isinstance(value, list | tuple):
        return list(value)
    if not isinstance(value, str):
        return [value]
    values: list[Any] = []
    at = 0
    while True:
        match = _ITEM.match(value, at)
        if match is None:
            raise ValueError("must be values joined by commas, in double quotes where they hold blanks or commas")
        values.append(unquoted(match["quoted"]) if match["quoted"] else Bare(match["bare"]))
        at = match.end()
        if at == len(value):
            return values
        if value[at] != ",":
            raise ValueError(f"{value[at:][:20]!r} is unexpected after {match[0][:40]!r}")
        at += 1


def item_text(value: Any) -> str:
    """Return the text of one item, such that :func:`items` and :func:`scalar` restore the value."""
    if not isinstance(value, str):
        return json.dumps(value)
    return value if _is_bare(value) and scalar(Bare(value)) == value else json.dumps(value)


def _is_bare(value: str) -> bool:
    return re.fullmatch(r"[^\s,;\"']+", value) is not None


def scalar(item: Any) -> Any:
    """Convert an item: a bare number, true, false or null gets its JSON type; strings stay strings.

    Raises ValueError for an item that is not a scalar.
    """
    if isinstance(item, Bare):
        try:
            value = json.loads(item)
        except (ValueError, RecursionError):
            return str(item)
        return value if isinstance(value, bool | int | None) or _finite(value) else str(item)
    if item is None or isinstance(item, bool | int | str) or _finite(item):
        return item
    raise ValueError(f"{item!r} must be a string, a finite number, true, false or null")


def _finite(value: Any) -> bool:
    return isinstance(value, float) and math.isfinite(value)


# ---- option types ---------------------------------------------------------------------------------------


class Option(NamedTuple):
    """The rule field of an option, with functions to parse its value from items and to format it."""

    field: str
    read: Callable[[list[Any]], Any]
    write: Callable[[Any], str]


def _single(values: Sequence[Any]) -> Any:
    if len(values) != 1:
        raise ValueError("must be one value")
    return values[0]


def _positive(values: Sequence[Any]) -> int:
    value = scalar(_single(values))
    if isinstance(value, str) and value.isdecimal() and len(value) < 19:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError("must be an integer ≥ 1")
    return value


def _texts(values: Sequence[Any]) -> tuple[str, ...]:
    if not values or not all(isinstance(item, str) and item for item in values):
        raise ValueError("must be strings joined by commas")
    return tuple(map(str, values))


def _among(known: Iterable[str]) -> Callable[[Sequence[Any]], tuple[str, ...]]:
    known = tuple(known)

    def read(values: Sequence[Any]) -> tuple[str, ...]:
        words = tuple(word.removeprefix("torch.") for word in _texts(values))
        if wrong := [word for word in words if word not in known]:
            raise ValueError(f"{wrong[0]!r} must be one of {', '.join(known)}")
        return words

    return read


def _slice(values: Sequence[Any]) -> tuple[int | None, int | None, int | None]:
    text = _single(values)
    match = re.fullmatch(r"(-?\d{1,18})?:(-?\d{1,18})?(?::(\d{1,18})?)?", text) if isinstance(text, str) else None
    if match is None or (match[3] is not None and int(match[3]) < 1):
        raise ValueError("must be START:STOP or START:STOP:STEP as in Python, with a STEP from 1, e.g. 0:16 or -1:")
    start, stop, step = (None if part is None else int(part) for part in match.groups())
    return start, stop, step


def _slice_text(value: tuple[int | None, int | None, int | None]) -> str:
    parts = ["" if part is None else str(part) for part in value]
    return ":".join(parts if value[2] is not None else parts[:2])


def _join(values: Iterable[str]) -> str:
    # The values of these options are always strings, so that digits need no quotes.
    return ",".join(value if _is_bare(value) else json.dumps(value) for value in values)


_RANGES = (Ranges.parse, str)
_LIST = (_texts, _join)
_SIZE = (lambda values: parse_size(_single(values)), size_text)

OPTIONS: dict[str, Option] = {
    "layers": Option("layers", *_RANGES),
    "port": Option("ports", _among(KINDS), _join),
    "rank": Option("ranks", *_RANGES),
    **{axis: Option(axis, *_RANGES) for axis in ("tp", "pp", "dp", "cp", "ep")},
    "steps": Option("steps", *_RANGES),
    "every": Option("every", _positive, str),
    "first": Option("first", _positive, str),
    "phase": Option("phases", *_LIST),
    "pass": Option("passes", _among(PASSES), _join),
    "dtype": Option("dtypes", _among(dtypes.NAMES), _join),
    "min_bytes": Option("min_bytes", *_SIZE),
    "max_bytes": Option("max_bytes", *_SIZE),
    "request": Option("requests", *_LIST),
    "rows": Option("rows", _slice, _slice_text),
    "cap": Option("cap", *_SIZE),
}
"""All options except ``tag.NAME`` and ``when``, in output order."""


def check(rule: Any) -> None:
    """Validate the options of ``rule``: each value must survive formatting and parsing; raises ValueError."""
    for name, option in OPTIONS.items():
        value = getattr(rule, option.field)
        if value is None or value == ():
            continue
        try:
            same = option.read(items(Bare(option.write(value)))) == value
        except (ValueError, TypeError, AttributeError, KeyError) as error:
            raise ValueError(f"{name}={value!r}: {error}") from None
        if not same:
            raise ValueError(f"{name}={value!r} must be written as {name}={option.write(value)}")
    for name, values in rule.tags:
        if not isinstance(name, str) or not re.fullmatch(r'[^\s=",;\']+', name):
            raise ValueError(f"tag.{name}: a tag's name has no blanks, quotes, commas or '='")
        if not values or [scalar(value) for value in values] != list(values):
            raise ValueError(f"tag.{name}: no value is given")
    if len({name for name, _ in rule.tags}) < len(rule.tags):
        raise ValueError("a tag is given twice")
    if rule.min_bytes is not None and rule.max_bytes is not None and rule.min_bytes > rule.max_bytes:
        raise ValueError(f"min_bytes={rule.min_bytes} is more than max_bytes={rule.max_bytes}: nothing could match")
