"""Spread: how the errors of a site's rows are distributed, each row relative to its own size.

The global error of a tensor hides one bad token among thousands and one dead channel among hundreds; quantiles over
rows and the worst element of each row do not.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from msgspec import Struct, structs

from tapscope.kernels.native import Overview, RowMeasures
from tapscope.kernels.native.aggregate import QUANTILES as QUANTILES
from tapscope.kernels.native.aggregate import median
from tapscope.kernels.native.channels import Channel

Array = np.ndarray[Any, Any]


class RowSizes(Struct, frozen=True, gc=False):
    """How large the rows of the baseline are."""

    reach: float
    """The largest beside the median one."""
    rms: float
    """Of the typical row's elements."""
    least: float
    """Of the smallest row's elements."""
    sway: float = 0.0
    """Gain that the rows' own may leave in a sum over them, one standard deviation of it: each row's gain beside the
    median one weighs as much as its square has of all squares."""
    num_terms: float = math.inf
    """How many equal rows would have as uneven a sum of squares: ``(sum of s)^2 / sum of s^2`` for squares s of the row
    norms, 1 where a single row holds all of it."""


class ErrorDistribution(Struct, frozen=True, gc=False):
    """Distribution of relative errors over rows."""

    num_rows: int
    errors: tuple[float, ...]
    """At :data:`QUANTILES`: norm of the row's difference / norm of its baseline."""
    element: float
    """Median over rows of the largest element's difference / the larger of that element and the row's rms."""
    gain: float
    """Median over rows of (baseline . target) / (baseline . baseline), minus 1: a common scale of the target."""
    gain_sd: float
    """Its spread from row to row (1.4826 x median absolute deviation)."""
    peak: float = 0.0
    """Largest over rows of what :attr:`element` is the median of."""
    channel: float = 0.0
    """Gain of the channel that stands out most, see :mod:`.channels`."""
    channel_noise: float = 0.0
    """What of it the scatter over rows and channels explains."""
    channel_index: int = 0
    sizes: RowSizes | None = None
    """Of gradients only."""
    width: int = 0
    """Elements of the widest row; 0 where that is not known."""

    @property
    def is_zero(self) -> bool:
        """Whether nothing differs."""
        return self.errors[-1] == 0.0

    def lifted(self, by: Sequence[float]) -> "ErrorDistribution":
        """With rows that are off by that many times as much, at :data:`QUANTILES`."""
        if max(by) == 1.0:
            return self
        return structs.replace(self, errors=tuple(e * more for e, more in zip(self.errors, by, strict=True)))

    def worst_everywhere(self) -> "ErrorDistribution":
        """As if the typical row were as far off as the worst, and its elements too."""
        worst = (self.errors[-1],) * len(self.errors)
        return structs.replace(self, errors=worst, element=self.peak)


NO_ERROR = ErrorDistribution(0, (0.0,) * len(QUANTILES), 0.0, 0.0, 0.0)
"""The spread of equal tensors."""


Quantiles = tuple[float, ...]
"""One number at each of :data:`QUANTILES`."""


class ParameterUpdate(Struct, frozen=True):
    """A parameter behind one step of an optimizer."""

    step: int
    spread: ErrorDistribution
    moved: ErrorDistribution
    """How far the step took the baseline's, relative to its rows."""
    moved_target: Quantiles = ()
    """How far it took the target's, relative to the baseline's rows, at :data:`QUANTILES`; empty where that is not
    known."""


def error_distribution_of(seen: Overview, width: int = 0, sizes: RowSizes | None = None) -> ErrorDistribution:
    """The spread over the rows that were read, ``width`` wide; rows known equal by their hash do not dilute it."""
    if seen.is_zero:
        return NO_ERROR
    found = seen.quantiles, seen.element, seen.gain, seen.gain_sd, seen.peak
    return ErrorDistribution(len(seen.errors), *found, width=width, sizes=sizes)


def root_mean_square(errors: Array) -> Array:
    """[sites]: over all rows, of which [quantiles, sites] are known: squares lie evenly between two quantiles, and
    below the first all are that one's."""
    squares, shares = errors**2, np.diff((0.0, *QUANTILES))
    means = np.concatenate((squares[:1], (squares[:-1] + squares[1:]) / 2.0))
    found: Array = np.sqrt(shares @ means)
    return found


def with_channel(spread: ErrorDistribution, channel: Channel) -> ErrorDistribution:
    """With the channel that stands out most."""
    return structs.replace(spread, channel=channel.gain, channel_noise=channel.noise, channel_index=channel.index)


def row_sizes_of(rows: RowMeasures) -> RowSizes:
    """The sizes of the baseline's rows; rows of zeros have none."""
    use = np.isfinite(rows.sum_sq_baseline) & (rows.sum_sq_baseline > 0.0)
    if not use.any():
        return RowSizes(1.0, 0.0, 0.0)
    found = rows.sum_sq_baseline[use]
    squares = found / np.maximum(rows.width[use], 1)
    gains = rows.dot[use] / found
    sway = float(np.linalg.norm((gains - median(gains)) * (found / found.sum())))
    reach = math.sqrt(float(found.max()) / median(found))
    shares = found / found.sum()
    num_terms = 1.0 / float(np.square(shares).sum())
    return RowSizes(reach, math.sqrt(median(squares)), math.sqrt(float(squares.min())), sway, num_terms)
