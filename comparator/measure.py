"""Measure: how far the joined rows of sites are apart, row by row, in one pass over the bytes of both sides."""

import math
from bisect import bisect_right
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from msgspec import Struct

from tapscope import dtypes
from tapscope.comparator.align import Join
from tapscope.comparator.assemble import Whole
from tapscope.comparator.blocks import Block, blocks
from tapscope.comparator.joined_rows import JoinedRows
from tapscope.comparator.layout import Layout, is_mask
from tapscope.comparator.prepare import Prepared
from tapscope.errors import DataError
from tapscope.kernels.native import Measure, Overview, RowMeasures, overviews

Array = np.ndarray[Any, Any]


class WidthError(Exception):
    """Rows that were to be compared have different widths; the text gives both shapes."""


class Part(Struct, frozen=True):
    """A join that was read."""

    join: Join
    first: int
    """Its first row among all that were read."""
    num_rows: int


class Measured(Struct, frozen=True):
    """All joined rows of a site; arrays have one element a row, in one order."""

    rows: RowMeasures
    at_worst: Array
    """Baseline value where the row's largest difference is (float64)."""
    strip: Array
    """Index in :attr:`ranks` of the columns that hold the largest difference."""
    ranks: tuple[int | None, ...]
    """Rank that alone holds the target's columns, strip by strip, of all pairs that were measured together."""
    parts: tuple[Part, ...] = ()
    num_hashed: int = 0
    """Elements that were not read because equal hashes already say they are equal."""
    width: int = 0
    """Elements of the widest row."""

    @property
    def total(self) -> Measure:
        """Global numbers over the rows that were read."""
        return self.rows.total()

    @property
    def pairs(self) -> Array:
        """Row pair of each row; -1 when compared whole."""
        found = [np.full(p.num_rows, -1, np.int64) if p.join.pairs is None else p.join.pairs for p in self.parts]
        return np.concatenate([np.empty(0, np.int64), *found])

    @property
    def baseline_firing(self) -> Array:
        """Index of the firing of each row."""
        return self._each([part.join.baseline for part in self.parts])

    @property
    def target_firing(self) -> Array:
        """See :attr:`baseline_firing`."""
        return self._each([part.join.target for part in self.parts])

    def _each(self, values: list[int]) -> Array:
        return np.repeat(np.array(values, np.int64), [part.num_rows for part in self.parts])

    def part_at(self, row: int) -> Part:
        """The part that a row belongs to."""
        return self.parts[bisect_right(self.parts, row, key=lambda part: part.first) - 1]


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
    (found,), _ = measure_all([opened], tolerance)
    if isinstance(found, Exception):
        raise found
    return found


def measure_all(
    pairs: Sequence[Opened], tolerance: tuple[float, float] = (0.0, 0.0)
) -> tuple[list[Measured | WidthError | DataError], list[Overview]]:
    """The same of several pairs at once, in one native call where bytes lie in place, and what is raised of each; and
    the overview of each one's rows."""
    joined = JoinedRows(tolerance)
    begun: list[tuple[tuple[Part, ...], int, int] | WidthError | DataError] = []
    bounds = [0]
    for opened in pairs:
        try:
            begun.append(_join(opened, joined))
        except (WidthError, DataError) as error:
            begun.append(error)
        bounds.append(joined.num_rows)
    rows, at_worst, strip = joined.compared()
    ranks = tuple(joined.ranks)
    found = [
        one
        if isinstance(one, Exception)
        else Measured(rows[first:stop], at_worst[first:stop], strip[first:stop], ranks, *one)
        for one, (first, stop) in zip(begun, pairwise(bounds), strict=True)
    ]
    return found, overviews(rows, at_worst, bounds)


def _join(opened: Opened, joined: JoinedRows) -> tuple[tuple[Part, ...], int, int]:
    """(the joins of a pair that have to be read, elements of those that hashes call equal, width of the widest row)."""
    ready = opened.ready
    baseline, target, layouts = ready.left, ready.right, ready.layouts
    names = baseline[0].dtype, target[0].dtype
    # The most negative number that hides a place is the dtype's own.
    masks = are_masks(*names) or (names[0] != names[1] and is_mask(baseline[0].records[0].key.site))
    parts, hashed, width, first = list[Part](), 0, 0, joined.num_rows
    for join in ready.plan.joins:
        if ready.equal_by_hash(join):
            hashed += _num_elements(baseline[join.baseline], layouts[0], join)
            continue
        _check_width(baseline[join.baseline], target[join.target], layouts)
        start, left = joined.num_rows - first, opened.left[join.baseline]
        num_rows = joined.add(left, opened.right[join.target], join, masks=masks)
        parts.append(Part(join, start, num_rows))
        width = max(width, sum([block.width for block in left]) if num_rows else 0)
    return tuple(parts), hashed, width


def _num_elements(whole: Whole, layout: Layout, join: Join) -> int:
    """Elements of the joined rows, padding left out."""
    if join.pairs is None:
        return math.prod(whole.shape)
    return len(join.pairs) * math.prod(n for axis, n in enumerate(whole.shape) if axis not in layout.axes)


def are_masks(baseline: str | None, target: str | None) -> bool:
    """Whether one side is boolean and the other a float: an attention mask, once as flags and once to be added."""
    return (baseline == "bool" and dtypes.is_float(target)) or (target == "bool" and dtypes.is_float(baseline))


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
