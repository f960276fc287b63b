"""Joined rows: matched rows of both sides, passed to the kernel in place if possible, otherwise copied in chunks."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from tapscope.comparator.alignment.row_join import RowJoin
from tapscope.comparator.assembly.blocks import Block, Columns, Rows
from tapscope.kernels.native import Compared, RowMeasures, Strip, compare_strips
from tapscope.kernels.native.row_blocks import Summands

Array = np.ndarray[Any, Any]

_COPY_ELEMENTS = 1 << 20
"""Number of elements per copy if rows cannot be compared in place."""


class ReadJoin(Struct, frozen=True):
    """A join whose rows were read."""

    join: RowJoin
    first: int
    """Index of the join's first row among all rows that were read."""
    num_rows: int


def part_at(parts: Sequence[ReadJoin], row: int) -> ReadJoin:
    """Return the join that contains a row."""
    return parts[bisect_right(parts, row, key=lambda part: part.first) - 1]


class JoinedRows:
    """Joins to compare: those stored in place on both sides in one call, the others in chunks."""

    def __init__(self, tolerance: tuple[float, float] = (0.0, 0.0)) -> None:
        self._atol, self._rtol = tolerance
        self._row_blocks: list[Strip] = []
        self._waiting = 0
        """Number of rows in the row blocks."""
        self._copied_rows: list[tuple[int, Array]] = []
        """(index of the first row of a group, order of the group's rows)."""
        self._done: list[Compared] = []
        self.ranks: list[int | None] = []
        """For each row block, the rank that alone holds the target's columns, or None."""
        self.num_rows = 0

    def add(self, left: list[Block], right: list[Block], join: RowJoin, *, masks: bool = False) -> int:
        """Add the rows of a join, and return their number.

        ``masks`` compares whether positions are visible, instead of values.
        """
        return self.add_columns(overlaps(left, right), join, masks=masks)

    def add_columns(self, both: "list[tuple[int, Columns, Columns]]", join: RowJoin, *, masks: bool = False) -> int:
        """Add the rows of a join for the column ranges returned by :func:`overlaps`, and return their number."""
        num = _length(join.baseline_rows, both[0][1].block)
        if masks or not all(_is_in_place(side) for _, *sides in both for side in sides):
            self._compare()
            self._done.append(self._copied(both, join, num, masks=masks))
        else:
            for offset, one, two in both:
                picked = _picked(_stored(one), join.baseline_rows, _stored(two), join.target_rows)
                self._row_blocks.append(Strip(*picked, self._waiting, offset))
                self.ranks.append(two.block.rank)
            self._waiting += num
        self.num_rows += num
        return num

    def add_row_blocks(self, strips: Sequence[Strip], order: Array | None, rank: int) -> None:
        """Add row blocks of whole rows.

        ``order`` is the index of each row among all rows, ``rank`` the target's rank.
        """
        if order is not None:
            self._copied_rows.append((self._waiting, np.argsort(order)))
        for strip in strips:
            self._row_blocks.append(strip._replace(row=self._waiting))
            self.ranks.append(rank)
            self._waiting += strip.num_rows
            self.num_rows += strip.num_rows

    def _copied(self, both: list[tuple[int, Columns, Columns]], join: RowJoin, num: int, *, masks: bool) -> Compared:
        """Compare a join by copying it in chunks."""
        whole = Compared.empty(num)
        step = max(1, _COPY_ELEMENTS // max(1, sum(max(one.block.width, two.block.width) for _, one, two in both)))
        for start in range(0, num, step):
            stop = min(start + step, num)
            strips = []
            for offset, one, two in both:
                a = one.rows(part_of(join.baseline_rows, start, stop))
                b = two.rows(part_of(join.target_rows, start, stop))
                strips.append(Strip(*((_visible(a), _visible(b)) if masks else (a, b)), column=offset))
            whole.put(start, compare_strips(strips, stop - start, atol=self._atol, rtol=self._rtol))
        whole.strip[:] += len(self.ranks)
        self.ranks += [two.block.rank for _, _, two in both]
        return whole

    def _compare(self) -> None:
        if self._row_blocks:
            compared = compare_strips(self._row_blocks, self._waiting, atol=self._atol, rtol=self._rtol)
            compared.strip[:] += len(self.ranks) - len(self._row_blocks)
            for start, order in self._copied_rows:
                here = slice(start, start + len(order))
                for values in (compared.rows.floats, compared.rows.integers, compared.at_worst, compared.strip):
                    values[..., here] = values[..., here][..., order]
            self._done.append(compared)
        self._row_blocks, self._waiting, self._copied_rows = [], 0, []

    def compared(self) -> Compared:
        """Return the comparisons in the order in which rows were added."""
        self._compare()
        if len(self._done) == 1:
            return self._done[0]
        whole, start = Compared.empty(self.num_rows), self.num_rows
        while self._done:  # release each part once copied: there may be millions of rows
            part = self._done.pop()
            start -= len(part.strip)
            whole.put(start, part)
        return whole


def compare_blocks(left: list[Block], right: list[Block], join: RowJoin) -> RowMeasures:
    """Compare the rows of a single join."""
    joined = JoinedRows()
    joined.add(left, right, join)
    return joined.compared().rows


def compare_columns(one: Columns, two: Columns, join: RowJoin, *, masks: bool = False) -> RowMeasures:
    """Compare the rows of a single join in a single column range."""
    joined = JoinedRows()
    joined.add_columns([(0, one, two)], join, masks=masks)
    return joined.compared().rows


def _length(rows: Rows, block: Block) -> int:
    return len(range(*rows.indices(block.num_rows))) if isinstance(rows, slice) else len(rows)


def _visible(mask: Array) -> Array:
    """Return a mask of the visible positions, where ``mask`` is True or, as an additive mask, zero."""
    return mask if mask.dtype == np.bool_ else mask == 0


def part_of(rows: Rows, start: int, stop: int) -> Rows:
    """Return rows ``start:stop`` of the given rows."""
    if not isinstance(rows, slice):
        return rows[start:stop]
    first = rows.start or 0
    return slice(first + start, first + stop)


def _is_in_place(side: Columns) -> bool:
    return side.block.values is not None or side.block.summands is not None


def _stored(side: Columns) -> Array | Summands:
    stored = side.summands if side.values is None else side.values
    assert stored is not None
    return stored


def _picked(one: Array | Summands, rows_one: Rows, two: Array | Summands, rows_two: Rows) -> tuple[Any, Any, Any, Any]:
    """Return (both matrices, both row indices) of a row block: slices become views, index arrays are kept."""
    left, right = isinstance(rows_one, slice), isinstance(rows_two, slice)
    return (
        _some_rows(one, rows_one) if left else one,
        _some_rows(two, rows_two) if right else two,
        None if left else rows_one,
        None if right else rows_two,
    )


def _some_rows(side: Array | Summands, rows: Rows) -> Array | Summands:
    return side.select(rows) if isinstance(side, Summands) else side[rows]


def overlaps(left: list[Block], right: list[Block]) -> list[tuple[int, Columns, Columns]]:
    """Return (offset, baseline columns, target columns) for each column range within one block per side, in order."""
    if len(left) == len(right) == 1 or not any(block.width for block in left):
        return [(0, left[0].columns(0, left[0].width), right[0].columns(0, right[0].width))]
    parts = []
    for a in left:
        for b in right:
            start, end = max(a.offset, b.offset), min(a.offset + a.width, b.offset + b.width)
            if start < end:
                parts.append((start, a.columns(start, end), b.columns(start, end)))
    return parts
