"""Filter language: words that must all match, such as ``mlp is:differs ratio:>10 -layer:0..3``.

A word is part of a site, a pattern with ``*`` and ``?``, or ``FIELD:VALUE``. A leading ``-`` negates it.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tapscope.core import dtypes
from tapscope.core.errors import ConfigError
from tapscope.core.formatting import did_you_mean
from tapscope.core.site import Glob

Array = np.ndarray[Any, Any]
_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|inf"
_COMPARED = re.compile(rf"(>=|<=|>|<|=)?({_NUMBER})", re.IGNORECASE)
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})", re.IGNORECASE)
_COMPARISONS: Mapping[str, Callable[[Array, float], Array]] = {
    ">": np.greater,
    ">=": np.greater_equal,
    "<": np.less,
    "<=": np.less_equal,
    "=": np.equal,
}


@dataclass(frozen=True, slots=True)
class NumberField:
    """Numeric field: ``FIELD:>10``, ``FIELD:0..3`` or ``FIELD:7``."""

    numbers: Callable[[], Array]
    """Returns [items] float64; nan matches no condition."""


@dataclass(frozen=True, slots=True)
class ChoiceField:
    """Field with names, ``FIELD:NAME``; an item may have any number of them."""

    has: Callable[[str], Array]
    """Returns [items] bool: whether each item has the given name."""
    names: tuple[str, ...] = ()
    """Valid names; empty if any name is valid."""


Field = NumberField | ChoiceField


def matching(text: str, sites: Callable[[Callable[[str], bool]], Array], fields: Mapping[str, Field]) -> Array | bool:
    """Return [items] bool: whether each item matches all words of ``text``; True if there are no words.

    ``sites`` applies a predicate to the site of every item. A word with an unknown field before ``:`` is part of a
    site, such as ``mlp:out``. Raises ConfigError for an invalid value of a field.
    """
    is_match: Array | bool = True
    for word in text.split():
        is_match &= _matching_word(word, sites, fields)
    return is_match


def _matching_word(word: str, sites: Callable[[Callable[[str], bool]], Array], fields: Mapping[str, Field]) -> Array:
    is_negated = word.startswith("-") and len(word) > 1
    name, colon, value = word[is_negated:].partition(":")
    field = fields.get(name) if colon else None
    if field is None:
        is_match = sites(site_test(word[is_negated:]))
    elif isinstance(field, NumberField):
        is_match = _number_test(name, value)(field.numbers())
    else:
        if not value or (field.names and value not in field.names):
            hint = did_you_mean(value, field.names)
            raise ConfigError(f"invalid filter {name}:{value}{hint}: expected {name}: and {_listed(field.names)}")
        is_match = field.has(value)
    return ~is_match if is_negated else is_match


def dtype_names(dtype: str | None) -> tuple[str, ...]:
    """Return the names that ``dtype:`` matches: ``float8_e4m3fn``, ``fp8e4``, and ``fp8`` for all 8-bit floats."""
    short = dtypes.short(dtype)
    return (dtype or "", short, "fp8") if short.startswith("fp8") else (dtype or "", short)


def site_test(word: str) -> Callable[[str], bool]:
    """Return the predicate of a word: a pattern if it contains * or ?, else a case-insensitive substring."""
    if "*" in word or "?" in word:
        return Glob(word).matches
    part = word.lower()
    return lambda site: part in site.lower()


def _number_test(name: str, value: str) -> Callable[[Array], Array]:
    span = _RANGE.fullmatch(value)
    if span is not None and (low := float(span[1])) <= (high := float(span[2])):
        return lambda numbers: (low <= numbers) & (numbers <= high)
    compared = _COMPARED.fullmatch(value)
    if compared is None:
        raise ConfigError(f"invalid filter {name}:{value}: expected a number such as >10, <=1e-3, 0..3 or 7")
    limit, test = float(compared[2]), _COMPARISONS[compared[1] or "="]
    return lambda numbers: test(numbers, limit)


def _listed(names: tuple[str, ...]) -> str:
    return ", ".join(names) if names else "a name"
