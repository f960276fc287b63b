"""Token view: the rows of one finding with their errors, and a window around the worst element."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from tapscope.comparator.alignment.layout import Layout
from tapscope.comparator.alignment.prepare import PreparedPair
from tapscope.comparator.alignment.row_map import RowMap
from tapscope.comparator.assembly.assemble import AssembledTensor
from tapscope.comparator.assembly.blocks import Rows, blocks, row_axes
from tapscope.comparator.assembly.pieces import records_at
from tapscope.comparator.metrics.lazy_pair import LazyPair
from tapscope.comparator.metrics.measure import measure
from tapscope.comparator.pair_analysis.row_place import element_of
from tapscope.core import dtypes
from tapscope.core.observe import row_label
from tapscope.kernels.native.aggregate import row_errors

Array = np.ndarray[Any, Any]

MARGIN = 6
"""Number of columns shown on either side of the worst one."""


class Window(Struct, frozen=True):
    """Adjacent columns of one row on both sides."""

    first: int
    """Index of the first column of the window."""
    column: int
    """Index of the column of interest."""
    baseline: Array
    """[columns] float64."""
    target: Array


class TokenView(Struct, frozen=True):
    """The rows of a finding that were read; rows with equal hashes are not included."""

    errors: Array
    """[rows] float64: norm of the row's difference / norm of its baseline.

    inf if only the target is nonzero, or if the sides are not finite in different ways.
    """
    max_abs: Array
    """[rows] float64: largest absolute difference of an element."""
    columns: Array
    """[rows] int64: column of the largest difference; -1 for a non-finite difference."""
    steps: Array
    """[rows] int64: target step."""
    labels: Sequence[str]
    """``0:5`` for position 5 of request 0, or the row index without token rows."""
    worst: int
    """Index of the row with the largest error."""
    window: Window
    """Columns around the largest difference of the worst row, or around its first value that is non-finite on one side
    only."""


class Tile(Struct, frozen=True):
    """A rectangle of a pair's rows and columns on both sides."""

    rows: tuple[int, ...]
    """Row indices in the order of :class:`TokenView`."""
    labels: tuple[str, ...]
    steps: tuple[int, ...]
    """Target step of each row."""
    first_column: int
    num_rows: int
    """Number of rows of the whole pair."""
    num_columns: int
    baseline: Array
    """[rows, columns] float64; nan beyond the end of a shorter row."""
    target: Array


class PairReader:
    """Re-reads one pair of sites: the errors of all rows immediately, values by rectangle on demand."""

    def __init__(self, ready: PreparedPair, rows: RowMap, tolerance: tuple[float, float] = (0.0, 0.0)) -> None:
        """Measure the pair. Raises like :func:`.measure.measure`."""
        self._ready = ready
        self._measured = measure(LazyPair(ready), tolerance)
        self._row_map, self._pairs = rows, self._measured.pairs
        self._labels = self._all_labels() if len(self._measured.rows) else []
        self._steps = np.array([w.records[0].key.step for w in ready.right])[self._measured.target_firing]

    @property
    def num_rows(self) -> int:
        """Number of rows that were read; rows with equal hashes are not included."""
        return len(self._measured.rows)

    def token_view(self) -> TokenView | None:
        """Return the errors of all rows; None if no rows were read."""
        measured = self._measured
        if not self.num_rows:
            return None
        odd = measured.rows.nonfinite_mismatch > 0
        errors = np.where(odd, np.inf, row_errors(measured.rows))
        worst = int(np.argmax(errors))
        return TokenView(
            errors,
            np.where(odd, np.nan, measured.rows.max_abs),
            np.where(odd, -1, measured.rows.argmax),
            self._steps,
            self._labels,
            worst,
            self._window(worst),
        )

    def tile(self, row: int, column: int, num_rows: int, num_columns: int) -> Tile | None:
        """Return the rectangle that begins at (row, column), clipped to the pair; None if no rows were read."""
        if not self.num_rows:
            return None
        row = max(min(row, self.num_rows - 1), 0)
        rows = range(row, min(row + num_rows, self.num_rows))
        values = [self._sides(each) for each in rows]
        width = max(len(side) for pair in values for side in pair)
        first = max(min(column, width - 1), 0)
        shown = min(num_columns, width - first)
        cut = [[_padded(side[first : first + shown], shown) for side in pair] for pair in values]
        return Tile(
            rows=tuple(rows),
            labels=tuple(self._labels[i] for i in rows),
            steps=tuple(self._steps[rows.start : rows.stop].tolist()),
            first_column=first,
            num_rows=self.num_rows,
            num_columns=width,
            baseline=np.array([pair[0] for pair in cut]),
            target=np.array([pair[1] for pair in cut]),
        )

    @property
    def width(self) -> int:
        """Number of columns of the widest row; a complex number takes two."""
        return self._measured.width

    @property
    def dtypes(self) -> tuple[str, str]:
        """Recorded dtypes of (baseline, target)."""
        return self._ready.left[0].dtype or "", self._ready.right[0].dtype or ""

    @property
    def labels(self) -> Sequence[str]:
        """Label of every row: ``0:5`` for position 5 of request 0, or the row index without token rows."""
        return self._labels

    @property
    def steps(self) -> Array:
        """[rows] int64: target step."""
        return self._steps

    def token_place(self, row: int) -> tuple[str, int, int] | None:
        """Return (request, position, branch) of a row; None without token rows."""
        pair, rows = int(self._pairs[row]), self._row_map
        if pair < 0:
            return None
        request = rows.requests[rows.pair_request.item(pair)]
        return request, rows.pair_position.item(pair), rows.pair_branch.item(pair)

    def chunk(self, row: int, num_rows: int, columns: slice = slice(None)) -> tuple[Array, Array]:
        """Return both sides of the rows from ``row`` on as [rows, columns], in their recorded dtypes.

        Returns at most ``num_rows`` rows, all from one join, that is one firing. Where the tensor is stored
        contiguously, only ``columns`` are read; they end where the row ends. Raises RunCorruptError.
        """
        part = self._measured.part_at(row)
        at, join = row - part.first, part.join
        some = slice(at, min(at + num_rows, part.num_rows))
        left, right = self._ready.left[join.baseline], self._ready.right[join.target]
        return (
            _rows(left, self._ready.layouts[0], join.baseline_rows, some, columns),
            _rows(right, self._ready.layouts[1], join.target_rows, some, columns),
        )

    def target_index(self, row: int, column: int) -> tuple[int, ...]:
        """Return the index of an element in the target's tensor, assembled from all ranks; empty beyond the end of a
        shorter row."""
        return self._target_element(row, column)[1]

    def recorded_index(self, row: int, column: int) -> tuple[int, tuple[int, ...]]:
        """Return (lowest rank that recorded an element of the target, index in its record); (-1, ()) beyond the end of
        a row."""
        whole, element = self._target_element(row, column)
        if whole.piece is None or not element:
            return -1, element
        places = [(record.key.rank, tuple(map(int, index))) for record, index in records_at(whole.piece, element)]
        return min(places, default=(-1, ()))

    def _target_element(self, row: int, column: int) -> tuple[AssembledTensor, tuple[int, ...]]:
        part = self._measured.part_at(row)
        whole, layout = self._ready.right[part.join.target], self._ready.layouts[1]
        rows, at = part.join.target_rows, row - part.first
        flat = (rows.start or 0) + at if isinstance(rows, slice) else int(rows[at])
        shape = tuple(whole.piece.shape) if whole.piece is not None else ()
        axes = layout.axes or row_axes(shape)
        width = math.prod(n for i, n in enumerate(shape) if i not in axes)
        width *= 2 if (whole.dtype or "") in dtypes.COMPLEX else 1
        return whole, element_of(whole, layout, flat, column) if column < width else ()

    def _all_labels(self) -> list[str]:
        if self._pairs[0] < 0:
            first: dict[int, int] = {}
            return [str(i - first.setdefault(int(firing), i)) for i, firing in enumerate(self._measured.target_firing)]
        rows = self._row_map
        columns = (each[self._pairs].tolist() for each in (rows.pair_request, rows.pair_position, rows.pair_branch))
        return [row_label(rows.requests[r], p, branch) for r, p, branch in zip(*columns, strict=True)]

    def _sides(self, row: int) -> tuple[Array, Array]:
        """Return all columns of one row on both sides, as float64."""
        left, right = self.chunk(row, 1)
        return left[0].astype(np.float64), right[0].astype(np.float64)

    def _window(self, row: int) -> Window:
        left, right = self._sides(row)
        odd = ~((left == right) | (np.isnan(left) & np.isnan(right)) | (np.isfinite(left) & np.isfinite(right)))
        column = int(np.argmax(odd)) if odd.any() else max(int(self._measured.rows.argmax[row]), 0)
        first = max(column - MARGIN, 0)
        return Window(first, column, left[first : column + MARGIN + 1], right[first : column + MARGIN + 1])


def _rows(whole: AssembledTensor, layout: Layout, rows: Rows, some: slice, columns: slice) -> Array:
    """Return consecutive joined rows as [rows, columns]."""
    assert whole.piece is not None
    first = (rows.start or 0) if isinstance(rows, slice) else 0
    index = slice(first + some.start, first + some.stop) if isinstance(rows, slice) else rows[some]
    row_blocks = blocks(whole.piece, whole.run, layout.axes)
    start, stop, _ = columns.indices(sum(block.width for block in row_blocks))
    parts = []
    for block in row_blocks:
        low, high = max(start - block.offset, 0), min(stop - block.offset, block.width)
        if low >= high:
            continue
        in_place = block.values
        parts.append(np.asarray(block.rows(index)[:, low:high] if in_place is None else in_place[:, low:high][index]))
    if not parts:
        return np.zeros(
            (some.stop - some.start, 0), row_blocks[0].values.dtype if row_blocks[0].values is not None else float
        )
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)


def token_view(ready: PreparedPair, rows: RowMap, tolerance: tuple[float, float] = (0.0, 0.0)) -> TokenView | None:
    """Measure a pair again, row by row; return None if no rows had to be read.

    Raises like :func:`.measure.measure`.
    """
    return PairReader(ready, rows, tolerance).token_view()


def _padded(values: Array, width: int) -> Array:
    return np.concatenate([values, np.full(width - len(values), np.nan)]) if len(values) < width else values
