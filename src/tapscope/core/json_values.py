"""Non-tensor values and containers as leaves with a path, and in the typed JSON form of run-format.md."""

from collections.abc import Iterator
from typing import Any

_MAX_DEPTH = 16
_MAX_LEAVES = 10_000
MAX_PLAIN = 4096
"""Maximum number of list items or characters kept of a plain value."""
_MAX_VISITED = 1 << 22
_MAX_SIZE = 1 << 18
_CHARACTERS = 16
"""Number of characters of a string that count as one number against ``_MAX_SIZE``."""
_SITE_SAFE = str.maketrans("[]:", "();")


def leaves(value: Any) -> Iterator[tuple[str, Any]]:
    """Return an iterator over ``(path, leaf)`` of nested dicts, lists and tuples; a list of only plain values is one
    leaf.

    Raises ValueError for a value that is nested too deeply or has too many parts. A shared part counts once per
    reference, because a few bytes can reference one list a million times.
    """
    walk = _Walk()
    walk.visit(value, "", 0)
    return iter(walk.leaves)


class _Walk:
    """Recursive traversal: the leaves collected so far and the remaining budget."""

    def __init__(self) -> None:
        self.leaves: list[tuple[str, Any]] = []
        self._num_visited = self._size = 0

    def visit(self, value: Any, path: str, depth: int) -> None:
        if depth > _MAX_DEPTH or len(self.leaves) > _MAX_LEAVES:
            raise ValueError(f"its value has more than {_MAX_LEAVES:,} parts, or more than {_MAX_DEPTH} levels")
        self._num_visited += 1 + (len(value) if isinstance(value, dict | list | tuple) else 0)
        if self._num_visited > _MAX_VISITED:
            raise ValueError(f"its value has more than {_MAX_VISITED:,} elements")
        children: list[tuple[Any, Any]] | None = None
        if isinstance(value, dict):
            children = list(value.items())
        elif isinstance(value, list | tuple) and not all(isinstance(each, str | int | float) for each in value):
            children = list(enumerate(value))
        if children is None:
            self._count_size(value)
            self.leaves.append((path, value))
            return
        for key, child in children:
            if child is not None:
                name = str(key).translate(_SITE_SAFE)[:80] or "(empty)"
                self.visit(child, f"{path}.{name}" if path else name, depth + 1)

    def _count_size(self, leaf: Any) -> None:
        """Add the size of ``leaf``, in the form returned by :func:`plain_value`, to the budget; raises ValueError when
        it is exceeded."""
        for item in leaf[:MAX_PLAIN] if isinstance(leaf, list | tuple) else [leaf]:
            self._size += 1 + (min(len(item), MAX_PLAIN) // _CHARACTERS if isinstance(item, str) else 0)
        if self._size > _MAX_SIZE:
            raise ValueError(f"its plain values take more than {_MAX_SIZE:,} numbers")


def plain_value(leaf: Any) -> dict[str, Any]:
    """Return the typed JSON form of a non-tensor leaf; a value without a JSON form is represented by its class."""
    if leaf is None:
        return {"type": "none", "value": None}
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
    """Return a JSON value; floats become strings, because JSON has no infinities and parsers round decimals
    differently."""
    if isinstance(value, str):
        return value[:MAX_PLAIN].encode(errors="replace").decode()
    return repr(float(value)) if isinstance(value, float) else value


def _cut(value: Any) -> dict[str, Any]:
    return {"cut": len(value)} if len(value) > MAX_PLAIN else {}
