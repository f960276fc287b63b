"""Error columns: the error distributions of many sites as arrays, and the largest errors of the sites' inputs."""

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import numpy as np

from tapscope.comparator.metrics.elementwise import larger, largest_in
from tapscope.comparator.metrics.error_distribution import QUANTILES, ErrorDistribution

Array = np.ndarray[Any, Any]
_MEMBERS = len(QUANTILES) + 7
ELEMENT, PEAK, CHANNELS = len(QUANTILES), len(QUANTILES) + 1, len(QUANTILES) + 3
"""Row indices of these members in :attr:`LargestErrors.values`."""


class ErrorColumns(NamedTuple):
    """The members of :class:`~.error_distribution.ErrorDistribution` that affect floors, with one element per site."""

    num_rows: Array
    width: Array
    errors: Array
    """[quantiles, sites]."""
    element: Array
    gain: Array
    gain_sd: Array
    peak: Array
    channel: Array
    channel_noise: Array
    sum_gain_sd: Array
    """0 if unknown."""

    @classmethod
    def of(cls, spreads: Sequence[ErrorDistribution]) -> "ErrorColumns":
        """Build the columns of the given distributions."""
        values = np.fromiter(chain.from_iterable(map(_members, spreads)), np.float64, _MEMBERS * len(spreads))
        errors, others = np.split(values.reshape(-1, _MEMBERS).T.copy(), [len(QUANTILES)])
        num_rows, width = np.array([(each.num_rows, each.width) for each in spreads], np.int64).reshape(-1, 2).T
        return cls(num_rows, width, errors, *others)

    @property
    def tests(self) -> Array:
        """[tests, sites]: every error that has a floor: errors at :data:`~.error_distribution.QUANTILES`, and the
        magnitudes of gain, channel, element and peak."""
        return np.array((*self.errors, np.abs(self.gain), np.abs(self.channel), self.element, self.peak))

    @property
    def propagated(self) -> Array:
        """[kinds, sites]: the errors that propagate with values, in the order of :class:`LargestErrors`."""
        channel = np.abs(self.channel)
        channel = np.where(channel > self.channel_noise, channel, 0.0)
        element, peak, gain = map(np.abs, (self.element, self.peak, self.gain))
        return np.array((*self.errors, element, peak, gain, channel, larger(self.gain_sd, self.sum_gain_sd)))

    def at(self, sites: Array | Sequence[int] | int) -> "ErrorColumns":
        """Return the columns of the given sites."""
        return ErrorColumns(*(column[..., sites] for column in self))


def _members(one: ErrorDistribution) -> tuple[float, ...]:
    sum_gain_sd = 0.0 if one.row_sizes is None else one.row_sizes.sum_gain_sd
    return *one.errors, one.element, one.gain, one.gain_sd, one.peak, one.channel, one.channel_noise, sum_gain_sd


class LargestErrors(NamedTuple):
    """For each kind of error, the maximum over the inputs of each site; 0 without inputs."""

    values: Array
    """[kinds, sites]: the properties below, stacked."""

    @classmethod
    def of(cls, spreads: Sequence[Sequence[ErrorDistribution]]) -> "LargestErrors":
        """Compute the largest errors from the distributions of each site's inputs."""
        bounds = accumulate(map(len, spreads), initial=0)
        propagated = ErrorColumns.of(list(chain.from_iterable(spreads))).propagated
        return cls(largest_in(propagated, [range(first, stop) for first, stop in pairwise(bounds)]))

    @property
    def errors(self) -> Array:
        """[quantiles, sites]: relative errors of rows."""
        return self.values[: len(QUANTILES)]

    @property
    def element(self) -> Array:
        """[sites]: :attr:`.ErrorDistribution.element`."""
        return self._row(0)

    @property
    def peak(self) -> Array:
        """[sites]: :attr:`.ErrorDistribution.peak`."""
        return self._row(1)

    @property
    def gain(self) -> Array:
        """[sites]: magnitude of :attr:`.ErrorDistribution.gain`."""
        return self._row(2)

    @property
    def channel(self) -> Array:
        """[sites]: magnitude of :attr:`.ErrorDistribution.channel`; 0 if it does not exceed its noise."""
        channel: Array = self.values[CHANNELS]
        return channel

    @property
    def gain_sd(self) -> Array:
        """[sites]: :attr:`.ErrorDistribution.gain_sd`; for gradients, at least the deviation that row gains cause in a
        sum over rows."""
        return self._row(4)

    def _row(self, index: int) -> Array:
        row: Array = self.values[len(QUANTILES) + index]
        return row
