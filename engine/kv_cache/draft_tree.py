"""Draft trees as rows: the parent of each row, which precedes it, or -1 for a row that follows the cached positions."""

import zlib
from array import array
from collections.abc import Sequence


def is_chain(tree: Sequence[int]) -> bool:
    """Whether each row of ``tree`` follows the one before it."""
    return all(parent == row - 1 for row, parent in enumerate(tree))


def depths(tree: Sequence[int]) -> list[int]:
    """How many rows precede each row of ``tree`` on its branch."""
    found: list[int] = []
    for parent in tree:
        found.append(0 if parent < 0 else found[parent] + 1)
    return found


def branch(tree: Sequence[int], row: int) -> list[int]:
    """The rows of ``tree`` on the way to ``row``, the first one first."""
    found = []
    while row >= 0:
        found.append(row)
        row = tree[row]
    return found[::-1]


def branch_hash(start: int, tokens: Sequence[int]) -> int:
    """31 bits, not 0, that are equal for equal draft ``tokens`` after position ``start``, in any run."""
    return zlib.crc32(array("q", (start, *tokens)).tobytes()) >> 1 | 1
