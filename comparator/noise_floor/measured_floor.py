"""Twin: the floor as it was measured, from a run that differs from the baseline by rounding alone.

A twin is the same model and prompts in the target's dtype, in another batch split, or with inputs perturbed in the last
bit. Its distance to the baseline, times a margin, is the floor of each site. Where the twin has no such site, has it
in a finer dtype than the target, or is equal there bit for bit, it says nothing and the model of rounding stands;
and never is the floor below one rounding of the dtypes at hand.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct

from tapscope.comparator.metrics.error_distribution import Spread
from tapscope.comparator.metrics.spreads import Spreads
from tapscope.comparator.noise_floor.floor import EXTREME, TAIL
from tapscope.comparator.noise_floor.floors import NAMES, Floors
from tapscope.comparator.pair_analysis.pair_result import Examined
from tapscope.core import dtypes
from tapscope.core.errors import NothingInCommonError


class Twin(Struct, frozen=True):
    """What the twin's distance to the baseline says, by the baseline's name of the site."""

    name: str
    margin: float
    spreads: Mapping[str, tuple[Spread, float]]
    """(distance, coarsest machine epsilon of both)."""

    def judged(self, one: Examined, base: float) -> tuple[float, float, str, float] | None:
        """(error, floor, test that is furthest beyond it, floor of a row) of a site of which one module adds ``base``;
        None where the twin says nothing."""
        assert one.baseline is not None
        assert one.target is not None
        assert one.spread is not None
        spread, coarse = self.spreads.get(one.baseline.site, (None, 0.0))
        eps = max(map(dtypes.epsilon, (one.baseline.dtype or "", one.target.dtype or "")))
        if spread is None or spread.is_zero or coarse < eps:
            return None
        margin = self.margin
        limits = (
            *(max(margin * e, tail * base) for e, tail in zip(spread.errors, TAIL, strict=True)),
            max(margin * abs(spread.gain), base, 0.5 * eps),
            max(margin * abs(spread.channel), spread.channel_noise, eps),
            max(margin * spread.element, 2.0 * base),
            max(margin * spread.peak, EXTREME * base),
        )
        floors = Floors(np.array([limits]).T)
        error, floor, test = floors.worst(Spreads.of([one.spread]).tests)
        return error.item(), floor.item(), NAMES[test.item()], floors.errors[-1].item()


def twin_of(name: str, examined: Sequence[Examined], margin: float) -> Twin:
    """The twin, from its comparison with the baseline.

    Raises NothingInCommonError when not one site of it can be measured against the baseline.
    """
    spreads = {
        one.baseline.site: (one.spread, max(map(dtypes.epsilon, (one.baseline.dtype or "", one.target.dtype or ""))))
        for one in examined
        if one.spread is not None and one.baseline and one.target and not one.is_exact and one.basis != "none"
    }
    if not spreads:
        raise NothingInCommonError(f"--floor {name} has no site in common with the baseline; it must be a run of it")
    return Twin(name, margin, spreads)
