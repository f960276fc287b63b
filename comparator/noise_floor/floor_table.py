"""FloorTable: the largest errors that rounding explains of many sites, one limit for each test."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct

from tapscope.comparator.metrics.elementwise import larger, smaller
from tapscope.comparator.metrics.error_distribution import QUANTILES

Array = np.ndarray[Any, Any]

TESTS = ("median_row", "p90_p98_row", "p90_p98_row", "max_row", "scale", "channel", "element", "max_element")
"""Names of the tests, in the order of :attr:`~.error_columns.ErrorColumns.tests`: errors of rows at
:data:`~.error_distribution.QUANTILES`, common gain, gain of one channel, largest element of the median row, largest
element of all."""

_OF_SINGLE_ROWS = tuple(i for i, test in enumerate(TESTS) if test in ("p90_p98_row", "max_row", "max_element"))
"""Tests of a few rows or one element."""


class FloorTable(Struct, frozen=True, eq=False):
    """The largest errors that rounding explains of some sites."""

    limits: Array
    """[tests, sites], tests in the order of :data:`TESTS`."""

    @property
    def errors(self) -> Array:
        """[quantiles, sites]: limits of the errors of rows at :data:`~.error_distribution.QUANTILES`."""
        return self.limits[: len(QUANTILES)]

    def worst(self, tests: Array) -> "WorstTests":
        """The test of each site with the largest error / limit; ``tests`` are [tests, sites]."""
        worst, at = ratios(tests[0], self.limits[0]), np.zeros(tests.shape[1], np.int64)
        for i in range(1, len(tests)):  # test by test, for there may be very many sites
            ratio = ratios(tests[i], self.limits[i])
            is_worse = ratio > worst  # like max(): a NaN is skipped unless it comes first
            worst[is_worse], at[is_worse] = ratio[is_worse], i
        sites = np.arange(len(at))
        return WorstTests(tests[at, sites], self.limits[at, sites], at)

    def smaller(self, other: "FloorTable") -> "FloorTable":
        """The stricter limit of both, test by test."""
        return FloorTable(smaller(self.limits, other.limits))

    def for_sums(self, gain: Array, num_rows: Array) -> "FloorTable":
        """For sums over rows: ``gain`` more of a common gain, and any gain of a channel; see :meth:`for_one_row`."""
        *errors, own, channel, element, peak = self.for_one_row(num_rows).limits
        return FloorTable(np.array((*errors, own + gain, np.full_like(channel, np.inf), element, peak)))

    def for_one_row(self, num_rows: Array) -> "FloorTable":
        """For sites of which ``num_rows`` may be 1: the largest element of the row is the largest of all."""
        *others, element, peak = self.limits
        return FloorTable(np.array((*others, np.where(num_rows == 1, peak, element), peak)))

    def for_single_terms(self) -> "FloorTable":
        """For sums of which a row may have only one term, such as the gradient of an expert that one token chose: the
        row is one element of what was summed times a row, and may differ as much as a single element."""
        *others, peak = self.limits
        last = len(QUANTILES) - 1
        return FloorTable(np.array((*others[:last], larger(others[last], peak), *others[last + 1 :], peak)))

    def amplified(self, by: Array) -> "FloorTable":
        """With errors of rows that many times as large, [quantiles, sites]."""
        *others, peak = self.limits[len(QUANTILES) :]
        return FloorTable(np.array((*(self.errors * by), *others, peak * by[-1])))

    def with_gain(self, gain: Array | float) -> "FloorTable":
        """With a common gain of that size explained in addition."""
        *errors, own, channel, element, peak = self.limits
        return FloorTable(np.array((*errors, own + gain, channel, element, peak)))

    def inherited(self, sites: Sequence[int], tests: Array) -> "FloorTable":
        """With all errors explained that some sites have in single rows or elements; ``tests`` are [tests, sites]."""
        limits, at = self.limits.copy(), np.ix_(_OF_SINGLE_ROWS, sites)
        limits[at] = larger(limits[at], tests[at])
        return FloorTable(limits)

    def where(self, these: Array, others: "FloorTable") -> "FloorTable":
        """Its own limits for ``these`` sites (bool), and those of ``others`` for the rest."""
        return FloorTable(np.where(these, self.limits, others.limits))

    def at(self, sites: Array | Sequence[int]) -> "FloorTable":
        """The limits of some sites."""
        return FloorTable(self.limits[:, sites])

    def replaced(self, sites: Array | Sequence[int], by: "FloorTable") -> "FloorTable":
        """With the limits of some sites replaced, in their order."""
        limits = self.limits.copy()
        limits[:, sites] = by.limits
        return FloorTable(limits)


class WorstTests(NamedTuple):
    """The test of each site whose error is largest relative to its limit; the first of several."""

    errors: Array
    limits: Array
    tests: Array
    """Indices into :data:`TESTS`."""

    @property
    def ratios(self) -> Array:
        """error / limit."""
        return ratios(self.errors, self.limits)


def ratios(errors: Array, limits: Array) -> Array:
    """error / limit of each; 0 where there is no error, whatever the limit; 1 where both are infinite."""
    quotient = np.divide(errors, limits, out=np.full_like(errors, np.inf), where=(limits > 0.0) & np.isfinite(limits))
    quotient[np.isinf(limits)] = np.where(np.isinf(errors[np.isinf(limits)]), 1.0, 0.0)
    quotient[errors == 0.0] = 0.0
    return quotient


def ratio_of(error: float, limit: float) -> float:
    """:func:`ratios` of one site."""
    if error == 0.0:
        return 0.0
    if math.isinf(limit):
        return 1.0 if math.isinf(error) else 0.0
    return error / limit if limit > 0.0 else math.inf
