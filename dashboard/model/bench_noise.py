"""Noise of a benchmark: its variation without any change, as a relative standard deviation."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

ASSUMED = 0.03
"""Relative standard deviation if neither repeats nor a history allow an estimate."""
LEAST_BAND = 0.01
"""Smallest difference that counts as a change: clocks, temperatures and placement cause variations of 1 %."""
_T = (63.66, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169, 3.106, 3.055, 3.012, 2.977, 2.947)
"""Student's t, two-sided 99 %, for 1 to 15 degrees of freedom."""
_T_LARGE = ((20, 2.845), (30, 2.750), (60, 2.660), (math.inf, 2.576))
_LEAST_DIFFERENCES = 4


@dataclass(frozen=True, slots=True)
class BenchNoise:
    """Standard deviation of a metric's logarithm, which equals its relative noise."""

    sigma: float
    dof: float
    """Degrees of freedom of the estimate; inf for an assumed value."""
    basis: str

    def band(self, num_before: int, num_after: int) -> float:
        """Return the largest relative difference of two means that noise explains with 99 % confidence."""
        spread = self.sigma * math.sqrt(1 / num_before + 1 / num_after)
        return max(math.expm1(min(_t(self.dof) * spread, 10.0)), LEAST_BAND)

    def interval(self, num: int) -> float:
        """Return half of the relative 99 % confidence interval of a mean over ``num`` repeats."""
        return max(math.expm1(min(_t(self.dof) * self.sigma / math.sqrt(num), 10.0)), LEAST_BAND / 2)


def bench_noise(commits: Sequence[Sequence[float]]) -> BenchNoise:
    """Estimate the noise of one series; ``commits`` has the repeated values of each commit, in order.

    1. With repeats: their pooled standard deviation.
    2. Otherwise, from differences between adjacent commits: 1.4826 × their median magnitude ÷ √2. The median is robust
       against the few commits that change performance (Hampel's MAD, applied to von Neumann's differences).
    3. Otherwise :data:`ASSUMED`.
    """
    logs = [[math.log(value) for value in values] for values in commits if values]
    dof = sum(len(values) - 1 for values in logs)
    if dof >= 2:
        squares = sum((value - statistics.fmean(values)) ** 2 for values in logs for value in values)
        return BenchNoise(math.sqrt(squares / dof), dof, f"{dof + sum(len(v) > 1 for v in logs)} repeats")
    means = [statistics.fmean(values) for values in logs]
    steps = [abs(b - a) for a, b in pairwise(means)]
    if len(steps) >= _LEAST_DIFFERENCES:
        sigma = 1.4826 * statistics.median(steps) / math.sqrt(2)
        return BenchNoise(sigma, max(len(steps) // 2, 2), f"differences between {len(means)} commits")
    return BenchNoise(ASSUMED, math.inf, f"assumed, {ASSUMED:.0%} per result")


def _t(dof: float) -> float:
    if dof <= len(_T):
        return _T[int(dof) - 1]
    return next(value for limit, value in _T_LARGE if dof <= limit)
