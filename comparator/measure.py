"""Measure: how far the joined rows of a site are apart, row by row, in one pass over the bytes of both sides."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tapscope import dtypes
from tapscope.comparator.align import Join
from tapscope.comparator.assemble import Whole
from tapscope.comparator.blocks import Block, Columns, Rows, blocks
from tapscope.comparator.layout import Layout, is_mask
from tapscope.comparator.prepare import Prepared
from tapscope.kernels.native import Measure, RowMeasures, compare_rows

Array = np.ndarray[Any, Any]


_CHUNK = 1 << 20
"""Elements that are copied at a time where they cannot be compared in place."""


class WidthError(Exception):
    """Rows that were to be compared have different widths; the text gives both shapes."""


@dataclass(frozen=True, slots=True)
class Measured:
    """All joined rows of a site; arrays have one element a row, in one order."""

    rows: RowMeasures
    at_worst: Array
    """Baseline value where the row's largest difference is (float64)."""
    pairs: Array
    """Row pair of each row; -1 when compared whole."""
    baseline_firing: Array
    target_firing: Array
    target_rank: Array
    """Rank that holds the column of the largest difference; -1 where no single one does."""
    parts: tuple[tuple[Join, int], ...] = ()
    """The joins that were read, and how many rows each has here."""
    num_hashed: int = 0
    """Elements that were not read because equal hashes already say they are equal."""

    @property
    def total(self) -> Measure:
        """Global numbers over the rows that were read."""
        return self.rows.total()


class _Side:
    """The column blocks of one side's firings, laid out once each."""

    def __init__(self, wholes: Sequence[Whole], axes: tuple[int, ...]) -> None:
        self._wholes, self._axes = wholes, axes
        self._blocks: dict[int, list[Block]] = {}

    def __getitem__(self, index: int) -> list[Block]:
        if index not in self._blocks:
            whole = self._wholes[index]
            assert whole.piece is not None
            self._blocks[index] = blocks(whole.piece, whole.run, self._axes)
        return self._blocks[index]


class Opened:
    """The column blocks of both sides of a pair, by firing."""

    def __init__(self, ready: Prepared) -> None:
        self.ready = ready
        self.left = _Side(ready.left, ready.layouts[0].axes)
        self.right = _Side(ready.right, ready.layouts[1].axes)


def measure(opened: Opened, tolerance: tuple[float, float] = (0.0, 0.0)) -> Measured:
    """Compare every join. ``tolerance`` is (atol, rtol), counted in :attr:`RowMeasures.over`.

    Raises WidthError when rows do not have one width, RunCorruptError when bytes are missing.
    """
    ready = opened.ready
    baseline, target, layouts = ready.left, ready.right, ready.layouts
    names = baseline[0].dtype, target[0].dtype
    # The most negative number that hides a place is the dtype's own.
    masks = are_masks(*names) or (names[0] != names[1] and is_mask(baseline[0].records[0].key.site))
    parts: list[RowMeasures] = []
    joins: list[tuple[Join, int]] = []
    columns: list[tuple[Array, ...]] = []
    hashed = 0
    for join in ready.plan.joins:
        one, two = baseline[join.baseline], target[join.target]
        if ready.equal_by_hash(join):
            hashed += _num_elements(one, layouts[0], join)
            continue
        _check_width(one, two, layouts)
        left, right = opened.left[join.baseline], opened.right[join.target]
        rows, at_worst, ranks = compare_blocks(left, right, join, tolerance, masks=masks)
        parts.append(rows)
        joins.append((join, len(rows)))
        pairs = np.full(len(rows), -1, np.int64) if join.pairs is None else join.pairs
        columns.append((at_worst, pairs, ranks))
    if len(columns) == 1:
        ((at_worst, pairs, ranks),) = columns
    else:
        none = (np.empty(0, np.int64),) * 3
        at_worst, pairs, ranks = map(np.concatenate, zip(none, *columns, strict=True))
    counts = [num for _, num in joins]
    firings = [join.baseline for join, _ in joins], [join.target for join, _ in joins]
    first, second = (np.repeat(np.array(side, np.int64), counts) for side in firings)
    return Measured(RowMeasures.concat(parts), at_worst, pairs, first, second, ranks, tuple(joins), hashed)


def _num_elements(whole: Whole, layout: Layout, join: Join) -> int:
    """Elements of the joined rows, padding left out."""
    if join.pairs is None:
        return math.prod(whole.shape)
    return len(join.pairs) * math.prod(n for axis, n in enumerate(whole.shape) if axis not in layout.axes)


def are_masks(baseline: str | None, target: str | None) -> bool:
    """Whether one side is boolean and the other a float: an attention mask, once as flags and once to be added."""
    return (baseline == "bool" and dtypes.is_float(target)) or (target == "bool" and dtypes.is_float(baseline))


def _visible(mask: Array) -> Array:
    """True where a mask lets through: where it is True, or where it adds nothing."""
    return mask if mask.dtype == np.bool_ else mask == 0


def _check_width(one: Whole, two: Whole, layouts: tuple[Layout, Layout]) -> None:
    if one.shape == two.shape and layouts[0] == layouts[1]:
        return
    rests = [
        [n for i, n in enumerate(w.shape) if i not in layout.axes]
        for w, layout in zip((one, two), layouts, strict=True)
    ]
    if layouts[0].by_rows:
        fits = math.prod(rests[0]) == math.prod(rests[1])
    else:
        fits = [n for n in rests[0] if n != 1] == [n for n in rests[1] if n != 1]
    if not fits:
        raise WidthError(f"shapes {tuple(one.shape)} and {tuple(two.shape)} differ beyond the token rows")


def compare_blocks(
    left: list[Block],
    right: list[Block],
    join: Join,
    tolerance: tuple[float, float] = (0.0, 0.0),
    *,
    masks: bool = False,
) -> tuple[RowMeasures, Array, Array]:
    """(measures, baseline value at each row's worst column, target rank there) of one join."""
    merged: RowMeasures | None = None
    at_worst = ranks = np.empty(0)
    for offset, one, two in overlaps(left, right):
        rows, values = _compare_columns(one, two, join, tolerance, masks)
        rank = -1 if two.block.rank is None else two.block.rank
        if merged is None:
            merged, at_worst, ranks = rows, values, np.full(len(rows), rank, np.int64)
            continue
        merged = merged.merge_columns(rows, offset)
        here = merged.argmax >= offset
        at_worst[here], ranks[here] = values[here], rank
    assert merged is not None
    return merged, at_worst, ranks


def _compare_columns(
    one: Columns, two: Columns, join: Join, tolerance: tuple[float, float], masks: bool
) -> tuple[RowMeasures, Array]:
    """(measures, baseline values at each row's worst column): in place where both sides allow it, else in chunks."""
    atol, rtol = tolerance
    rows = join.baseline_rows, join.target_rows
    if not masks and one.values is not None and two.values is not None:
        a, b, *index = _picked(one.values, rows[0], two.values, rows[1])
        found = compare_rows(a, b, *index, atol=atol, rtol=rtol)
        return found, _at(a, np.arange(len(a)) if index[0] is None else index[0], found)
    num = len(range(*rows[0].indices(one.block.num_rows))) if isinstance(rows[0], slice) else len(rows[0])
    step = max(1, _CHUNK // max(1, one.block.width, two.block.width))
    parts, values = [], [np.empty(0)]
    for start in range(0, num, step):
        a, b = (
            side.rows(part_of(some, start, min(start + step, num))) for side, some in zip((one, two), rows, strict=True)
        )
        a, b = (_visible(a), _visible(b)) if masks else (a, b)
        parts.append(compare_rows(a, b, atol=atol, rtol=rtol))
        values.append(_at(a, np.arange(len(a)), parts[-1]))
    return RowMeasures.concat(parts), np.concatenate(values)


def _at(baseline: Array, index: Array, found: RowMeasures) -> Array:
    """The baseline's values where each row is worst, as float64; 0 for rows without columns."""
    if not baseline.shape[1]:
        return np.zeros(len(index))
    return np.asarray(baseline[index, found.argmax].astype(np.float64))


def part_of(rows: Rows, start: int, stop: int) -> Rows:
    """Some of the rows, counted within them."""
    if not isinstance(rows, slice):
        return rows[start:stop]
    first = rows.start or 0
    return slice(first + start, first + stop)


def _picked(one: Array, rows_one: Rows, two: Array, rows_two: Rows) -> tuple[Any, ...]:
    """Arguments for compare_rows: slices become views, index arrays are passed on."""
    index: list[Array | None] = []
    views = []
    for values, rows in ((one, rows_one), (two, rows_two)):
        views.append(values[rows] if isinstance(rows, slice) else values)
        index.append(None if isinstance(rows, slice) else rows)
    return (*views, *index)


def overlaps(left: list[Block], right: list[Block]) -> Iterator[tuple[int, Columns, Columns]]:
    """(offset, baseline columns, target columns) for every column range both sides hold in one block, in order."""
    if len(left) == len(right) == 1 or not any(block.width for block in left):
        yield 0, left[0].columns(0, left[0].width), right[0].columns(0, right[0].width)
        return
    for a in left:
        for b in right:
            start, end = max(a.offset, b.offset), min(a.offset + a.width, b.offset + b.width)
            if start < end:
                yield start, a.columns(start, end), b.columns(start, end)
