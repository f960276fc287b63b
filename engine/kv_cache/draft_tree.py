"""Draft trees as parent lists: the earlier row that each row follows, or -1 if the row follows the cached positions."""

import zlib
from array import array
from collections.abc import Sequence


def is_chain(tree: Sequence[int]) -> bool:
    """Return whether each row of ``tree`` follows the row before it."""
    return all(parent == row - 1 for row, parent in enumerate(tree))


def depths(tree: Sequence[int]) -> list[int]:
    """Return the number of rows that precede each row of ``tree`` on its branch."""
    depth_of: list[int] = []
    for parent in tree:
        depth_of.append(0 if parent < 0 else depth_of[parent] + 1)
    return depth_of


def branch(tree: Sequence[int], row: int) -> list[int]:
    """Return the rows of ``tree`` on the path to ``row``, from the root to ``row``."""
    rows = []
    while row >= 0:
        rows.append(row)
        row = tree[row]
    return rows[::-1]


def branch_hash(start: int, tokens: Sequence[int]) -> int:
    """Return a nonzero 31-bit hash of the draft ``tokens`` after position ``start``, equal in every run."""
    return zlib.crc32(array("q", (start, *tokens)).tobytes()) >> 1 | 1
