"""JSON encoding of the view model, and its JSON Schema."""

import dataclasses
from typing import Any, TypeVar

import msgspec

from tapscope.core.formatting import printable

V = TypeVar("V")


def escaped(view: V) -> V:
    """Return a copy of the view with all unsafe characters in its strings replaced by visible escapes.

    Names of models, sites, requests and notes come from untrusted files. Front ends other than the terminal escape them
    here and nowhere else. HTML escaping is left to the template and the page.
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
    """Encode the escaped view as UTF-8 JSON; non-finite numbers become null."""
    return msgspec.json.encode(escaped(view))


def json_schema(view: type[Any]) -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a class of the view model."""
    return msgspec.json.schema(view)
