"""Draft trees as rows: the parent of each row, which precedes it, or -1 for a row that follows the cached positions."""

import zlib
from array import array
from collections.abc import Sequence


def is_chain(tree: Sequence[int]) -> bool:
    """Whether each row of ``tree`` follows the one before it."""
    return all(parent == row - 1 for row, parent in enumerate(tree))


def depths(tree: Sequence[int]) -> list[int]:
    """How many rows precede each row of ``tree`` on its branch."""
    depth_of: list[int] = []
    for parent in tree:
        depth_of.append(0 if parent < 0 else depth_of[parent] + 1)
    return depth_of


def branch(tree: Sequence[int], row: int) -> list[int]:
    """The rows of ``tree`` on the way to ``row``, the first one first."""
    rows = []
    while row >= 0:
        rows.append(row)
        row = tree[row]
    return rows[::-1]


def branch_hash(start: int, tokens: Sequence[int]) -> int:
    """31 bits, not 0, that are equal for equal draft ``tokens`` after position ``start``, in any run."""
    return zlib.crc32(array("q", (start, *tokens)).tobytes()) >> 1 | 1
