"""Rectangle of a table's values as text, and single elements with index, difference and ULPs."""

import math
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from tapscope.comparator.metrics.detail import distances
from tapscope.core.errors import ConfigError
from tapscope.core.formatting import number
from tapscope.dashboard.model.elementwise import as_float64, difference, is_integer
from tapscope.dashboard.model.value_table import ValueTable

Array = np.ndarray[Any, Any]
V = TypeVar("V")

MAX_ROWS, MAX_COLUMNS = 256, 256
"""Maximum size of one tile."""


@dataclass(frozen=True, slots=True)
class Tile:
    """Rectangle of formatted values."""

    first_row: int
    first_column: int
    num_rows: int
    """Rows of the whole table."""
    num_columns: int
    labels: tuple[str, ...]
    """``0:5`` for position 5 of request 0, with its token if known; else the index of the row."""
    steps: tuple[int, ...]
    """Target step of each row of a pair."""
    baseline: tuple[tuple[str, ...], ...]
    """Empty for a single run."""
    target: tuple[tuple[str, ...], ...]
    difference: tuple[tuple[str, ...], ...]
    """target - baseline; exact for integers."""
    shares: tuple[tuple[float | None, ...], ...]
    """|difference|, or |x| of a single run, ÷ the largest in the tile, from 0 to 1; None if not finite."""


@dataclass(frozen=True, slots=True)
class CellView:
    """One element of the table, on both sides."""

    row: int
    column: int
    index: str
    """``[r,c]`` in the recorded tensor (of the target); empty if the element has no index."""
    label: str
    baseline: str
    target: str
    difference: str
    ulps: str
    """Number of steps of the coarser dtype (ULPs) between both sides; ``-`` for integers."""
    link: str


def tile(table: ValueTable, row: int, column: int, num_rows: int, num_columns: int) -> Tile:
    """Read the rectangle with the upper left corner (row, column), clipped to the table and to the maximum size."""
    if not table.num_rows or not table.num_columns:
        return Tile(0, 0, table.num_rows, table.num_columns, (), (), (), (), (), ())
    row, column = table.clamped(row, column)
    stop = min(row + max(min(num_rows, MAX_ROWS), 1), table.num_rows)
    columns = slice(column, min(column + max(min(num_columns, MAX_COLUMNS), 1), table.num_columns))
    width = columns.stop - column
    sides = [(left, right) for _, left, right in table.chunks(row, stop, columns)]
    with np.errstate(all="ignore"):
        deltas = [difference(left, right) for left, right in sides] if table.is_pair else []
        sizes = [np.abs(as_float64(each)) for each in (deltas if table.is_pair else [right for _, right in sides])]
    top = max((float(part[np.isfinite(part)].max(initial=0.0)) for part in sizes), default=0.0)
    shares = tuple(
        _padded(tuple((float(v) / top if top else 0.0) if math.isfinite(v) else None for v in line), width, 0.0)
        for part in sizes
        for line in part
    )
    numbers = range(row, stop)
    return Tile(
        first_row=row,
        first_column=column,
        num_rows=table.num_rows,
        num_columns=table.num_columns,
        labels=tuple(map(table.label, numbers)),
        steps=tuple(map(table.step, numbers)),
        baseline=tuple(_padded(_texts(line), width, "") for left, _ in sides for line in left) if table.is_pair else (),
        target=tuple(_padded(_texts(line), width, "") for _, right in sides for line in right),
        difference=tuple(_padded(_delta_texts(line), width, "") for each in deltas for line in each),
        shares=shares,
    )


def cell(table: ValueTable, row: int, column: int) -> CellView:
    """Read one element; empty if its row ends before ``column``. Raises ConfigError for an empty table."""
    if not table.num_rows or not table.num_columns:
        raise ConfigError("the tensor has no values")
    row, column = table.clamped(row, column)
    left, right = (side[0] for side in table.chunk(row, 1, slice(column, column + 1)))
    if not len(right):
        return CellView(row, column, "", table.label(row), "", "", "", "-", table.link(row, column))
    index = table.index(row, column)
    ulps = "-"
    if table.ulp_dtype is not None:
        steps = distances(left, right, table.ulp_dtype)
        ulps = f"{int(steps[0]):,}" if len(steps) else "-"
    with np.errstate(all="ignore"):
        delta = _delta_texts(difference(left[None], right[None])[0])[0] if table.is_pair else ""
    return CellView(
        row=row,
        column=column,
        index=f"[{','.join(map(str, index))}]" if index else "",
        label=table.label(row),
        baseline=_texts(left)[0] if table.is_pair else "",
        target=_texts(right)[0],
        difference=delta,
        ulps=ulps,
        link=table.link(row, column),
    )


def _texts(values: Array) -> tuple[str, ...]:
    """Format values: integers exactly, floats to five significant digits."""
    if is_integer(values):
        return tuple(str(bool(v)) if values.dtype == np.bool_ else str(int(v)) for v in values)
    if values.dtype.kind == "c":
        return tuple(f"{complex(v):.4g}" for v in values)
    return tuple(f"{float(v):.5g}" for v in values)


def _delta_texts(values: Array) -> tuple[str, ...]:
    if values.dtype.kind in "iuO":
        return tuple(f"{int(v):+d}" if v else "0" for v in values)
    return tuple(map(number, map(float, np.abs(values) if values.dtype.kind == "c" else values)))


def _padded(line: tuple[V, ...], width: int, filler: V) -> tuple[V, ...]:
    return line + (filler,) * (width - len(line))
