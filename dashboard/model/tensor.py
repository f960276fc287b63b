"""Tensor views: tiles of values, and errors along rows."""

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
    """A row of a tile: values as they are shown."""

    label: str
    step: int
    baseline: tuple[str, ...]
    target: tuple[str, ...]
    difference: tuple[str, ...]
    """target - baseline."""
    share: tuple[float | None, ...]
    """|target - baseline| ÷ the largest of the tile, from 0 to 1; null where that is not finite."""


@dataclass(frozen=True, slots=True)
class PairTile:
    """A rectangle of a pair's values."""

    first_row: int
    first_column: int
    num_rows: int
    """Rows of the whole pair."""
    num_columns: int
    rows: tuple[TileRow, ...]


@dataclass(frozen=True, slots=True)
class ErrorStrip:
    """The error of every row in order, joined by maximum where there are many."""

    errors: tuple[str, ...]
    """Formatted; ``inf`` where the sides are not finite in different ways."""
    shares: tuple[float | None, ...]
    """error ÷ the largest finite one, from 0 to 1; null where it is not finite."""
    labels: tuple[str, ...]
    """The worst row of each cell."""
    num_rows: int


@dataclass(frozen=True, slots=True)
class PairView:
    """The values of one finding."""

    order: int
    strip: ErrorStrip
    worst_row: int
    worst_column: int
    tile: PairTile


def pair_tile(tile: Tile) -> PairTile:
    """A tile for people and programs."""
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
    """Row and column of the largest error, of the target steps from ``steps[0]`` to ``steps[1]`` if given."""
    row, column = view.worst, max(int(view.window.column), 0)
    inside = np.zeros(0, np.int64)
    if steps is not None:
        inside = np.flatnonzero((view.steps >= steps[0]) & (view.steps <= steps[1]))
    if len(inside):
        row = int(inside[np.argmax(view.errors[inside])])
        column = max(int(view.columns[row]), 0) if row != view.worst else column
    return row, column


def error_strip(view: TokenView, cells: int = 200) -> ErrorStrip:
    """The errors of all rows in at most ``cells`` cells."""
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
    """The values around the largest error, of the target steps from ``steps[0]`` to ``steps[1]`` if given.

    None where nothing had to be read.
    """
    view = reader.token_view()
    if view is None:
        return None
    worst, column = worst_value(view, steps)
    tile = reader.tile(max(worst - num_rows // 2, 0), max(column - num_columns // 2, 0), num_rows, num_columns)
    return None if tile is None else PairView(order, error_strip(view), worst, column, pair_tile(tile))
