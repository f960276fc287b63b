"""Module paths: parents, ancestors and common ancestors."""

from collections.abc import Sequence
from functools import lru_cache


def parent(path: str) -> str:
    """Return the path of the parent module; the root is the empty string."""
    return path.rpartition(".")[0]


@lru_cache(maxsize=1 << 16)
def ancestors(path: str) -> tuple[str, ...]:
    """Return the path and its ancestors, innermost first, ending with the root (the empty string)."""
    paths = [path]
    while path:
        path = parent(path)
        paths.append(path)
    return tuple(paths)


def outer(paths: Sequence[str]) -> set[str]:
    """Return the paths that are ancestors of other paths in the list; the root is its own ancestor."""
    around = {above for holder in set(map(parent, paths)) for above in ancestors(holder)}
    return around.intersection(paths)


def is_within(path: str, ancestor: str) -> bool:
    """Return whether ``path`` is strictly inside ``ancestor``."""
    return path != ancestor and (not ancestor or path.startswith(f"{ancestor}."))


def common_module(paths: Sequence[str]) -> str:
    """Return the innermost module that contains all paths; the path itself if there is only one."""
    parts = [path.split(".") for path in paths]
    shared = [names[0] for names in zip(*parts, strict=False) if len(set(names)) == 1]
    return ".".join(shared)
