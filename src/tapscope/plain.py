"""Plain: containers and values that are no tensors, as leaves with a path and as the typed JSON of docs/format.md."""

from collections.abc import Iterator
from typing import Any

_MAX_DEPTH = 16
_MAX_LEAVES = 10_000
MAX_PLAIN = 4096
"""Numbers or characters of a plain value that are kept."""
_HARMLESS = str.maketrans("[]:", "();")


def leaves(value: Any) -> Iterator[tuple[str, Any]]:
    """``(path, leaf)`` of everything in dicts, lists and tuples; a list of plain values alone is one leaf.

    Raises ValueError for a value that is nested too deeply or has too many parts.
    """
    found: list[tuple[str, Any]] = []
    _walk(value, "", 0, found)
    return iter(found)


def _walk(value: Any, path: str, depth: int, found: list[tuple[str, Any]]) -> None:
    if depth > _MAX_DEPTH or len(found) > _MAX_LEAVES:
        raise ValueError(f"its value has more than {_MAX_LEAVES:,} parts, or more than {_MAX_DEPTH} levels")
    children: list[tuple[Any, Any]] | None = None
    if isinstance(value, dict):
        children = list(value.items())
    elif isinstance(value, list | tuple) and not all(isinstance(each, str | int | float) for each in value):
        children = list(enumerate(value))
    if children is None:
        found.append((path, value))
        return
    for key, child in children:
        if child is not None:
            name = str(key).translate(_HARMLESS)[:80] or "(empty)"
            _walk(child, f"{path}.{name}" if path else name, depth + 1, found)


def plain_value(leaf: Any) -> dict[str, Any]:
    """A leaf that is no tensor; what has no form there gives its class."""
    if isinstance(leaf, bool):
        return {"type": "bool", "value": leaf}
    if isinstance(leaf, int):
        return {"type": "int", "value": leaf}
    if isinstance(leaf, float):
        return {"type": "float", "value": _item(leaf)}
    if isinstance(leaf, str):
        return {"type": "str", "value": _item(leaf)} | _cut(leaf)
    if isinstance(leaf, list | tuple):
        return {"type": "list", "value": [_item(each) for each in leaf[:MAX_PLAIN]]} | _cut(leaf)
    return {"type": "object", "class": f"{type(leaf).__module__}.{type(leaf).__qualname__}"}


def _item(value: Any) -> Any:
    """JSON has no infinities, and no float that every reader takes for the same one: floats are text."""
    if isinstance(value, str):
        return value[:MAX_PLAIN].encode(errors="replace").decode()
    return repr(float(value)) if isinstance(value, float) else value


def _cut(value: Any) -> dict[str, Any]:
    return {"cut": len(value)} if len(value) > MAX_PLAIN else {}
