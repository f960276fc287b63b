"""Tiles of a pair's values, and errors per row."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tapscope.comparator import TokenView
from tapscope.comparator.pair_analysis.token_view import PairReader, Tile
from tapscope.core.formatting import number
from tapscope.dashboard.model.spans import even_spans

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class TileRow:
    """Row of a tile with formatted values."""

    label: str
    step: int
    baseline: tuple[str, ...]
    target: tuple[str, ...]
    difference: tuple[str, ...]
    """target - baseline."""
    share: tuple[float | None, ...]
    """|target - baseline| ÷ the largest in the tile, from 0 to 1; None if not finite."""


@dataclass(frozen=True, slots=True)
class PairTile:
    """Rectangle of a pair's values."""

    first_row: int
    first_column: int
    num_rows: int
    """Number of rows of the whole pair."""
    num_columns: int
    rows: tuple[TileRow, ...]


@dataclass(frozen=True, slots=True)
class ErrorStrip:
    """Error of every row in order; adjacent rows merge by maximum if there are many."""

    errors: tuple[str, ...]
    """Formatted errors; ``inf`` if non-finite values of the sides differ."""
    shares: tuple[float | None, ...]
    """error ÷ the largest finite error, from 0 to 1; None if not finite."""
    labels: tuple[str, ...]
    """Label of the worst row in each cell."""
    num_rows: int


@dataclass(frozen=True, slots=True)
class PairView:
    """Values of one finding around its largest error."""

    order: int
    strip: ErrorStrip
    worst_row: int
    worst_column: int
    tile: PairTile


def pair_tile(tile: Tile) -> PairTile:
    """Format a tile of the comparator, with differences and their shares."""
    with np.errstate(all="ignore"):
        delta = tile.target - tile.baseline
    equal = (tile.target == tile.baseline) | (np.isnan(tile.target) & np.isnan(tile.baseline))
    delta = np.where(equal, 0.0, delta)
    sizes = np.abs(delta)
    finite = sizes[np.isfinite(sizes)]
    top = float(finite.max()) if finite.size else 0.0
    rows = [
        TileRow(
            tile.labels[i],
            tile.steps[i],
            _formatted(tile.baseline[i]),
            _formatted(tile.target[i]),
            tuple(number(float(each)) for each in delta[i]),
            tuple((float(each) / top if top else 0.0) if math.isfinite(each) else None for each in sizes[i]),
        )
        for i in range(len(tile.rows))
    ]
    return PairTile(tile.rows[0] if tile.rows else 0, tile.first_column, tile.num_rows, tile.num_columns, tuple(rows))


def worst_value(view: TokenView, steps: tuple[int, int] | None = None) -> tuple[int, int]:
    """Return (row, column) of the largest error, within the inclusive range ``steps`` of target steps if given."""
    row, column = view.worst, max(int(view.window.column), 0)
    inside = np.zeros(0, np.int64)
    if steps is not None:
        inside = np.flatnonzero((view.steps >= steps[0]) & (view.steps <= steps[1]))
    if len(inside):
        row = int(inside[np.argmax(view.errors[inside])])
        column = max(int(view.columns[row]), 0) if row != view.worst else column
    return row, column


def error_strip(view: TokenView, cells: int = 200) -> ErrorStrip:
    """Merge the errors of all rows to at most ``cells`` cells by maximum."""
    num = len(view.errors)
    worst = [a + int(np.argmax(view.errors[a:b])) for a, b in even_spans(num, cells)]
    errors = view.errors[worst]
    finite = errors[np.isfinite(errors)]
    top = float(finite.max()) if finite.size else 0.0
    return ErrorStrip(
        tuple(number(float(each)) for each in errors),
        tuple((float(each) / top if top else 0.0) if math.isfinite(each) else None for each in errors),
        tuple(view.labels[i] for i in worst),
        num,
    )


def _formatted(values: Sequence[float] | Array) -> tuple[str, ...]:
    return tuple(f"{float(each):.5g}" for each in values)


def pair_view(
    order: int, reader: PairReader, num_rows: int, num_columns: int, steps: tuple[int, int] | None = None
) -> PairView | None:
    """Read the values around the largest error, within the inclusive range ``steps`` of target steps if given.

    None if no values were read for the comparison.
    """
    view = reader.token_view()
    if view is None:
        return None
    worst, column = worst_value(view, steps)
    tile = reader.tile(max(worst - num_rows // 2, 0), max(column - num_columns // 2, 0), num_rows, num_columns)
    return None if tile is None else PairView(order, error_strip(view), worst, column, pair_tile(tile))
