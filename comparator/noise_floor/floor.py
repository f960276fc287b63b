"""Floor: how much of an error rounding explains: the formulas.

Of one module that computes y from x in a dtype of machine epsilon ``eps``, errors being relative to the row:

- rounding a value to the nearest leaves 0.29 ulp (uniform over +-ulp/2), and an ulp is 0.72 eps of a value on average
  (mantissas uniform in the logarithm): 0.2 eps. It happens twice, to the outputs of both sides, or beside a wider dtype
  to the weights and to the output of the narrow side: a factor sqrt(2);
- a sum of n products in float32 in another order is a random walk of such roundings: 0.2 eps sqrt(n) on each side
  (Higham, Accuracy and Stability of Numerical Algorithms, 2nd ed., section 4.2; Higham and Mary, A New Approach to
  Probabilistic Rounding Error Analysis, SIAM J. Sci. Comput. 41(5), 2019: independent errors grow as sqrt(n), not n);
- both add up as variances to ``base``; the error of the inputs passes through, times the condition of the module.

Two bounds follow, and a site must obey both. *Local*: ``k hypot(error of the inputs, base)``, k being the condition:
sqrt(2) where two operands carry the error, 2 where a sum loses half its length; it is learned from the same module of
other layers, which is conditioned alike. *Along the path*: ``PATH m``, where ``m`` sums the bases of everything in
front of the site as if each had condition 1, so that a growth just below k at every module does not pass.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from tapscope.comparator.metrics.columns import hypot, larger, smaller
from tapscope.comparator.metrics.error_distribution import QUANTILES
from tapscope.comparator.metrics.spreads import Largest, Spreads
from tapscope.comparator.noise_floor.floors import Floors
from tapscope.core import dtypes

Array = np.ndarray[Any, Any]

TAIL = (1.0, 2.0, 3.0, 5.0)
"""How much wider rounding is at each of :data:`~.spread.QUANTILES` than for the typical row: rows differ in size."""
SLACK = (1.0, 1.2, 1.4, 1.6)
"""How much wider a condition may be for the rows at each quantile than for the typical one."""
PATH = 4.0
"""Bound of the error along the path, in ``m``: twice a typical condition of 2, for the modules differ."""
ROW_LIMIT = 0.5
"""A row may never be off by more than this share of itself, however noisy its inputs. Going backward that holds of the
typical row alone."""
EXTREME = 6.0
"""The largest of a million independent errors, in standard deviations (5.4), rounded up."""
PEAK = 3.0
"""How much wider a condition may be for one element of one row than for the typical row: a norm's weights, say, lift
single channels to several times the rest."""
PEAK_UNKNOWN = EXTREME
"""The same where nobody knows what was computed: a product with another activation lifts single elements by as much as
that one's largest stands out, in a row of a million normal ones."""
STORED = 2.0**-4
"""Epsilon from which on a format is one to keep values in: they are computed in 16 bits or more and rounded to it once,
by half a step on each side and no further; no module makes more of that."""
NARROW = 5
"""Rows of fewer elements than this are as unlike each other as a few normal numbers: see :attr:`Terms.narrow`."""
CHANNEL = 4.0
"""How much more of a channel's systematic error may come out of a module than went in."""

OFFSET = 4.0
"""Gemma's norms multiply by 1 + w, and w is rounded by up to half an epsilon of its own size: where 1 + w is an eighth,
w is nearly -1, and its channel is off by 3.5 epsilons in every row."""

_TAIL, _SLACK = np.array([TAIL]).T, np.array([SLACK]).T


@lru_cache(maxsize=4096)
def unit(baseline: str, target: str, reduction: int) -> float:
    """Relative error that one module adds, computed in both dtypes; ``reduction`` is the length of its sums."""
    coarse = max(dtypes.epsilon(baseline), dtypes.epsilon(target))
    # Sums are in float32 at least as a rule, and those of float64 tensors in float64.
    narrow = 2.0**-52 if coarse <= 2.0**-52 else 2.0**-23
    return 0.2 * math.sqrt(2.0) * math.hypot(coarse, narrow * math.sqrt(max(reduction, 1)))


class Terms(NamedTuple):
    """What floors of sites depend on, beside the errors of what went in; one element a site."""

    spreads: Spreads
    base: Array
    """What one pass through the module adds."""
    eps: Array
    """Of the coarser dtype."""
    limit: Array | float = ROW_LIMIT
    """The most that a row may be off, and half of what its largest element may be."""
    tail_limit: Array | float = 0.0
    """Where that is more, the most that any row but the typical may."""
    offset: Array | float = 1.0
    """By how much more than by itself a weight is rounded, see :data:`OFFSET`."""

    @property
    def few(self) -> Array:
        """The median of few rows is as wild as their worst."""
        return 1.0 + 3.0 / np.maximum(self.spreads.num_rows, 1)

    @property
    def tail(self) -> Array:
        """[quantiles, sites]: :data:`TAIL`; of n rows those beyond a quantile q are n (1 - q), and where these are not
        two, what lies there is the worst of them or next to it."""
        is_worst = np.maximum(self.spreads.num_rows, 1) * (1.0 - np.array([QUANTILES]).T) < 2.0
        is_worst[0] = False
        return np.where(is_worst, TAIL[-1], _TAIL)

    @property
    def slack(self) -> Array:
        """[quantiles, sites]: :data:`SLACK`, alike."""
        return np.where(self.tail == TAIL[-1], SLACK[-1], _SLACK)

    @property
    def narrow(self) -> Array:
        """How much wider the tail is of rows of w elements only, such as a gate of one number: error and size of such a
        row are sums of w squares each, and their ratio is as wild as the root of F(w, w). Beside the median, with rows
        counted as a quarter of the typical size at least, its 98 % lies at 9.5, 5.5 and 3.3 and the largest of 400,000
        at 25, 16 and 10 for w = 1, 2, 4; :data:`TAIL` holds 3 and 5. A few elements may all be next to nothing, so that
        the most that a row may be off grows alike."""
        width = self.spreads.width
        return np.where(width > 0, np.maximum(1.0, NARROW / np.maximum(width, 1)), 1.0)

    def rising(self, errors: Array) -> Array:
        """[quantiles, sites]: never stricter for the worst row than for the typical one, and never above the limit."""
        tail_limit = larger(self.tail_limit, self.limit * self.narrow)
        found, most = [smaller(errors[0], self.limit)], larger(self.limit, tail_limit)
        for error in errors[1:]:
            error = np.where(most < error, most, error)
            found.append(np.where(found[-1] > error, found[-1], error))
        return np.array(found)

    def gain(self, inherited: Array, carried: Array | float = 0.0) -> Array:
        """Rounding has no direction: a common gain beyond half an epsilon and its own sampling error is systematic.
        Values in float32 that were made of narrower ones carry these errors, ``carried`` of the typical row: there it
        is half of that, and half of bfloat16's epsilon at most."""
        rows = np.maximum(self.spreads.num_rows, 1)
        sampling = 3.0 * larger(self.spreads.gain_sd, self.spreads.errors[0] / rows) / np.sqrt(rows)
        narrow = 0.5 * smaller(carried, dtypes.epsilon("bfloat16"))
        return larger(0.5 * self.eps, self.base, narrow) + 2.0 * inherited + sampling


def local_floors(
    given: Largest,
    terms: Terms,
    condition: Array | float,
    *,
    mixes: Array | bool = False,
    keeps_channels: Array | bool = False,
    sums_rows: Array | bool = False,
    stretch: Array | float = 1.0,
) -> Floors:
    """The floors of modules given the errors of what went into them.

    ``mixes``: rows may be mixed on the way, as in attention; then their errors are alike and do not average out.
    ``keeps_channels``: such as mix rows, but have their channels along another axis (:mod:`..measures.images`).
    ``sums_rows``: it is a sum over the rows of the inputs, such as a parameter's gradient.
    ``stretch``: how much larger the condition may be of single rows.
    """
    spreads, base, eps, few, worst = terms.spreads, terms.base, terms.eps, terms.few, given.errors[-1]
    errors = terms.slack * condition * hypot(given.errors, terms.tail * base)
    errors[0] *= few
    summed = np.where(sums_rows, condition * worst, 0.0)  # one token may make a whole channel of the sum
    stretch = stretch * terms.narrow
    errors[1:] *= np.where(stretch == 1.0, 1.0, stretch)
    terms = terms._replace(tail_limit=larger(terms.tail_limit, worst_limit(given)))
    element = smaller(2.0 * few * condition * hypot(given.element, 2.0 * base), 2.0 * terms.limit)
    lifts = np.where(mixes, PEAK_UNKNOWN, PEAK) * stretch * condition
    peak = lifts * hypot(given.peak, EXTREME * base, worst)
    if (eps >= STORED).any():
        rounded = np.full_like(base, EXTREME * unit(*("bfloat16",) * 2, 1))
        peak = np.where(eps >= STORED, smaller(peak, lifts * hypot(given.peak, rounded, worst) + eps), peak)
    channel = larger(spreads.channel_noise, eps * terms.offset, summed, CHANNEL * hypot(base, given.channel))
    return Floors(
        np.array(
            (
                *terms.rising(errors),
                terms.gain(given.gain, given.errors[0]) + np.where(sums_rows, summed_gain(given), 0.0),
                np.where(mixes & ~np.asarray(keeps_channels), np.inf, channel),
                np.where(sums_rows & (spreads.num_rows == 1), peak, element),  # as of_sum
                peak,
            )
        )
    )


def worst_limit(given: Largest) -> Array:
    """The most that a single row may be off where what went in is off already: as much again."""
    found: Array = 2.0 * given.errors[-1]
    return found


def path_floors(modelled: Array, terms: Terms) -> Floors:
    """The floors of sites at which the rounding of everything in front of them adds up to ``modelled``."""
    grown, few, narrow = PATH * modelled, terms.few, terms.narrow
    errors = terms.slack * terms.tail * grown * narrow
    errors[0] = few * grown
    return Floors(
        np.array(
            (
                *terms.rising(errors),
                terms.gain(grown),
                larger(terms.spreads.channel_noise, terms.eps * terms.offset, grown),
                smaller(4.0 * few * grown, 2.0 * terms.limit),
                EXTREME * SLACK[-1] * TAIL[-1] * grown * narrow,
            )
        )
    )


def summed_gain(given: Largest) -> Array:
    """What of the gain of a sum over rows the gains of the rows explain: it is their mean, weighted by what each row
    adds, and where one row adds nearly all, it is that row's."""
    return 3.0 * given.gain_sd


assert len(TAIL) == len(SLACK) == len(QUANTILES)
