"""Spreads: those of many sites in columns, and what they add up to where they go into others."""

from collections.abc import Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import numpy as np

from tapscope.comparator.metrics.elementwise import larger, largest_in
from tapscope.comparator.metrics.error_distribution import QUANTILES, ErrorDistribution

Array = np.ndarray[Any, Any]
_MEMBERS = len(QUANTILES) + 7
ELEMENT, PEAK, CHANNELS = len(QUANTILES), len(QUANTILES) + 1, len(QUANTILES) + 3
"""Rows of these members of :class:`LargestErrors` among its kinds."""


class ErrorColumns(NamedTuple):
    """The members of :class:`~.spread.ErrorDistribution` that floors depend on; one element a site."""

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
    sway: Array
    """0 where that is not known."""

    @classmethod
    def of(cls, spreads: Sequence[ErrorDistribution]) -> "ErrorColumns":
        """Of some sites."""
        values = np.fromiter(chain.from_iterable(map(_members, spreads)), np.float64, _MEMBERS * len(spreads))
        errors, others = np.split(values.reshape(-1, _MEMBERS).T.copy(), [len(QUANTILES)])
        num_rows, width = np.array([(each.num_rows, each.width) for each in spreads], np.int64).reshape(-1, 2).T
        return cls(num_rows, width, errors, *others)

    @property
    def tests(self) -> Array:
        """[tests, sites]: every error that has a floor: at :data:`~.spread.QUANTILES`, and the size of gain, channel,
        element and peak."""
        return np.array((*self.errors, np.abs(self.gain), np.abs(self.channel), self.element, self.peak))

    @property
    def handed(self) -> Array:
        """[kinds, sites]: the errors that modules are given with values, in the order of :class:`LargestErrors`."""
        channel = np.abs(self.channel)
        channel = np.where(channel > self.channel_noise, channel, 0.0)
        element, peak, gain = map(np.abs, (self.element, self.peak, self.gain))
        return np.array((*self.errors, element, peak, gain, channel, larger(self.gain_sd, self.sway)))

    def at(self, sites: Array | Sequence[int] | int) -> "ErrorColumns":
        """Of some of the sites."""
        return ErrorColumns(*(column[..., sites] for column in self))


def _members(one: ErrorDistribution) -> tuple[float, ...]:
    sway = 0.0 if one.sizes is None else one.sizes.sway
    return *one.errors, one.element, one.gain, one.gain_sd, one.peak, one.channel, one.channel_noise, sway


class LargestErrors(NamedTuple):
    """The largest errors of the spreads that went into each site, each of its kind; 0 where none did."""

    values: Array
    """[kinds, sites]: one after the other what follows."""

    @classmethod
    def of(cls, spreads: Sequence[Sequence[ErrorDistribution]]) -> "LargestErrors":
        """Of what went into each of some sites."""
        bounds = accumulate(map(len, spreads), initial=0)
        handed = ErrorColumns.of(list(chain.from_iterable(spreads))).handed
        return cls(largest_in(handed, [range(first, stop) for first, stop in pairwise(bounds)]))

    @property
    def errors(self) -> Array:
        """[quantiles, sites]."""
        return self.values[: len(QUANTILES)]

    @property
    def element(self) -> Array:
        """Sizes."""
        return self._row(0)

    @property
    def peak(self) -> Array:
        """Sizes."""
        return self._row(1)

    @property
    def gain(self) -> Array:
        """Sizes."""
        return self._row(2)

    @property
    def channel(self) -> Array:
        """Of those beyond their noise."""
        found: Array = self.values[CHANNELS]
        return found

    @property
    def gain_sd(self) -> Array:
        """Of gradients also what the rows' own gains may leave in a sum over them."""
        return self._row(4)

    def _row(self, index: int) -> Array:
        found: Array = self.values[len(QUANTILES) + index]
        return found
