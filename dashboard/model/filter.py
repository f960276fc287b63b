"""Filter: words that must all hold, such as ``mlp is:differs ratio:>10 -layer:0..3``.

A word is a part of a site, or a pattern with ``*`` and ``?``; with a field, ``FIELD:VALUE``. ``-`` in front negates it.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

from tapscope.core import dtypes
from tapscope.core.errors import ConfigError
from tapscope.core.formatting import did_you_mean
from tapscope.core.site import Glob

T = TypeVar("T")
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|inf"
_COMPARED = re.compile(rf"(>=|<=|>|<|=)?({_NUMBER})", re.IGNORECASE)
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class NumberField(Generic[T]):
    """``FIELD:>10``, ``FIELD:0..3`` or ``FIELD:7``; nan matches nothing."""

    of: Callable[[T], float]


@dataclass(frozen=True, slots=True)
class ChoiceField(Generic[T]):
    """``FIELD:NAME``, where the item has any number of names out of ``names``."""

    of: Callable[[T], Iterable[str]]
    names: tuple[str, ...] = ()
    """Valid ones; empty: any."""


Field = NumberField[T] | ChoiceField[T]


def parse_filter(text: str, sites: Callable[[T], Iterable[str]], fields: Mapping[str, Field[T]]) -> Callable[[T], bool]:
    """What matches all words of ``text``; ``sites`` are the names that a word without a field is compared with.

    A word whose part before ``:`` is none of the ``fields`` is a part of a site, such as ``mlp:out``. Raises
    ConfigError for a value that a field does not have.
    """
    tests = [_test(word, sites, fields) for word in text.split()]
    return lambda item: all(test(item) for test in tests)


def _test(word: str, sites: Callable[[T], Iterable[str]], fields: Mapping[str, Field[T]]) -> Callable[[T], bool]:
    is_negated = word.startswith("-") and len(word) > 1
    name, colon, value = word[is_negated:].partition(":")
    field = fields.get(name) if colon else None
    if field is None:
        found = site_test(word[is_negated:])
        holds: Callable[[T], bool] = lambda item: any(map(found, sites(item)))  # noqa: E731 - one of three
    elif isinstance(field, NumberField):
        of, lies = field.of, _number_test(name, value)
        holds = lambda item: lies(of(item))  # noqa: E731
    else:
        if not value or (field.names and value not in field.names):
            hint = did_you_mean(value, field.names)
            raise ConfigError(f"invalid filter {name}:{value}{hint}: expected {name}: and {_listed(field.names)}")
        names_of = field.of
        holds = lambda item: value in names_of(item)  # noqa: E731
    return (lambda item: not holds(item)) if is_negated else holds


def dtype_names(dtype: str | None) -> tuple[str, ...]:
    """What ``dtype:`` matches: ``float8_e4m3fn``, its short name ``fp8e4``, and ``fp8`` for every 8-bit float."""
    short = dtypes.short(dtype)
    return (dtype or "", short, "fp8") if short.startswith("fp8") else (dtype or "", short)


def site_test(word: str) -> Callable[[str], bool]:
    """A pattern when it has * or ?, else a part of the site in any case."""
    if "*" in word or "?" in word:
        return Glob(word).matches
    part = word.lower()
    return lambda site: part in site.lower()


def _number_test(name: str, value: str) -> Callable[[float], bool]:
    span = _RANGE.fullmatch(value)
    if span is not None and (low := float(span[1])) <= (high := float(span[2])):
        return lambda number: low <= number <= high
    compared = _COMPARED.fullmatch(value)
    if compared is None:
        raise ConfigError(f"invalid filter {name}:{value}: expected a number such as >10, <=1e-3, 0..3 or 7")
    limit = float(compared[2])
    tests: dict[str, Callable[[float], bool]] = {
        ">": lambda number: number > limit,
        ">=": lambda number: number >= limit,
        "<": lambda number: number < limit,
        "<=": lambda number: number <= limit,
    }
    return tests.get(compared[1] or "=", lambda number: number == limit)


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) if names else "a name"
