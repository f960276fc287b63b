"""Validators for the fields of a line, so that code downstream of the parser sees only valid types and sizes.

Every validator returns the value, or raises a ValueError that names the field.
"""

from typing import Any

from tapscope.core.dtypes import NAMES

MAX_COUNT = 1 << 63
"""Exclusive upper bound of counts."""
MAX_ROWS = 1 << 26
"""Maximum number of token rows of one step, more than any scheduler batches."""
MAX_AXES = 32
_INT = {int}
_DTYPES = frozenset(NAMES)


def is_count(value: Any) -> bool:
    """Return whether ``value`` is an integer ≥ 0 that fits in 63 bits."""
    return type(value) is int and 0 <= value < MAX_COUNT


def count(line: dict[str, Any], name: str, *default: int) -> int:
    """Return field ``name``, an integer ≥ 0; a missing field is ``default``, or an error if there is no default."""
    value = line.get(name, *default)
    if not is_count(value):
        raise ValueError(f"{name} is {short(value)}, not an integer ≥ 0")
    return int(value)


def text(line: dict[str, Any], name: str, *default: str | None) -> Any:
    """Return field ``name``, a string that is valid UTF-8; a missing field is ``default``, or an error without one."""
    value = line.get(name, *default)
    if default == (None,) and value is None:
        return None
    if type(value) is not str or not (value.isascii() or _is_writable(value)):
        raise ValueError(f"{name} is {short(value)}, not a string")
    return value


def counts(value: Any, name: str) -> tuple[int, ...]:
    """Convert a list of at most :data:`MAX_AXES` counts, e.g. a shape, to a tuple."""
    if type(value) is not list or len(value) > MAX_AXES or ({*map(type, value)} | _INT) != _INT or _are_bad(value):
        raise ValueError(f"{name} is {short(value)}, not a list of integers ≥ 0")
    return tuple(value)


def _are_bad(value: list[int]) -> bool:
    return bool(value) and not (min(value) >= 0 and max(value) < MAX_COUNT)


def dtype(line: dict[str, Any]) -> str | None:
    """Return the dtype name of a record line, or None if its value is not a tensor."""
    value = line.get("dtype")
    if value is not None and (type(value) is not str or value not in _DTYPES):
        raise ValueError(f"dtype is {short(value)}, an unknown dtype")
    return value


def spans(value: Any, name: str) -> tuple[tuple[int, int], ...]:
    """Convert a list of [first, count] to tuples; at most :data:`MAX_ROWS` rows in total."""
    if type(value) is not list or not all(type(s) is list and len(s) == 2 and all(map(is_count, s)) for s in value):
        raise ValueError(f"{name} is {short(value)}, not a list of [first, count]")
    if sum(number for _, number in value) > MAX_ROWS:
        raise ValueError(f"{name} are more than {MAX_ROWS:,}")
    return tuple((first, number) for first, number in value)


def mapping(line: dict[str, Any], name: str) -> Any:
    """Return field ``name``, a JSON object, or None if the field is missing."""
    value = line.get(name)
    if value is not None and type(value) is not dict:
        raise ValueError(f"{name} is {short(value)}, not an object")
    return value


def number(value: Any, name: str) -> Any:
    """Return ``value``, a number or None."""
    if value is not None and (type(value) is not float and (type(value) is not int or abs(value) > 1 << 1000)):
        raise ValueError(f"{name} is {short(value)}, not a number")
    return value


def short(value: Any) -> str:
    """Format a value for a message, on one line and truncated to 60 characters."""
    shown = ascii(value)
    return shown if len(shown) <= 60 else f"{shown[:60]}…"


def _is_writable(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
