"""Flatten what a module takes and gives into leaves with a path, by position and key; nothing is dropped."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_MAX_DEPTH = 16


def flatten(value: Any, path: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield ``(path, leaf)`` for tensors and plain values; None yields nothing.

    Tuples and lists give their index, mappings (ModelOutput too), named tuples and dataclasses their names.
    What cannot be looked into (a cache object, a cycle) comes as one opaque leaf.
    """
    if value is None:
        return
    children = _children(value) if depth < _MAX_DEPTH else None
    if children is None:
        yield path, value
        return
    for name, child in children:
        yield from flatten(child, f"{path}.{name}" if path else name, depth + 1)


def _children(value: Any) -> list[tuple[str, Any]] | None:
    if isinstance(value, torch.Tensor | str | bytes | int | float | bool):
        return None
    if isinstance(value, Mapping):
        return [(_name(key), child) for key, child in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, tuple | list):
        return [(str(i), child) for i, child in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if hasattr(value, f.name)]
    return None


def _name(key: Any) -> str:
    return str(key).replace("[", "(").replace("]", ")")


def plain_value(leaf: Any) -> dict[str, Any]:
    """A non-tensor leaf as the typed JSON of docs/format.md."""
    if isinstance(leaf, bool):
        return {"type": "bool", "value": leaf}
    if isinstance(leaf, int):
        return {"type": "int", "value": leaf}
    if isinstance(leaf, float):
        return {"type": "float", "value": repr(leaf)}
    if isinstance(leaf, str):
        return {"type": "str", "value": leaf[:4096]} | ({"cut": len(leaf)} if len(leaf) > 4096 else {})
    return {"type": "object", "class": f"{type(leaf).__module__}.{type(leaf).__qualname__}"}
