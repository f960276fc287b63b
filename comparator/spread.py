"""Spread: how the errors of a site's rows are distributed, each row relative to its own size.

The global error of a tensor hides one bad token among thousands and one dead channel among hundreds; quantiles over
rows and the worst element of each row do not.
"""

from dataclasses import dataclass, replace

from tapscope.comparator.channels import QUIET, Channel
from tapscope.kernels.native import Overview
from tapscope.kernels.native.overview import QUANTILES as QUANTILES


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
        return replace(self, errors=worst, element=self.peak)


NOTHING = Spread(0, (0.0,) * len(QUANTILES), 0.0, 0.0, 0.0)
"""The spread of equal tensors."""


def spread_of(seen: Overview, channel: Channel = QUIET) -> Spread:
    """The spread over the rows that were read; rows known equal by their hash do not dilute it."""
    if seen.is_zero:
        return NOTHING
    return Spread(
        len(seen.errors),
        seen.quantiles,
        seen.element,
        seen.gain,
        seen.gain_sd,
        seen.peak,
        channel.gain,
        channel.noise,
        channel.index,
    )
