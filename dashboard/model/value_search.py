"""Searches over all values of a table: next non-finite value, next value above a threshold, largest value."""

from typing import Any

import numpy as np

from tapscope.dashboard.model.elementwise import as_float64, magnitudes
from tapscope.dashboard.model.value_table import BLOCK, ValueTable

Array = np.ndarray[Any, Any]


def find(
    table: ValueTable, row: int, column: int, direction: int = 1, more_than: float | None = None
) -> tuple[int, int] | None:
    """Return the next (or previous) element in row order that is non-finite, or has |Δ| > ``more_than`` if given.

    A single run is searched by |x|. The search starts after (before) ``row`` and ``column`` and does not wrap around.
    None if there is no match.
    """

    def hits(left: Array, right: Array) -> Array:
        if more_than is None:
            with np.errstate(all="ignore"):
                finite = np.isfinite(as_float64(right))
                return ~(finite & np.isfinite(as_float64(left)) if table.is_pair else finite)
        sizes = magnitudes(left, right, is_pair=table.is_pair)
        return (sizes > more_than) | (np.isnan(sizes) & table.is_pair)

    if not table.num_rows or not table.num_columns:
        return None
    if direction > 0:
        for first, left, right in table.chunks(row):
            is_hit = hits(left, right)
            if first == row:
                is_hit[0, : column + 1] = False
            if is_hit.any():
                at = int(np.argmax(is_hit))
                return first + at // is_hit.shape[1], at % is_hit.shape[1]
        return None
    most = max(BLOCK // max(table.num_columns, 1), 1)
    stop = row + 1
    while stop > 0:
        start = max(stop - most, 0)
        last: tuple[int, int] | None = None
        for at, left, right in table.chunks(start, stop):
            is_hit = hits(left, right)
            if at <= row < at + len(is_hit):
                is_hit[row - at, column:] = False
            if is_hit.any():
                flat = is_hit.size - 1 - int(np.argmax(is_hit.reshape(-1)[::-1]))
                last = at + flat // is_hit.shape[1], flat % is_hit.shape[1]
        if last is not None:
            return last
        stop = start
    return None


def largest(
    table: ValueTable, rows: tuple[int, int] | None = None, columns: tuple[int, int] | None = None
) -> tuple[int, int]:
    """Return (row, column) of the largest |Δ| of a pair, or the largest |x|; non-finite values rank first.

    ``rows`` and ``columns`` are half-open ranges to search; by default the whole table.
    """
    first_row, end = rows or (0, table.num_rows)
    left_column, right_column = columns or (0, table.num_columns)
    best, place = -1.0, (first_row, left_column)
    for first, left, right in table.chunks(first_row, end, slice(left_column, right_column)):
        sizes = magnitudes(left, right, is_pair=table.is_pair)
        if not sizes.size:
            continue
        sizes = np.where(np.isfinite(sizes), sizes, np.inf)
        at = int(np.argmax(sizes))
        if float(sizes.reshape(-1)[at]) > best:
            best = float(sizes.reshape(-1)[at])
            place = first + at // sizes.shape[1], left_column + at % sizes.shape[1]
    return place
