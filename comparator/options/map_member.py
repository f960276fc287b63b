"""Validation of map file entries; a ConfigError names the file and key of an invalid value."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from tapscope.core.errors import ConfigError
from tapscope.expr.safe_regex import safe_pattern

SIDES = ("baseline", "target", "both")


def mapping(where: str, value: Any) -> dict[str, Any]:
    """Return ``value`` as a mapping with string keys; empty if it is None."""
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{where} must be a mapping, e.g. {{key: value}}, not {short(value)}")
    return value


def check_keys(where: str, entry: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise ConfigError for a key that is not in ``names``."""
    for name in entry:
        if name not in names:
            raise ConfigError(f"{where}: unknown key {name!r}; valid keys: {', '.join(names)}")


def text(where: str, entry: Mapping[str, Any], key: str, *, empty: bool = False) -> str:
    """Return the string at ``key``; ``empty`` permits an empty string."""
    value = entry.get(key)
    if not isinstance(value, str) or not (value or empty):
        raise ConfigError(f"{where}.{key} must be a {'' if empty else 'non-empty '}string, not {short(value)}")
    return value


def side(where: str, entry: Mapping[str, Any]) -> str:
    """Return the side that an entry applies to; ``both`` by default."""
    side = entry.get("side", "both")
    if side not in SIDES:
        raise ConfigError(f"{where}.side={short(side)} is unknown; use {', '.join(SIDES)}")
    return str(side)


def counts(where: str, entry: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """Return a list of integers ≥ 1 as a tuple; empty if the key is missing."""
    value = entry.get(key, [])
    if not isinstance(value, list) or not all(type(n) is int and n > 0 for n in value):
        raise ConfigError(f"{where}.{key} must be a list of integers ≥ 1, not {short(value)}")
    return tuple(value)


def regex(where: str, text: str) -> re.Pattern[str]:
    """Compile a regular expression with bounded matching time."""
    try:
        return safe_pattern(text)
    except ValueError as error:
        raise ConfigError(f"{where}: {error}") from None


def short(value: Any) -> str:
    """Describe a value briefly, for messages."""
    if value is None:
        return "nothing"
    return f"a {type(value).__name__}" if isinstance(value, dict | list) else repr(value)[:60]
