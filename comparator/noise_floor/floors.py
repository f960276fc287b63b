"""Floors: the largest errors that rounding explains of many sites, one for each test, and errors beside them."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from msgspec import Struct

from tapscope.comparator.metrics.columns import larger, smaller
from tapscope.comparator.metrics.error_distribution import QUANTILES

Array = np.ndarray[Any, Any]

NAMES = ("typical", "tail", "tail", "row", "gain", "channel", "element", "peak")
"""What the tests are called, in the order of :attr:`~.spreads.Spreads.tests`."""


class Floors(Struct, frozen=True, eq=False):
    """The largest errors that rounding explains of some sites, one for each test."""

    limits: Array
    """[tests, sites], in the order of :attr:`~.spreads.Spreads.tests`."""

    @property
    def errors(self) -> Array:
        """[quantiles, sites], at :data:`~.spread.QUANTILES`."""
        return self.limits[: len(QUANTILES)]

    def worst(self, tests: Array) -> "Worst":
        """What is furthest beyond its floor of each site; ``tests`` are [tests, sites]."""
        worst, at = scores(tests[0], self.limits[0]), np.zeros(tests.shape[1], np.int64)
        for i in range(1, len(tests)):  # test by test, for there may be very many sites
            score = scores(tests[i], self.limits[i])
            is_worse = score > worst  # as max() has it: a NaN is passed over unless it comes first
            worst[is_worse], at[is_worse] = score[is_worse], i
        sites = np.arange(len(at))
        return Worst(tests[at, sites], self.limits[at, sites], at)

    def smaller(self, other: "Floors") -> "Floors":
        """The stricter of both, test by test."""
        return Floors(smaller(self.limits, other.limits))

    def of_sum(self, gain: Array, num_rows: Array) -> "Floors":
        """Of sums over rows, which may be off by as much more ``gain``, and in any channel; of ``num_rows`` themselves,
        see :meth:`of_one_row`."""
        *errors, own, channel, element, peak = self.of_one_row(num_rows).limits
        return Floors(np.array((*errors, own + gain, np.full_like(channel, np.inf), element, peak)))

    def of_one_row(self, num_rows: Array) -> "Floors":
        """Of sites that may have but one row: its largest element is the largest of all."""
        *others, element, peak = self.limits
        return Floors(np.array((*others, np.where(num_rows == 1, peak, element), peak)))

    def of_few(self) -> "Floors":
        """Of sums of which single rows may have but one term, such as those of an expert that one token chose: such a
        row is one element of what was summed times a row, and as far off as single elements are."""
        *others, peak = self.limits
        last = len(QUANTILES) - 1
        return Floors(np.array((*others[:last], larger(others[last], peak), *others[last + 1 :], peak)))

    def lifted(self, by: Array) -> "Floors":
        """Where rows may be off by that many times as much, [quantiles, sites]."""
        *others, peak = self.limits[len(QUANTILES) :]
        return Floors(np.array((*(self.errors * by), *others, peak * by[-1])))

    def scaled(self, gain: Array | float) -> "Floors":
        """The same where a common gain of that size is explained besides."""
        *errors, own, channel, element, peak = self.limits
        return Floors(np.array((*errors, own + gain, channel, element, peak)))

    def where(self, these: Array, others: "Floors") -> "Floors":
        """Of ``these`` sites (bool) its own, of all else the others."""
        return Floors(np.where(these, self.limits, others.limits))

    def at(self, sites: Array | Sequence[int]) -> "Floors":
        """Of some sites."""
        return Floors(self.limits[:, sites])

    def replaced(self, sites: Array | Sequence[int], by: "Floors") -> "Floors":
        """With the floors of some sites, in their order, in place of its own."""
        limits = self.limits.copy()
        limits[:, sites] = by.limits
        return Floors(limits)


class Worst(NamedTuple):
    """The test of each site whose error is largest beside its floor; of several the first."""

    errors: Array
    floors: Array
    tests: Array
    """Which it is, see :data:`NAMES`."""

    @property
    def scores(self) -> Array:
        """error / floor."""
        return scores(self.errors, self.floors)


def scores(errors: Array, floors: Array) -> Array:
    """error / floor of each; no error is 0 whatever the floor."""
    found = np.divide(errors, floors, out=np.full_like(errors, np.inf), where=floors > 0.0)
    found[errors == 0.0] = 0.0
    return found


def score(error: float, floor: float) -> float:
    """The same of one."""
    return 0.0 if error == 0.0 else error / floor if floor > 0.0 else math.inf
