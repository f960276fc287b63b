"""Modules: how the paths of modules lie in each other."""

from collections.abc import Sequence
from functools import lru_cache


def parent(path: str) -> str:
    """The module that holds it; the root is empty."""
    return path.rpartition(".")[0]


@lru_cache(maxsize=1 << 16)
def ancestors(path: str) -> tuple[str, ...]:
    """The path and those around it, from the inside out; the last is the root's, which is empty."""
    found = [path]
    while path:
        path = parent(path)
        found.append(path)
    return tuple(found)


def outer(paths: Sequence[str]) -> set[str]:
    """Those that are around others; the root is around itself."""
    around = {above for holder in set(map(parent, paths)) for above in ancestors(holder)}
    return around.intersection(paths)


def is_within(path: str, ancestor: str) -> bool:
    """Whether a module lies inside another."""
    return path != ancestor and (not ancestor or path.startswith(f"{ancestor}."))


def common_module(paths: Sequence[str]) -> str:
    """The module that holds all of them; the only one itself."""
    parts = [path.split(".") for path in paths]
    shared = [names[0] for names in zip(*parts, strict=False) if len(set(names)) == 1]
    return ".".join(shared)
