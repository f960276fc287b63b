"""Chunks: the joined rows of a pair in portions of bounded size, so that no tensor must fit into memory."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tapscope.comparator.alignment.prepare import PreparedPair
from tapscope.comparator.alignment.row_join import RowJoin
from tapscope.comparator.assembly.blocks import Block, Rows, blocks
from tapscope.comparator.metrics.joined_rows import overlaps, part_of

Array = np.ndarray[Any, Any]

_CHUNK_ELEMENTS = 1 << 19
"""Number of elements of either side per chunk."""


class Chunk(NamedTuple):
    """Some rows and columns of a join on both sides, [rows, columns], each side in its own dtype."""

    join: RowJoin
    row: int
    """First row within the join."""
    column: int
    """First column within the full width."""
    baseline: Array
    target: Array


def columns(ready: PreparedPair) -> Iterator[Chunk]:
    """Yield every joined row that is not known equal by hash, in chunks of adjacent columns."""
    for join, left, right in _joined(ready):
        for offset, one, two in overlaps(left, right):
            for start, stop in _spans(join, left, max(one.stop - one.start, 1)):
                sides = (
                    one.rows(part_of(join.baseline_rows, start, stop)),
                    two.rows(part_of(join.target_rows, start, stop)),
                )
                yield Chunk(join, start, offset, *sides)


def rows(ready: PreparedPair, *, every: bool = False) -> Iterator[Chunk]:
    """Yield every joined row in chunks of whole rows, joined over shards.

    Rows known equal by hash are skipped unless ``every`` is set.
    """
    for join, left, right in _joined(ready, every=every):
        width = sum(block.width for block in left)
        for start, stop in _spans(join, left, max(width, 1)):
            one = _whole(left, part_of(join.baseline_rows, start, stop))
            yield Chunk(join, start, 0, one, _whole(right, part_of(join.target_rows, start, stop)))


def _joined(ready: PreparedPair, *, every: bool = False) -> Iterator[tuple[RowJoin, list[Block], list[Block]]]:
    for join in ready.plan.joins:
        if not every and ready.equal_by_hash(join):
            continue
        one, two = ready.left[join.baseline], ready.right[join.target]
        assert one.piece is not None
        assert two.piece is not None
        sides = blocks(one.piece, one.run, ready.layouts[0].axes), blocks(two.piece, two.run, ready.layouts[1].axes)
        yield join, *sides


def _spans(join: RowJoin, left: list[Block], width: int) -> Iterator[tuple[int, int]]:
    some = join.baseline_rows
    num = len(range(*some.indices(left[0].num_rows))) if isinstance(some, slice) else len(some)
    step = max(1, _CHUNK_ELEMENTS // width)
    yield from ((start, min(start + step, num)) for start in range(0, num, step))


def _whole(side: list[Block], some: Rows) -> Array:
    return np.concatenate([block.rows(some) for block in side], axis=1)
