"""Error distribution: the errors of a site's rows, each relative to the norm of the row.

The global error of a tensor hides one bad token among thousands and one dead channel among hundreds. Quantiles over
rows and the worst element of each row reveal both.
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
    """Sizes of the baseline's rows."""

    max_to_median: float
    """Norm of the largest row / norm of the median row."""
    median_rms: float
    """Root mean square of the elements of the median row."""
    min_rms: float
    """Root mean square of the elements of the smallest row."""
    sum_gain_sd: float = 0.0
    """Standard deviation of the gain of a sum over rows due to different row gains; the gain of a row is weighted by
    its share of the sum of squares."""
    num_terms: float = math.inf
    """Effective number of rows: ``(sum of s)^2 / sum of s^2`` for the squares s of the row norms; 1 if a single row has
    the whole sum of squares."""


class ErrorDistribution(Struct, frozen=True, gc=False):
    """Distribution of relative errors over the rows of a site."""

    num_rows: int
    errors: tuple[float, ...]
    """Errors at :data:`QUANTILES`: norm of the row's difference / norm of its baseline."""
    element: float
    """Median over rows of: difference of the largest element / max(that element, rms of the row)."""
    gain: float
    """Median over rows of (baseline . target) / (baseline . baseline), minus 1: a common scale of the target."""
    gain_sd: float
    """Variation of the gain over rows (1.4826 x median absolute deviation)."""
    peak: float = 0.0
    """Maximum over rows of the quantity whose median is :attr:`element`."""
    channel: float = 0.0
    """Gain of the most conspicuous channel, see :mod:`.channels`."""
    channel_noise: float = 0.0
    """The part of :attr:`channel` that the scatter over rows and channels explains."""
    channel_index: int = 0
    row_sizes: RowSizes | None = None
    """Sizes of the baseline's rows; for gradients only."""
    width: int = 0
    """Number of elements of the widest row; 0 if unknown."""

    @property
    def is_zero(self) -> bool:
        """Whether all errors are zero."""
        return self.errors[-1] == 0.0

    def scaled(self, by: Sequence[float]) -> "ErrorDistribution":
        """Return the distribution with its errors multiplied by one factor per quantile of :data:`QUANTILES`."""
        if max(by) == 1.0:
            return self
        return structs.replace(self, errors=tuple(e * more for e, more in zip(self.errors, by, strict=True)))

    def worst_everywhere(self) -> "ErrorDistribution":
        """Return the distribution in which every row and element has the error of the worst one."""
        worst = (self.errors[-1],) * len(self.errors)
        return structs.replace(self, errors=worst, element=self.peak)


NO_ERROR = ErrorDistribution(0, (0.0,) * len(QUANTILES), 0.0, 0.0, 0.0)
"""The distribution of equal tensors."""


Quantiles = tuple[float, ...]
"""One number per quantile of :data:`QUANTILES`."""


class ParameterUpdate(Struct, frozen=True):
    """Error of a parameter after one optimizer step."""

    step: int
    distribution: ErrorDistribution
    update_size: ErrorDistribution
    """Size of the baseline's update, relative to the parameter's rows."""
    target_update_size: Quantiles = ()
    """Size of the target's update relative to the baseline's rows, at :data:`QUANTILES`; empty if unknown."""


def error_distribution_of(seen: Overview, width: int = 0, sizes: RowSizes | None = None) -> ErrorDistribution:
    """Return the distribution over the rows that were read, ``width`` elements wide.

    Rows known equal by hash are not part of the distribution, so they do not dilute it.
    """
    if seen.is_zero:
        return NO_ERROR
    measured = seen.quantiles, seen.element, seen.gain, seen.gain_sd, seen.peak
    return ErrorDistribution(len(seen.errors), *measured, width=width, row_sizes=sizes)


def root_mean_square(errors: Array) -> Array:
    """Return the root mean square over rows, [sites], from errors [quantiles, sites].

    Squares are interpolated linearly between two quantiles and constant below the first.
    """
    squares, shares = errors**2, np.diff((0.0, *QUANTILES))
    means = np.concatenate((squares[:1], (squares[:-1] + squares[1:]) / 2.0))
    rms: Array = np.sqrt(shares @ means)
    return rms


def with_channel(spread: ErrorDistribution, channel: Channel) -> ErrorDistribution:
    """Return the distribution with the most conspicuous channel set."""
    return structs.replace(spread, channel=channel.gain, channel_noise=channel.noise, channel_index=channel.index)


def row_sizes_of(rows: RowMeasures) -> RowSizes:
    """Compute the sizes of the baseline's rows, without rows of zeros."""
    use = np.isfinite(rows.sum_sq_baseline) & (rows.sum_sq_baseline > 0.0)
    if not use.any():
        return RowSizes(1.0, 0.0, 0.0)
    energy = rows.sum_sq_baseline[use]
    squares = energy / np.maximum(rows.width[use], 1)
    gains = rows.dot[use] / energy
    sum_gain_sd = float(np.linalg.norm((gains - median(gains)) * (energy / energy.sum())))
    max_to_median = math.sqrt(float(energy.max()) / median(energy))
    shares = energy / energy.sum()
    num_terms = 1.0 / float(np.square(shares).sum())
    return RowSizes(max_to_median, math.sqrt(median(squares)), math.sqrt(float(squares.min())), sum_gain_sd, num_terms)
