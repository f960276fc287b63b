"""Closeup: one finding row by row, for whoever wants to see more than its worst."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct

from tapscope.comparator.alignment.layout import Layout
from tapscope.comparator.alignment.prepare import PreparedPair
from tapscope.comparator.alignment.row_map import RowMap
from tapscope.comparator.assembly.assemble import AssembledTensor
from tapscope.comparator.assembly.blocks import Rows, blocks
from tapscope.comparator.metrics.lazy_pair import LazyPair
from tapscope.comparator.metrics.measure import MeasuredPair, measure
from tapscope.kernels.native.aggregate import row_errors

Array = np.ndarray[Any, Any]

MARGIN = 6
"""Columns shown on either side of the worst one."""


class Window(Struct, frozen=True):
    """Some neighbouring columns of one row on both sides."""

    first: int
    """The first of these columns."""
    column: int
    """The one that it is about."""
    baseline: Array
    """[columns] float64"""
    target: Array


class TokenView(Struct, frozen=True):
    """The rows of a finding that were read; those with equal hashes are not among them."""

    errors: Array
    """[rows] float64: length of the row's difference / length of its baseline; inf where only the target is not 0, and
    where the two sides are not finite in different ways."""
    max_abs: Array
    """[rows] float64: largest difference of an element."""
    columns: Array
    """[rows] int64: where that is; -1 where it is an infinity or NaN that is off."""
    steps: Array
    """[rows] int64: target step."""
    labels: Sequence[str]
    """``0:5`` for position 5 of request 0, or the row's number where there are no token rows."""
    worst: int
    """The row whose error is largest."""
    window: Window
    """Around the largest difference of the worst row, or its first value that is not finite on one side alone."""


def token_view(ready: PreparedPair, rows: RowMap, tolerance: tuple[float, float] = (0.0, 0.0)) -> TokenView | None:
    """Measure a pair again, row by row; None where nothing had to be read.

    Raises as :func:`.measure.measure`.
    """
    measured = measure(LazyPair(ready), tolerance)
    if not len(measured.rows):
        return None
    odd = measured.rows.nonfinite_mismatch > 0
    errors = np.where(odd, np.inf, row_errors(measured.rows))
    worst = int(np.argmax(errors))
    steps = np.array([w.records[0].key.step for w in ready.right])[measured.target_firing]
    return TokenView(
        errors,
        measured.rows.max_abs,
        np.where(odd, -1, measured.rows.argmax),
        steps,
        _labels(measured, rows),
        worst,
        _window(ready, measured, worst),
    )


def _labels(measured: MeasuredPair, rows: RowMap) -> list[str]:
    if len(measured.pairs) and measured.pairs[0] < 0:
        first: dict[int, int] = {}
        return [str(i - first.setdefault(int(firing), i)) for i, firing in enumerate(measured.target_firing)]
    requests, positions = rows.pair_request[measured.pairs], rows.pair_position[measured.pairs]
    return [f"{rows.requests[r]}:{p}" for r, p in zip(requests.tolist(), positions.tolist(), strict=True)]


def _window(ready: PreparedPair, measured: MeasuredPair, row: int) -> Window:
    firings = int(measured.baseline_firing[row]), int(measured.target_firing[row])
    together = (measured.baseline_firing == firings[0]) & (measured.target_firing == firings[1])
    at = row - int(np.flatnonzero(together)[0])
    join = next(j for j in ready.plan.joins if (j.baseline, j.target) == firings)
    left = _row(ready.left[join.baseline], ready.layouts[0], join.baseline_rows, at)
    right = _row(ready.right[join.target], ready.layouts[1], join.target_rows, at)
    odd = ~((left == right) | (np.isnan(left) & np.isnan(right)) | (np.isfinite(left) & np.isfinite(right)))
    column = int(np.argmax(odd)) if odd.any() else max(int(measured.rows.argmax[row]), 0)
    first = max(column - MARGIN, 0)
    return Window(first, column, left[first : column + MARGIN + 1], right[first : column + MARGIN + 1])


def _row(whole: AssembledTensor, layout: Layout, rows: Rows, at: int) -> Array:
    assert whole.piece is not None
    index = np.array([(rows.start or 0) + at if isinstance(rows, slice) else int(rows[at])])
    found = [np.asarray(b.rows(index)[0]) for b in blocks(whole.piece, whole.run, layout.axes)]
    values = np.concatenate(found)
    return np.abs(values) if np.iscomplexobj(values) else values.astype(np.float64)
