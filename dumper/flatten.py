"""Flatten what a module takes and gives into leaves with a path, by position and key; nothing is dropped."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

_MAX_DEPTH = 16
_LONG_LIST = 16
_MAX_PLAIN = 4096  # numbers or characters of a plain value that are kept


def flatten(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield ``(path, leaf)`` for tensors and plain values, each path once; None yields nothing.

    Tuples and lists give their index, mappings (ModelOutput too), named tuples and dataclasses their names; a path
    that comes again (keys ``1`` and ``"1"``) gets ``~2``. A long list of plain numbers is one leaf, and so is what
    cannot be looked into (a cache object, a cycle).
    """
    seen: dict[str, int] = {}
    for path, leaf in _walk(value, "", 0):
        times = seen[path] = seen.get(path, 0) + 1
        yield (path if times == 1 else f"{path}~{times}"), leaf


def _walk(value: Any, path: str, depth: int) -> Iterator[tuple[str, Any]]:
    if value is None:
        return
    children = _children(value) if depth < _MAX_DEPTH else None
    if children is None:
        yield path, value
        return
    for name, child in children:
        yield from _walk(child, f"{path}.{name}" if path else name, depth + 1)


def _children(value: Any) -> list[tuple[str, Any]] | None:
    if isinstance(value, torch.Tensor | str | bytes | int | float | bool):
        return None
    if isinstance(value, Mapping):
        return [(_name(key), child) for key, child in value.items()]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, tuple | list):
        if len(value) > _LONG_LIST and all(isinstance(child, bool | int | float) for child in value):
            return None
        return [(str(i), child) for i, child in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if hasattr(value, f.name)]
    return None


def _name(key: Any) -> str:
    """A key as part of a site, in which brackets and colons have a meaning."""
    return str(key).translate(str.maketrans("[]:", "();")) or "(empty)"


def plain_value(leaf: Any) -> dict[str, Any]:
    """A non-tensor leaf as the typed JSON of docs/format.md."""
    if isinstance(leaf, bool):
        return {"type": "bool", "value": leaf}
    if isinstance(leaf, int):
        return {"type": "int", "value": leaf}
    if isinstance(leaf, float):
        return {"type": "float", "value": repr(float(leaf))}
    if isinstance(leaf, str):
        text = leaf[:_MAX_PLAIN].encode(errors="replace").decode()
        return {"type": "str", "value": text} | ({"cut": len(leaf)} if len(leaf) > _MAX_PLAIN else {})
    if isinstance(leaf, tuple | list):
        kept = [item if isinstance(item, int) else repr(float(item)) for item in leaf[:_MAX_PLAIN]]
        return {"type": "list", "value": kept} | ({"cut": len(leaf)} if len(leaf) > _MAX_PLAIN else {})
    return {"type": "object", "class": f"{type(leaf).__module__}.{type(leaf).__qualname__}"}
