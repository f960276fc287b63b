"""Assignment of the programs of a 1D grid to many tensors, each processed by its own number of programs.

The table of the launch has a row of int64 words for each tensor, which begins with the index of its first program and
its number of programs. The array ``places`` maps each program to its table row.
"""

from collections.abc import Sequence
from itertools import accumulate

import triton
import triton.language as tl


def places_of(programs: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return (the table row of each program, the first program of each row), given the ``programs`` per row."""
    places = [row for row, count in enumerate(programs) for _ in range(count)]
    return places, [0, *accumulate(programs)][:-1]


@triton.jit
def place_in(table, places, COLUMNS: tl.constexpr):
    """Return (pointer to this program's table row, first program of that row, number of programs of that row)."""
    row = table + COLUMNS * tl.load(places + tl.program_id(0))
    return row, tl.load(row).to(tl.int32), tl.load(row + 1).to(tl.int32)
