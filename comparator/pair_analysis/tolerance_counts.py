"""Tolerance counts: recount the elements of measured pairs that are beyond another tolerance. Other results do not
depend on it."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import structs

from tapscope.comparator.metrics.metric_columns import MetricColumns
from tapscope.comparator.pair_analysis.pair_analyzer import PairAnalyzer
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.pair_analysis.pool import batches_of, in_batches

Array = np.ndarray[Any, Any]
_FLOAT32_MARGIN = 1.0 - 2.0**-20
"""Safety factor: largest differences are computed in float32, which rounds them by less than this."""


def with_tolerance_of(analyzer: PairAnalyzer, results: Sequence[PairResult]) -> list[PairResult]:
    """Return the results with the counts for the analyzer's tolerance.

    Values are read only if the largest difference exceeds ``atol``: a smaller difference is never beyond the tolerance,
    and without a tolerance the unequal elements count. Raises DataError if values can no longer be read.
    """
    every = {id(columns): columns for one in results if (columns := one.values.columns) is not None}
    counts = {key: _known_counts(columns, analyzer.tolerance) for key, columns in every.items()}
    unknown = [one for one in results if one.values.columns and counts[id(one.values.columns)][one.values.index] < 0]
    num_overs = in_batches(analyzer.count_over, list(batches_of(one.pair for one in unknown)))
    for one, num_over in zip(unknown, num_overs, strict=True):
        counts[id(one.values.columns)][one.values.index] = num_over
    new = {key: columns.with_num_over(counts[key]) for key, columns in every.items()}
    return [_with_columns(one, new) for one in results]


def _known_counts(columns: MetricColumns, tolerance: tuple[float, float] | None) -> Array:
    """Return the number of elements beyond the tolerance as [pairs]; -1 where values must be read."""
    if tolerance is None:
        return columns.num_unequal
    largest, mismatch = columns.floats[0], columns.counts[-1]
    is_known = (columns.num_unequal == mismatch) | (largest < tolerance[0] * _FLOAT32_MARGIN)
    counts: Array = np.where(is_known, mismatch, -1)
    return counts


def _with_columns(result: PairResult, new: dict[int, MetricColumns]) -> PairResult:
    columns = result.values.columns
    if columns is None:
        return result
    return structs.replace(result, values=structs.replace(result.values, columns=new[id(columns)]))
