"""Metric columns: error metrics of many pairs, with one array per metric; converted to objects on demand."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct, structs

from tapscope.comparator.facts import ErrorMetrics, StepResult
from tapscope.comparator.metrics.error_columns import ErrorColumns
from tapscope.comparator.metrics.error_distribution import NO_ERROR, ErrorDistribution
from tapscope.comparator.metrics.measure import MeasuredBatch
from tapscope.kernels.native import Overviews

Array = np.ndarray[Any, Any]
_OVER_TOLERANCE = 2
"""Row of :attr:`MetricColumns.counts` with the elements beyond the tolerance."""


class MetricColumns(Struct, frozen=True, eq=False):
    """Error metrics with one element per pair, or per section of a :class:`~.measure.MeasuredBatch`."""

    num_rows: Array
    """[pairs]: number of rows that were read."""
    floats: Array
    """[members, pairs]: the members of :class:`~.facts.ErrorMetrics` that are floats."""
    counts: Array
    """[members, pairs]: the members of :class:`~.facts.ErrorMetrics` that are counts."""
    distributions: ErrorColumns
    is_zero: Array
    """[pairs]: whether the squares of all differences are 0; the error distribution is then empty."""

    def with_num_over(self, num_over: Array) -> "MetricColumns":
        """Return the columns with ``num_over`` [pairs] as the numbers of elements beyond the tolerance."""
        counts = self.counts.copy()
        counts[_OVER_TOLERANCE] = num_over
        return structs.replace(self, counts=counts)

    @property
    def num_unequal(self) -> Array:
        """[pairs]: number of elements that differ."""
        equal, count, *_ = self.counts
        unequal: Array = count - equal
        return unequal

    def metrics(self, pair: int) -> ErrorMetrics:
        """Return the error metrics of one pair over all rows."""
        return ErrorMetrics(*self.floats[:, pair].tolist(), *self.counts[:, pair].tolist())

    def distribution(self, pair: int) -> ErrorDistribution:
        """Return the distribution of the row errors of one pair."""
        if self.is_zero.item(pair):
            return NO_ERROR
        num, width, errors, *others = self.distributions.at(pair)
        element, gain, gain_sd, peak, *_ = (each.item() for each in others)
        return ErrorDistribution(num.item(), tuple(errors.tolist()), element, gain, gain_sd, peak, width=width.item())

    def step(self, pair: int, step: int) -> StepResult:
        """Return the result of one step, for a pair whose rows all belong to that step."""
        max_abs, _, relative, *_ = self.floats[:, pair].tolist()
        error, odd = self.distributions.errors.item(-1, pair), self.counts.item(-1, pair)
        return StepResult(step, self.num_rows.item(pair), max_abs, relative, error, odd)

    def num_nonfinite_mismatch(self, pair: int) -> int:
        """Return the number of elements that are nonfinite on one side and different on the other."""
        count: int = self.counts.item(-1, pair)
        return count


def metric_columns_of(batch: MeasuredBatch) -> MetricColumns:
    """Compute the metrics of a measured batch, with one element per section.

    Values skipped because of equal hashes count as equal.
    """
    seen, is_zero = batch.overviews, batch.overviews.is_zero
    _, equal, over, _, nonfinite_baseline, nonfinite_target, mismatch, count = seen.columns["counts"].T
    counts = equal + batch.num_hashed, count + batch.num_hashed, over, nonfinite_baseline, nonfinite_target, mismatch
    floats = np.array((seen.columns["sums"][:, 0], *seen.means()))
    num_rows = np.diff(seen.bounds)
    return MetricColumns(num_rows, floats, np.array(counts), _spreads(seen, batch.widths), is_zero)


def _spreads(seen: Overviews, widths: Sequence[int]) -> ErrorColumns:
    """Return the error distributions over the rows that were read; rows with equal hashes do not dilute them."""
    is_off = ~seen.is_zero
    nothing = np.broadcast_to(0.0, len(seen))
    num_rows, width = np.diff(seen.bounds) * is_off, np.array(widths, np.int64) * is_off
    element, gain, gain_sd, peak = (seen.columns[name].copy() for name in ("element", "gain", "gain_sd", "peak"))
    errors = seen.columns["quantiles"].T.copy()
    return ErrorColumns(num_rows, width, errors, element, gain, gain_sd, peak, nothing, nothing, nothing)
