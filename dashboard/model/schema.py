"""JSON of the view model, and its schema."""

import dataclasses
from typing import Any, TypeVar

import msgspec

from tapscope.core.formatting import printable

V = TypeVar("V")


def escaped(view: V) -> V:
    """The view with every unsafe character of every string made visible.

    Names of models, sites, requests and notes come from files that other people wrote; this is the one place where
    front ends other than the terminal escape them. Markup is left to the template and the page.
    """
    result: Any = view
    if isinstance(result, str):
        result = printable(result) if type(result) is str else result
    elif isinstance(result, tuple):
        result = tuple(escaped(each) for each in result)
    elif isinstance(result, dict):
        result = {escaped(key): escaped(value) for key, value in result.items()}
    elif dataclasses.is_dataclass(result) and not isinstance(result, type):
        members = {each.name: getattr(result, each.name) for each in dataclasses.fields(result)}
        result = dataclasses.replace(result, **{name: escaped(value) for name, value in members.items()})
    return result  # type: ignore[no-any-return]


def to_json(view: Any) -> bytes:
    """UTF-8 JSON of an escaped view; numbers that are not finite are null."""
    return msgspec.json.encode(escaped(view))


def json_schema(view: type[Any]) -> dict[str, Any]:
    """JSON Schema 2020-12 of a class of the view model."""
    return msgspec.json.schema(view)
