"""Parameter updates: how optimizer steps propagate the rounding of gradients to parameters.

Adam and its variants divide every element of a gradient by its own magnitude. If an element is small relative to its
error, its update may have either sign: in the first step ``u = g / |g|``, whatever ``g`` is. The distance of two runs'
parameters is then the size of the update times the share of the update that gradient errors may flip. Other optimizers
propagate at most as much (SGD propagates the error of the gradient).

A gradient may vanish analytically: a key's bias shifts all scores of a query equally, which softmax ignores. The rest
is rounding in both runs, with different signs and sizes: around Adam's epsilon in float32, far above it in 16 bits.
Either run may then move its parameter further than the other, and the larger update counts.
"""

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
from msgspec import structs

from tapscope.comparator.alignment.row_join import RowJoin
from tapscope.comparator.assembly.blocks import Block, Columns
from tapscope.comparator.metrics.channels import sample
from tapscope.comparator.metrics.error_distribution import (
    NO_ERROR,
    QUANTILES,
    ErrorDistribution,
    ParameterUpdate,
    Quantiles,
    error_distribution_of,
)
from tapscope.comparator.metrics.joined_rows import JoinedRows, overlaps
from tapscope.comparator.metrics.lazy_pair import LazyPair
from tapscope.comparator.metrics.measure import MeasuredPair
from tapscope.core.site import is_parameter
from tapscope.kernels.native import Overview, overview, overviews

Array = np.ndarray[Any, Any]

OPPOSITE_SIGN_ERROR = 2.0
"""Error of an update with the opposite sign, relative to the update."""
UNRELATED_SHARE = 1.2
"""Minimum flipped share of unrelated gradients. A gradient much smaller than the other gives 1; if half of the signs
also differ, the share is 1.6."""
UNKNOWN_SHARE = (1.0,) * len(QUANTILES)
"""Flipped share if no gradients were captured."""


def parameter_updates_of(opened: LazyPair, measured: MeasuredPair, seen: Overview) -> tuple[ParameterUpdate, ...]:
    """Return the optimizer updates of a parameter, step by step; empty for a parameter without updates, and for other
    sites.

    The update before the first value is unknown: it counts as twice the next one, since learning rates change.
    """
    ready, site = opened.prepared, opened.prepared.left[0].records[0].key.site
    if seen.is_zero or len(ready.plan.joins) < 2 or not is_parameter(site) or site.endswith(".grad"):
        return ()
    joins = sorted(ready.plan.joins, key=lambda join: join.baseline)
    moves = [_moved(opened, one.baseline, two.baseline) for one, two in pairwise(joins)]
    if all(each.is_zero for each in moves):
        return ()
    others = [_moved_target(opened, *pair) for pair in pairwise(joins)]
    others.insert(0, tuple(2.0 * e for e in others[0]))
    spreads = _spreads(measured)
    steps = [ready.left[join.baseline].records[0].key.step for join in joins]
    columns = zip(steps, joins, [_assumed_first(moves[0]), *moves], others, strict=True)
    return tuple(
        ParameterUpdate(step, spreads.get(join.baseline, NO_ERROR), moved, other)
        for step, join, moved, other in columns
    )


def update_sensitivity_of(opened: LazyPair, measured: MeasuredPair, seen: Overview) -> dict[int, Quantiles]:
    """Return step -> share of an update that gradient errors may flip, at :data:`QUANTILES` over a sample of rows.

    The optimizer divides each element by its magnitude. The share is the root mean square of ``|t - b| / max(|t|,
    |b|)``, and 2 where signs differ. With momentum, updates depend on the gradients of all earlier steps, even for a
    row without a gradient in this step. Each row therefore counts with its largest value so far, as long as the
    parameter keeps its size. Steps without differences are omitted; empty for other sites.
    """
    site = opened.prepared.left[0].records[0].key.site
    if not seen.num_unequal or not is_parameter(site) or not site.endswith(".grad"):
        return {}
    parts = [
        (opened.prepared.left[part.join.baseline].records[0].key.step, part.join)
        for part in measured.parts
        if part.num_rows
    ]
    by_step: dict[int, Quantiles] = {}
    largest = np.zeros(0)
    for step, join in sorted(parts, key=lambda part: part[0]):
        left = opened.left[join.baseline]
        flipped = _flipped_shares(left, opened.right[join.target], _rows(left))
        largest = np.maximum(flipped, largest) if len(largest) == len(flipped) else flipped
        by_step[step] = tuple(np.quantile(largest, QUANTILES).tolist())
    return by_step


def error_of_updates(moves: Sequence[tuple[Quantiles, ParameterUpdate]]) -> ErrorDistribution:
    """Return the error of a parameter after updates, given the flipped share and size of each."""
    errors, peak = [0.0] * len(QUANTILES), 0.0
    for flipped, drift in moves:
        moved, others = drift.update_size, drift.target_update_size or drift.update_size.errors
        for i, (share, own, other) in enumerate(zip(flipped, moved.errors, others, strict=True)):
            errors[i] += share * (max(own, other) if share > UNRELATED_SHARE else own)
        most = moved.peak * min(
            OPPOSITE_SIGN_ERROR, flipped[-1] * math.sqrt(moved.width)
        )  # one element may have all of a row's error
        further = others[-1] / moved.errors[-1] if moved.errors[-1] > 0.0 else 1.0
        peak += most * (max(1.0, further) if flipped[-1] > UNRELATED_SHARE else 1.0)
    return structs.replace(NO_ERROR, errors=tuple(errors), element=peak, peak=peak, channel=errors[-1])


def _moved(opened: LazyPair, one: int, two: int) -> ErrorDistribution:
    """Return the distance between two of the baseline's firings, over a sample of rows."""
    sides, whole = (opened.left[one], opened.left[two]), (opened.prepared.left[one], opened.prepared.left[two])
    if whole[0].digest is not None and whole[0].digest == whole[1].digest:
        return NO_ERROR
    at, joined = _rows(sides[0]), JoinedRows()
    joined.add(*sides, RowJoin(one, two, at, at))
    rows, at_worst, _ = joined.compared()
    seen = overview(rows, at_worst)
    return error_distribution_of(seen, width=sum(block.width for block in sides[0]))


def _moved_target(opened: LazyPair, one: RowJoin, two: RowJoin) -> Quantiles:
    """Return the distance between two of the target's firings relative to the baseline's rows, at :data:`QUANTILES`.

    Rows that are zero in the baseline count as unmoved.
    """
    left = opened.left[one.baseline]
    at = _rows(left)
    moved, own = np.zeros((2, len(at)))
    for side, other, into in (
        (opened.right[one.target], opened.right[two.target], moved),
        (left, None, own),
    ):
        for _, first, second in overlaps(side, other or side):
            difference = _values(second, at) - _values(first, at) if other is not None else _values(first, at)
            into += np.nan_to_num(difference**2).sum(axis=1)
    relative = np.sqrt(np.divide(moved, own, out=np.zeros_like(own), where=own > 0.0))
    return tuple(np.quantile(relative, QUANTILES).tolist())


def _values(block: Columns, at: Array) -> Array:
    values: Array = (block.values[at] if block.values is not None else block.rows(at)).astype(np.float64)
    return values


def _assumed_first(following: ErrorDistribution) -> ErrorDistribution:
    """Return the assumed update before the first recorded value."""
    return structs.replace(following, errors=tuple(2.0 * e for e in following.errors), peak=2.0 * following.peak)


def _spreads(measured: MeasuredPair) -> dict[int, ErrorDistribution]:
    """Return firing of the baseline -> the errors of its rows, for the firings that were read."""
    bounds = [*(part.first for part in measured.parts), len(measured.rows)]
    each = overviews(measured.rows, measured.at_worst, bounds)
    width = int(measured.rows.width.max())
    pairs = zip(measured.parts, each, strict=True)
    return {part.join.baseline: error_distribution_of(seen, width=width) for part, seen in pairs}


def _rows(side: list[Block]) -> Array:
    return sample(side[0].num_rows, sum(block.width for block in side), 1)


def _flipped_shares(left: list[Block], right: list[Block], at: Array) -> Array:
    """Return the share of each row's update that errors may flip, [rows]."""
    squares, width = np.zeros(len(at)), 0
    for _, one, two in overlaps(left, right):
        b, t = _values(one, at), _values(two, at)
        size = np.maximum(np.abs(b), np.abs(t))
        share = np.divide(np.abs(t - b), size, out=np.zeros_like(size), where=size > 0)
        share[b * t < 0] = OPPOSITE_SIGN_ERROR
        squares += np.nan_to_num(share**2, nan=OPPOSITE_SIGN_ERROR**2).sum(axis=1)
        width += b.shape[1]
    rms: Array = np.sqrt(squares / max(width, 1))
    return rms
