"""Measure: how far the joined rows of a site are apart, row by row, in one pass over the bytes of both sides."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tapscope import dtypes
from tapscope.comparator.align import Join, Rows
from tapscope.comparator.assemble import Whole
from tapscope.comparator.layout import Layout
from tapscope.comparator.pieces import Block, blocks
from tapscope.comparator.prepare import Prepared
from tapscope.kernels.native import Measure, RowMeasures, compare_rows

Array = np.ndarray[Any, Any]


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
    num_hashed: int = 0
    """Elements that were not read because equal hashes already say they are equal."""

    @property
    def total(self) -> Measure:
        """Global numbers over the rows that were read."""
        return self.rows.total()


class _Opened:
    """The column blocks of firings, opened once each while a site is measured."""

    def __init__(self, wholes: Sequence[Whole], axes: tuple[int, ...], as_mask: bool) -> None:
        self._wholes, self._axes, self._as_mask = wholes, axes, as_mask
        self._blocks: dict[int, list[Block]] = {}

    def __getitem__(self, index: int) -> list[Block]:
        if index not in self._blocks:
            whole = self._wholes[index]
            assert whole.piece is not None
            found = blocks(whole.piece, whole.run, self._axes)
            self._blocks[index] = [b._replace(values=_visible(b.values)) if self._as_mask else b for b in found]
        return self._blocks[index]


def measure(ready: Prepared, tolerance: tuple[float, float] = (0.0, 0.0)) -> Measured:
    """Compare every join. ``tolerance`` is (atol, rtol), counted in :attr:`RowMeasures.over`.

    Raises WidthError when rows do not have one width, RunCorruptError when bytes are missing.
    """
    baseline, target, layouts = ready.left, ready.right, ready.layouts
    masks = are_masks(baseline[0].dtype, target[0].dtype)
    left, right = _Opened(baseline, layouts[0].axes, masks), _Opened(target, layouts[1].axes, masks)
    parts: list[RowMeasures] = []
    columns: list[tuple[Array, ...]] = []
    hashed = 0
    for join in ready.plan.joins:
        one, two = baseline[join.baseline], target[join.target]
        if ready.equal_by_hash(join):
            hashed += math.prod(one.shape)
            continue
        _check_width(one, two, layouts)
        rows, at_worst, ranks = _compare(left[join.baseline], right[join.target], join, tolerance)
        parts.append(rows)
        pairs = np.full(len(rows), -1, np.int64) if join.pairs is None else join.pairs
        firings = (np.full(len(rows), index, np.int64) for index in (join.baseline, join.target))
        columns.append((at_worst, pairs, *firings, ranks))
    none = (np.empty(0, np.int64),) * 5
    at_worst, pairs, baseline_firing, target_firing, ranks = map(np.concatenate, zip(none, *columns, strict=True))
    return Measured(RowMeasures.concat(parts), at_worst, pairs, baseline_firing, target_firing, ranks, hashed)


def are_masks(baseline: str | None, target: str | None) -> bool:
    """Whether one side is boolean and the other a float: an attention mask, once as flags and once to be added."""
    return (baseline == "bool" and dtypes.is_float(target)) or (target == "bool" and dtypes.is_float(baseline))


def _visible(mask: Array) -> Array:
    """True where a mask lets through: where it is True, or where it adds nothing."""
    return mask if mask.dtype == np.bool_ else mask == 0


def _check_width(one: Whole, two: Whole, layouts: tuple[Layout, Layout]) -> None:
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


def _compare(
    left: list[Block], right: list[Block], join: Join, tolerance: tuple[float, float]
) -> tuple[RowMeasures, Array, Array]:
    """(measures, baseline value at each row's worst column, target rank there) of one join."""
    atol, rtol = tolerance
    merged: RowMeasures | None = None
    pieces = []
    for offset, one, two, rank in _overlaps(left, right):
        rows = compare_rows(*_picked(one, join.baseline_rows, two, join.target_rows), atol=atol, rtol=rtol)
        pieces.append((offset, one, rank))
        merged = rows if merged is None else merged.merge_columns(rows, offset)
    assert merged is not None
    at_worst, ranks = np.zeros(len(merged)), np.full(len(merged), -1, np.int64)
    for offset, one, rank in pieces:
        here = np.flatnonzero((merged.argmax >= offset) & (merged.argmax < offset + int(one.shape[1])))
        values = one[join.baseline_rows] if isinstance(join.baseline_rows, slice) else one
        index = here if isinstance(join.baseline_rows, slice) else join.baseline_rows[here]
        at_worst[here] = values[index, merged.argmax[here] - offset].astype(np.float64)
        ranks[here] = -1 if rank is None else rank
    return merged, at_worst, ranks


def _picked(one: Array, rows_one: Rows, two: Array, rows_two: Rows) -> tuple[Any, ...]:
    """Arguments for compare_rows: slices become views, index arrays are passed on."""
    index: list[Array | None] = []
    views = []
    for values, rows in ((one, rows_one), (two, rows_two)):
        views.append(values[rows] if isinstance(rows, slice) else values)
        index.append(None if isinstance(rows, slice) else rows)
    return (*views, *index)


def _overlaps(left: list[Block], right: list[Block]) -> Iterator[tuple[int, Array, Array, int | None]]:
    """(offset, baseline columns, target columns, target rank) for every column range both sides hold in one block."""
    if len(left) == len(right) == 1 and left[0].values.shape[1] == right[0].values.shape[1]:
        yield 0, left[0].values, right[0].values, right[0].rank
        return
    for a in left:
        for b in right:
            start = max(a.offset, b.offset)
            end = min(a.offset + a.values.shape[1], b.offset + b.values.shape[1])
            if start < end:
                yield (
                    start,
                    a.values[:, start - a.offset : end - a.offset],
                    b.values[:, start - b.offset : end - b.offset],
                    b.rank,
                )
