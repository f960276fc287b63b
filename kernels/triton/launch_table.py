"""Which tensor each program of a launch belongs to, where every tensor of many has programs of its own number.

A launch has one dimension. Its table has a row of int64 words for each tensor, which begins with the first program and
the number of programs that share the tensor. Its places say which row each program belongs to.
"""

from collections.abc import Sequence
from itertools import accumulate

import triton
import triton.language as tl


def places_of(programs: Sequence[int]) -> tuple[list[int], list[int]]:
    """(the place of each program, the first program of each row), of rows that have these numbers of ``programs``."""
    places = [row for row, count in enumerate(programs) for _ in range(count)]
    return places, [0, *accumulate(programs)][:-1]


@triton.jit
def place_in(table, places, COLUMNS: tl.constexpr):
    """(the row of this program, the first program of the row, how many share it)."""
    row = table + COLUMNS * tl.load(places + tl.program_id(0))
    return row, tl.load(row).to(tl.int32), tl.load(row + 1).to(tl.int32)
