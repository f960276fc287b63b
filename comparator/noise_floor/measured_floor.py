"""MeasuredFloor: the floor measured by a noise run, which differs from the baseline by rounding alone.

A noise run is the same model and prompts in the target's dtype, in another batch split, or with inputs perturbed in the
last bit. Its distance to the baseline, times a margin, is the floor of each site. The error model decides if the noise
run lacks a site, has it in a finer dtype than the target, or is equal to the baseline bit for bit. A floor is never
below one rounding of the compared dtypes.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import Struct

from tapscope.comparator.metrics.error_columns import ErrorColumns
from tapscope.comparator.metrics.error_distribution import ErrorDistribution
from tapscope.comparator.noise_floor.constants import LARGEST_OF_MILLION, QUANTILE_WIDENING
from tapscope.comparator.noise_floor.floor_table import TESTS, FloorTable
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.core import dtypes
from tapscope.core.errors import NothingInCommonError


class MeasuredFloor(Struct, frozen=True):
    """Distances between noise run and baseline, by the baseline's name of the site."""

    name: str
    margin: float
    spreads: Mapping[str, tuple[ErrorDistribution, float]]
    """Site -> (distance, coarsest machine epsilon of both runs)."""

    def judged(self, result: PairResult, local: float) -> tuple[float, float, str, float] | None:
        """Return (error, floor, deciding test, row floor) of a site whose module adds ``local``; None if the error
        model decides."""
        assert result.baseline is not None
        assert result.target is not None
        assert result.distribution is not None
        spread, coarse = self.spreads.get(result.baseline.site, (None, 0.0))
        eps = max(map(dtypes.epsilon, (result.baseline.dtype or "", result.target.dtype or "")))
        if spread is None or spread.is_zero or coarse < eps:
            return None
        margin = self.margin
        limits = (
            *(max(margin * e, tail * local) for e, tail in zip(spread.errors, QUANTILE_WIDENING, strict=True)),
            max(margin * abs(spread.gain), local, 0.5 * eps),
            max(margin * abs(spread.channel), spread.channel_noise, eps),
            max(margin * spread.element, 2.0 * local),
            max(margin * spread.peak, LARGEST_OF_MILLION * local),
        )
        floors = FloorTable(np.array([limits]).T)
        error, floor, test = floors.worst(ErrorColumns.of([result.distribution]).tests)
        return error.item(), floor.item(), TESTS[test.item()], floors.errors[-1].item()


def measure_floor(name: str, pairs: Sequence[PairResult], margin: float) -> MeasuredFloor:
    """Compute the measured floor from the noise run's comparison with the baseline.

    Raises NothingInCommonError if no site of the noise run can be measured against the baseline.
    """
    spreads = {
        one.baseline.site: (
            one.distribution,
            max(map(dtypes.epsilon, (one.baseline.dtype or "", one.target.dtype or ""))),
        )
        for one in pairs
        if one.distribution is not None and one.baseline and one.target and not one.is_exact and one.basis != "none"
    }
    if not spreads:
        raise NothingInCommonError(
            f"--noise-run {name} has no site in common with the baseline: expected a repeat of it"
        )
    return MeasuredFloor(name, margin, spreads)
