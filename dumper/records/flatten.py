"""Flattens inputs and outputs of a module into leaves with a path, by position and key; nothing is dropped."""

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
"""Names of dataclasses that are not flattened: the batch objects of frameworks, see :class:`FrameworkPlugin`."""
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
"""Objects fully described by their string. The string is for people: a device may differ between runs that agree."""


def flatten(value: Any) -> list[tuple[str, Any]]:
    """``(path, leaf)`` of tensors and plain values, each path once; None yields nothing.

    Tuples and lists contribute their index; mappings (ModelOutput too), named tuples and dataclasses their names; a
    repeated path (keys ``1`` and ``"1"``) gets ``~2``. A long list of plain numbers or strings is one leaf, and so is
    an object that cannot be flattened (a cache, a cycle, too many levels or containers). Deques and views of a dict are
    lists. A set of plain values is one leaf, sorted; tensors of a set come in the order of their dtypes and shapes, and
    where two have the same, the set is one leaf, because its own order differs from run to run.
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
    apart = []
    for path, leaf in leaves:
        name, times = path, 1
        while name in seen or (times > 1 and name in taken):
            times += 1
            name = f"{path}~{times}"
        seen.add(name)
        apart.append((name, leaf))
    return apart


class Leaves(list[tuple[str, Any]]):
    """A value as :func:`flatten` gives it, where the value itself is not at hand: of a firing in compiled code."""


class OpaqueObject:
    """Stands for a container that was not flattened; its record has the class only."""

    def __init__(self, value: Any) -> None:
        self.kind = type(value)


class PlainSet(list[Any]):
    """The sorted elements of a set of plain values, which are one leaf."""


class _Flattener:
    """The containers on the current path, to stop at cycles, and how many were seen."""

    def __init__(self, leaves: list[tuple[str, Any]]) -> None:
        self._found = leaves
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
            self._found.append((path, value))
            return
        self._num_containers += 1
        inside = self._inside
        if address in inside or len(inside) >= _MAX_DEPTH or self._num_containers > _MAX_CONTAINERS:
            self._found.append((path, OpaqueObject(value)))
            return
        inside.add(address)
        for name, child in children:
            self.into(child, f"{path}.{name}" if path else name)
        inside.discard(address)


def _as_list(value: Any) -> Any:
    """A list with the elements of one of ``_LIST_LIKE``, in an order that equal runs share; the value without one."""
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
    """A mapping's key as a string; a tensor's values are not read, because that would wait for its device."""
    return str(number) if isinstance(key, torch.Tensor) else str(key)


def is_opaque(value: Any) -> bool:
    """Whether a dataclass is recorded by its class only."""
    return type(value).__name__ in opaque_classes


@lru_cache(maxsize=4096)
def path_part(key: str) -> str:
    """A key as part of a site, in which brackets and colons have a meaning."""
    return key.translate(_HARMLESS) or "(empty)"


def is_container(value: Any) -> bool:
    """Whether :func:`flatten` descends into it."""
    return not isinstance(value, torch.Tensor) and (isinstance(value, _LIST_LIKE) or _children(value) is not None)


def may_hold_tensors(leaf: Any) -> bool:
    """Whether a leaf is a tensor, or an object of which nothing but its class is recorded, such as a cache."""
    if isinstance(leaf, torch.Tensor):
        return True
    value = plain_value(leaf)
    return value["type"] == "object" and "text" not in value


def plain_value(leaf: Any) -> dict[str, Any]:
    """A non-tensor leaf as the typed JSON of run-format.md, with the string of an object fully described by it."""
    if isinstance(leaf, OpaqueObject):
        return {"type": "object", "class": f"{leaf.kind.__module__}.{leaf.kind.__qualname__}"}
    value = json_values.plain_value(leaf)
    if value["type"] == "object" and isinstance(leaf, _DESCRIBED_BY_STR):
        value["text"] = str(leaf)[:MAX_PLAIN]
    return value
