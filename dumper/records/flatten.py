"""Flatten inputs and outputs of modules into (path, leaf) pairs, like a pytree; no value except None is dropped."""

import dataclasses
from collections import OrderedDict, UserList, deque
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import lru_cache
from pathlib import PurePath
from typing import Any

import torch

from tapscope.core import json_values
from tapscope.core.json_values import MAX_PLAIN

opaque_classes: set[str] = set()
"""Class names of dataclasses that are not flattened: batch objects of frameworks, see :class:`FrameworkPlugin`."""
_MAX_DEPTH = 100
_MAX_CONTAINERS = 20_000
_HARMLESS = str.maketrans("[]:", "();")
_LONG_LIST = 16
_PLAIN = (bool, int, float, str)
_DICTS: tuple[dict[Any, Any], ...] = ({}, OrderedDict())
_VIEWS = [type(view) for each in _DICTS for view in (each.keys(), each.values(), each.items())]
_LIST_LIKE = (set, frozenset, deque, UserList, *_VIEWS)
_DESCRIBED_BY_STR = (
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    complex,
    bytes,
    slice,
    range,
    Enum,
    PurePath,
)
"""Types whose string describes the object completely. It is only shown to users: a device may differ in equal runs."""


def flatten(value: Any) -> list[tuple[str, Any]]:
    """Return ``(path, leaf)`` for all tensors and other leaves of ``value``, with unique paths; None has no leaf.

    Path components are indices for tuples and lists, and names for mappings (e.g. ModelOutput), named tuples and
    dataclasses. A duplicate path (keys ``1`` and ``"1"``) gets the suffix ``~2``. Deques and dict views count as lists.
    A long list of numbers or strings is one leaf, as is an object that cannot be flattened (a cache, a cycle, too many
    levels or containers). A set of plain values is one sorted leaf. A set of tensors is ordered by dtype and shape; if
    two are equal in both, the set is one leaf, because its iteration order differs from run to run.
    """
    leaves: list[tuple[str, Any]] = []
    if isinstance(value, torch.Tensor):
        return [("", value)]
    _Flattener(leaves).into(value, "")
    if len(leaves) > 1 and len({path for path, _ in leaves}) < len(leaves):
        return _made_unique(leaves)
    return leaves


def _made_unique(leaves: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    taken = {path for path, _ in leaves}
    seen: set[str] = set()
    unique_leaves = []
    for path, leaf in leaves:
        name, times = path, 1
        while name in seen or (times > 1 and name in taken):
            times += 1
            name = f"{path}~{times}"
        seen.add(name)
        unique_leaves.append((name, leaf))
    return unique_leaves


class Leaves(list[tuple[str, Any]]):
    """An already flattened value, for firings in compiled code or CUDA graphs, where the original is unavailable."""


class OpaqueObject:
    """Placeholder for a container that was not flattened; its record contains only the class."""

    def __init__(self, value: Any) -> None:
        self.kind = type(value)


class PlainSet(list[Any]):
    """The sorted elements of a set of plain values, recorded as one leaf."""


class _Flattener:
    """Recursive traversal; tracks the containers on the current path to detect cycles, and limits their number."""

    def __init__(self, leaves: list[tuple[str, Any]]) -> None:
        self._leaves = leaves
        self._inside: set[int] = set()
        self._num_containers = 0

    def into(self, value: Any, path: str) -> None:
        if value is None:
            return
        address = id(value)
        if isinstance(value, _LIST_LIKE):
            value = _as_list(value)
        children = None if isinstance(value, torch.Tensor) else _children(value)
        if children is None:
            self._leaves.append((path, value))
            return
        self._num_containers += 1
        inside = self._inside
        if address in inside or len(inside) >= _MAX_DEPTH or self._num_containers > _MAX_CONTAINERS:
            self._leaves.append((path, OpaqueObject(value)))
            return
        inside.add(address)
        for name, child in children:
            self.into(child, f"{path}.{name}" if path else name)
        inside.discard(address)


def _as_list(value: Any) -> Any:
    """Convert a list-like object to a list in a reproducible order; an OpaqueObject if there is no such order."""
    if not isinstance(value, set | frozenset):
        return list(value)
    if all(isinstance(each, _PLAIN) for each in value):
        return PlainSet(sorted(value, key=lambda each: (type(each).__name__, each)))
    if len(value) > 1 and not all(isinstance(each, torch.Tensor) for each in value):
        return OpaqueObject(value)
    by_layout = {(str(each.dtype), tuple(each.shape)) if len(value) > 1 else None: each for each in value}
    return [each for _, each in sorted(by_layout.items())] if len(by_layout) == len(value) else OpaqueObject(value)


def _children(value: Any) -> Iterable[tuple[str, Any]] | None:
    if isinstance(value, dict):
        return [
            (path_part(key if type(key) is str else _name_of(key, number)), child)
            for number, (key, child) in enumerate(value.items())
        ]
    if isinstance(value, PlainSet | str | bytes | int | float | bool):
        return None
    if isinstance(value, Mapping):
        return [(path_part(_name_of(key, number)), child) for number, (key, child) in enumerate(value.items())]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return list(zip(value._fields, value, strict=True))
    if isinstance(value, tuple | list):
        if len(value) > _LONG_LIST and all(isinstance(child, _PLAIN) for child in value):
            return None
        return [(str(i), child) for i, child in enumerate(value)]
    if dataclasses.is_dataclass(value) and not isinstance(value, type) and not is_opaque(value):
        return [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if hasattr(value, f.name)]
    return None


def _name_of(key: Any, number: int) -> str:
    """Convert a mapping key to a string; a tensor key becomes its index, as reading it would synchronize the device."""
    return str(number) if isinstance(key, torch.Tensor) else str(key)


def is_opaque(value: Any) -> bool:
    """Return whether a dataclass is recorded by its class only."""
    return type(value).__name__ in opaque_classes


@lru_cache(maxsize=4096)
def path_part(key: str) -> str:
    """Convert a key to a path component of a site, replacing brackets and colons, which are site syntax."""
    return key.translate(_HARMLESS) or "(empty)"


def is_container(value: Any) -> bool:
    """Return whether :func:`flatten` descends into ``value``."""
    return not isinstance(value, torch.Tensor) and (isinstance(value, _LIST_LIKE) or _children(value) is not None)


def may_hold_tensors(leaf: Any) -> bool:
    """Return whether a leaf is a tensor, or an object recorded by its class only, such as a KV cache."""
    if isinstance(leaf, torch.Tensor):
        return True
    value = plain_value(leaf)
    return value["type"] == "object" and "text" not in value


def plain_value(leaf: Any) -> dict[str, Any]:
    """Convert a non-tensor leaf to the typed JSON of run-format.md, including the string of self-describing objects."""
    if isinstance(leaf, OpaqueObject):
        return {"type": "object", "class": f"{leaf.kind.__module__}.{leaf.kind.__qualname__}"}
    value = json_values.plain_value(leaf)
    if value["type"] == "object" and isinstance(leaf, _DESCRIBED_BY_STR):
        value["text"] = str(leaf)[:MAX_PLAIN]
    return value
