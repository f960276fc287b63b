"""FloorTable: the largest errors that rounding explains for many sites, with one limit per test."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct

from tapscope.comparator.metrics.elementwise import larger, smaller
from tapscope.comparator.metrics.error_distribution import QUANTILES

Array = np.ndarray[Any, Any]

TESTS = ("median_row", "p90_p98_row", "p90_p98_row", "max_row", "scale", "channel", "element", "max_element")
"""Names of the tests, in the order of :attr:`~.error_columns.ErrorColumns.tests`: row errors at
:data:`~.error_distribution.QUANTILES`, common gain, gain of one channel, largest element of the median row, largest
element of all rows.
"""

_OF_SINGLE_ROWS = tuple(i for i, test in enumerate(TESTS) if test in ("p90_p98_row", "max_row", "max_element"))
"""Indices of the tests of a few rows or one element."""


class FloorTable(Struct, frozen=True, eq=False):
    """The largest errors that rounding explains for some sites."""

    limits: Array
    """[tests, sites]: limits, with tests in the order of :data:`TESTS`."""

    @property
    def errors(self) -> Array:
        """[quantiles, sites]: limits of the row errors at :data:`~.error_distribution.QUANTILES`."""
        return self.limits[: len(QUANTILES)]

    def worst(self, tests: Array) -> "WorstTests":
        """Return the test of each site with the largest error / limit; ``tests`` are the errors, [tests, sites]."""
        worst, at = ratios(tests[0], self.limits[0]), np.zeros(tests.shape[1], np.int64)
        for i in range(1, len(tests)):  # test by test, because there may be very many sites
            ratio = ratios(tests[i], self.limits[i])
            is_worse = ratio > worst  # like max(): a NaN is skipped unless it comes first
            worst[is_worse], at[is_worse] = ratio[is_worse], i
        sites = np.arange(len(at))
        return WorstTests(tests[at, sites], self.limits[at, sites], at)

    def smaller(self, other: "FloorTable") -> "FloorTable":
        """Return the stricter limit of both tables, test by test."""
        return FloorTable(smaller(self.limits, other.limits))

    def for_sums(self, gain: Array, num_rows: Array) -> "FloorTable":
        """Return the limits for sums over rows: ``gain`` more common gain, and any gain of a channel; see
        :meth:`for_one_row`."""
        *errors, own, channel, element, peak = self.for_one_row(num_rows).limits
        return FloorTable(np.array((*errors, own + gain, np.full_like(channel, np.inf), element, peak)))

    def for_one_row(self, num_rows: Array) -> "FloorTable":
        """Return the limits for sites with ``num_rows`` rows, where the largest element of a single row is the largest
        of all."""
        *others, element, peak = self.limits
        return FloorTable(np.array((*others, np.where(num_rows == 1, peak, element), peak)))

    def for_single_terms(self) -> "FloorTable":
        """Return the limits for sums whose rows may have only one term, such as the gradient of an expert that one
        token chose.

        Such a row is one element of the summed gradient times a row, and may differ as much as a single element.
        """
        *others, peak = self.limits
        last = len(QUANTILES) - 1
        return FloorTable(np.array((*others[:last], larger(others[last], peak), *others[last + 1 :], peak)))

    def amplified(self, by: Array) -> "FloorTable":
        """Return the limits with row errors multiplied by ``by`` [quantiles, sites]."""
        *others, peak = self.limits[len(QUANTILES) :]
        return FloorTable(np.array((*(self.errors * by), *others, peak * by[-1])))

    def with_gain(self, gain: Array | float) -> "FloorTable":
        """Return the limits with an additional common gain of size ``gain``."""
        *errors, own, channel, element, peak = self.limits
        return FloorTable(np.array((*errors, own + gain, channel, element, peak)))

    def inherited(self, sites: Sequence[int], tests: Array) -> "FloorTable":
        """Return the limits with all errors in single rows or elements of ``sites`` explained; ``tests`` are [tests,
        sites]."""
        limits, at = self.limits.copy(), np.ix_(_OF_SINGLE_ROWS, sites)
        limits[at] = larger(limits[at], tests[at])
        return FloorTable(limits)

    def where(self, these: Array, others: "FloorTable") -> "FloorTable":
        """Return this table's limits for ``these`` sites (bool), and those of ``others`` for the rest."""
        return FloorTable(np.where(these, self.limits, others.limits))

    def at(self, sites: Array | Sequence[int]) -> "FloorTable":
        """Return the limits of the given sites."""
        return FloorTable(self.limits[:, sites])

    def replaced(self, sites: Array | Sequence[int], by: "FloorTable") -> "FloorTable":
        """Return the limits with those of ``sites`` replaced by ``by``, in order."""
        limits = self.limits.copy()
        limits[:, sites] = by.limits
        return FloorTable(limits)


class WorstTests(NamedTuple):
    """The test of each site with the largest error relative to its limit; among equal ones, the first."""

    errors: Array
    limits: Array
    tests: Array
    """Indices into :data:`TESTS`."""

    @property
    def ratios(self) -> Array:
        """error / limit."""
        return ratios(self.errors, self.limits)


def ratios(errors: Array, limits: Array) -> Array:
    """Return error / limit elementwise: 0 for an error of 0, whatever the limit, and 1 if both are infinite."""
    quotient = np.divide(errors, limits, out=np.full_like(errors, np.inf), where=(limits > 0.0) & np.isfinite(limits))
    quotient[np.isinf(limits)] = np.where(np.isinf(errors[np.isinf(limits)]), 1.0, 0.0)
    quotient[errors == 0.0] = 0.0
    return quotient


def ratio_of(error: float, limit: float) -> float:
    """Return error / limit of one site, like :func:`ratios`."""
    if error == 0.0:
        return 0.0
    if math.isinf(limit):
        return 1.0 if math.isinf(error) else 0.0
    return error / limit if limit > 0.0 else math.inf
