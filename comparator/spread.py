"""Spread: how the errors of a site's rows are distributed, each row relative to its own size.

The global error of a tensor hides one bad token among thousands and one dead channel among hundreds; quantiles over
rows and the worst element of each row do not.
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tapscope.comparator.channels import QUIET, Channel
from tapscope.comparator.measure import Measured
from tapscope.comparator.quantiles import median, quantiles

Array = np.ndarray[Any, Any]

QUANTILES = (0.5, 0.9, 0.98, 1.0)
"""Quantiles of the row errors, from the typical row to the worst."""
_SMALL_ROW = 0.25
"""A row smaller than this share of the median row is measured against that share: its direction is noise."""


@dataclass(frozen=True, slots=True)
class Spread:
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

    @property
    def is_zero(self) -> bool:
        """Whether nothing differs."""
        return self.errors[-1] == 0.0

    def worst_everywhere(self) -> "Spread":
        """As if the typical row were as far off as the worst, and its elements too."""
        worst = (self.errors[-1],) * len(self.errors)
        return replace(self, errors=worst, element=self.peak, gain=max(abs(self.gain), self.errors[-1]))


NOTHING = Spread(0, (0.0,) * len(QUANTILES), 0.0, 0.0, 0.0)
"""The spread of equal tensors."""


def row_errors(measured: Measured) -> Array:
    """[rows] relative error of each row; inf where only the target is not zero."""
    rows = measured.rows
    size = np.sqrt(rows.sum_sq_baseline)
    typical = median(size) if len(size) else 0.0
    return _ratio(np.sqrt(rows.sum_sq_diff), np.maximum(size, _SMALL_ROW * typical))


def spread_of(measured: Measured, errors: Array, channel: Channel = QUIET) -> Spread:
    """The spread over the rows that were read, given their :func:`row_errors`; rows known equal by their hash do not
    dilute it."""
    rows = measured.rows
    if not len(rows) or not rows.sum_sq_diff.any():
        return NOTHING
    rms = np.sqrt(rows.sum_sq_baseline / np.maximum(rows.width, 1))
    small = _SMALL_ROW * (median(rms) or float(rms.mean()))  # a row that is all zero has no scale of its own
    element = _ratio(rows.max_abs, np.maximum(np.abs(measured.at_worst), np.maximum(rms, small)))
    gains = np.divide(rows.dot, rows.sum_sq_baseline, out=np.ones(len(rows)), where=rows.sum_sq_baseline > 0) - 1
    gain = median(gains)
    return Spread(
        len(rows),
        quantiles(errors, QUANTILES),
        median(element),
        gain,
        1.4826 * median(np.abs(gains - gain)),
        float(element.max()),
        channel.gain,
        channel.noise,
        channel.index,
    )


def _ratio(part: Array, whole: Array) -> Array:
    """part / whole, 0 where both are 0 and inf where only the whole is."""
    missing = np.where(part > 0, np.inf, 0.0)
    return np.divide(part, whole, out=missing, where=whole > 0)
