"""Digest: a tensor summarized for a screen in bounded memory.

A digest does not reference the tensor: it contains a histogram, one number per row or group of rows, and a few values.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from tapscope.render.row_labels import RowMap

Array = np.ndarray[Any, Any]

BLOCK = 1 << 18
"""Number of elements converted to float64 at a time (2 MiB)."""
STRIP_CELLS = 4096
"""Maximum number of cells of a strip; screens reduce it further."""
CORNER_ROWS, CORNER_COLUMNS = 16, 24


@dataclass(frozen=True, slots=True)
class Histogram:
    """Counts of finite values in bins of equal width."""

    counts: tuple[int, ...]
    low: float
    high: float

    def edges(self, index: int) -> tuple[float, float]:
        """Return the lower and upper edge of a bin."""
        num = len(self.counts)

        def edge(i: int) -> float:
            return self.low * (1 - i / num) + self.high * (i / num)

        return edge(index), edge(index + 1)


@dataclass(frozen=True, slots=True)
class Strip:
    """Maximum finite |x| per row, or per group of rows if there are many."""

    peaks: tuple[float, ...]
    bad: tuple[bool, ...]
    """For each cell, whether it contains a non-finite value."""
    num_rows: int

    def shrink(self, cells: int) -> "Strip":
        """Return a strip with at most ``cells`` cells; merged cells take the maximum."""
        num = len(self.peaks)
        if num <= cells:
            return self
        starts = np.arange(cells) * num // cells
        peaks = np.maximum.reduceat(np.array(self.peaks), starts)
        bad = np.logical_or.reduceat(np.array(self.bad), starts)
        return Strip(tuple(peaks.tolist()), tuple(bad.tolist()), self.num_rows)


@dataclass(frozen=True, slots=True)
class Corner:
    """A small window of a tensor viewed as [rows, width]."""

    first_row: int
    first_column: int
    values: Array
    """Float64 or int64, [at most 16, at most 24]."""
    num_rows: int
    num_columns: int


@dataclass(frozen=True, slots=True)
class Digest:
    """A summary of one tensor's values for a screen."""

    histogram: Histogram | None
    """None if no value is finite."""
    strip: Strip
    corner: Corner
    first_bad: tuple[int, ...] | None
    """Coordinates of the first non-finite value in row order."""
    bad_row: int | None
    """Flattened row of :attr:`first_bad`."""
    around_bad: Corner | None
    rows: RowMap | None
    """Labels of the rows; None if rows are simply the first axis."""
    is_magnitude: bool = False
    """True for complex values, which are shown as magnitudes."""


def digest(array: Array, rows: RowMap | None = None, *, bins: int = 32) -> Digest:
    """Summarize ``array`` (any shape and dtype of tapscope.core.dtypes); reads it twice and keeps no reference."""
    num_leading = len(rows.axes) if rows else min(array.ndim, 1)
    axes = rows.axes if rows else tuple(range(num_leading))
    view = np.moveaxis(array, axes, range(num_leading)) if array.ndim else array.reshape(1)
    table = _Table(view, max(num_leading, 1))
    strip, low, high = _scan(table)
    row = next((i for i, bad in enumerate(strip.bad) if bad), None)
    bad_row, column = _first_bad(table, row, len(strip.bad)) if row is not None else (None, None)
    coordinate = around = None
    if bad_row is not None and column is not None:
        coordinate = _coordinate(array.shape, axes, view.shape, bad_row, column) if array.ndim else ()
        around = _corner(table, max(bad_row - 2, 0), max(column - 2, 0), 5, 5)
    histogram = None if low is None or high is None else _histogram(table, low, high, bins)
    corner = _corner(table, 0, 0, CORNER_ROWS, CORNER_COLUMNS)
    is_complex = np.issubdtype(array.dtype, np.complexfloating)
    return Digest(histogram, strip, corner, coordinate, bad_row, around, rows, is_complex)


def to_float(array: Array) -> Array:
    """Convert to float64; complex values are converted to magnitudes."""
    if np.issubdtype(array.dtype, np.complexfloating):
        array = np.abs(array)
    return array.astype(np.float64)


class _Table:
    """A tensor viewed as [rows, width] without copying; rows are the ``num_leading`` leading axes."""

    def __init__(self, view: Array, num_leading: int) -> None:
        self.view = view
        self.leading = view.shape[:num_leading]
        self.num_rows = math.prod(self.leading)
        self.width = math.prod(view.shape[num_leading:])

    def window(self, row: int, num_rows: int) -> Array:
        """Return rows ``row`` to ``row + num_rows`` as [rows, width]; copies at most this window."""
        rows = range(row, min(row + num_rows, self.num_rows))
        if len(self.leading) == 1:
            return self.view[rows.start : rows.stop].reshape(len(rows), self.width)
        picked = np.unravel_index(np.arange(rows.start, rows.stop), self.leading)
        return self.view[picked].reshape(len(rows), self.width)

    def blocks(self) -> Iterator[tuple[int, int, Array]]:
        """Yield (first row, first column, float64 block) with at most BLOCK elements each, in row order."""
        if not self.width:
            return
        rows = max(BLOCK // self.width, 1)
        for row in range(0, self.num_rows, rows):
            window = self.window(row, rows)
            for column in range(0, self.width, BLOCK):
                yield row, column, to_float(window[:, column : column + BLOCK])


def _scan(table: _Table) -> tuple[Strip, float | None, float | None]:
    """Return the strip, and the smallest and largest finite value (None if there is none)."""
    cells = min(table.num_rows, STRIP_CELLS)
    peaks, bad = np.zeros(cells), np.zeros(cells, np.bool_)
    low, high = math.inf, -math.inf
    for row, _, block in table.blocks():
        finite = np.isfinite(block)
        clean = np.where(finite, block, 0.0)
        cell = np.arange(row, row + len(block)) * cells // table.num_rows
        np.maximum.at(peaks, cell, np.abs(clean).max(axis=1))
        if finite.all():
            low, high = min(low, float(block.min())), max(high, float(block.max()))
            continue
        np.logical_or.at(bad, cell, ~finite.all(axis=1))
        if finite.any():
            values = block[finite]
            low, high = min(low, float(values.min())), max(high, float(values.max()))
    strip = Strip(tuple(peaks.tolist()), tuple(bad.tolist()), table.num_rows)
    return (strip, low, high) if low <= high else (strip, None, None)


def _first_bad(table: _Table, cell: int, cells: int) -> tuple[int | None, int | None]:
    """Return row and column of the first non-finite value, which is within strip cell ``cell``."""
    first = -(-cell * table.num_rows // cells)
    stop = -(-(cell + 1) * table.num_rows // cells)
    for row in range(first, stop):
        wrong = ~np.isfinite(to_float(table.window(row, 1))[0])
        if wrong.any():
            return row, int(wrong.argmax())
    return None, None


def _coordinate(
    shape: tuple[int, ...], axes: tuple[int, ...], moved: tuple[int, ...], row: int, column: int
) -> tuple[int, ...]:
    """Return the coordinates in the original tensor of (row, column)."""
    num = len(axes)
    lead = np.unravel_index(row, moved[:num])
    rest = iter(np.unravel_index(column, moved[num:]) if moved[num:] else ())
    by_axis = dict(zip(axes, lead, strict=True))
    return tuple(int(by_axis[i]) if i in by_axis else int(next(rest)) for i in range(len(shape)))


def _histogram(table: _Table, low: float, high: float, bins: int) -> Histogram:
    """Return counts per bin. Values are divided by 4 before binning, because the range of doubles could overflow."""
    if low == high:
        bins = 1
    counts = np.zeros(bins, np.int64)
    span = high / 4 - low / 4
    for _, _, block in table.blocks():
        values = block[np.isfinite(block)]
        place = (values / 4 - low / 4) / span * bins if span else np.zeros(len(values))
        counts += np.bincount(np.minimum(place.astype(np.int64), bins - 1), minlength=bins)
    return Histogram(tuple(counts.tolist()), low, high)


def _corner(table: _Table, row: int, column: int, rows: int, columns: int) -> Corner:
    values = table.window(row, rows)[:, column : column + columns]
    exact = np.issubdtype(values.dtype, np.integer) or values.dtype == np.bool_
    kept = values.astype(np.int64) if exact and values.dtype != np.uint64 else to_float(values)
    return Corner(row, column, kept, table.num_rows, table.width)
