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
from collections.abc import Sequence
from functools import lru_cache

from msgspec import Struct

from tapscope import dtypes
from tapscope.comparator.spread import QUANTILES, Largest, Spread

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
"""Rows of fewer elements than this are as unlike each other as a few normal numbers: see :func:`_narrow`."""
CHANNEL = 4.0
"""How much more of a channel's systematic error may come out of a module than went in."""

_NAMES = ("typical", "tail", "tail", "row", "gain", "channel", "element", "peak")
"""What the tests are called, in the order of :attr:`~.spread.Spread.tests`."""


class Floor(Struct, frozen=True, gc=False):
    """The largest errors that rounding explains, one for each test."""

    limits: tuple[float, ...]
    """In the order of :attr:`~.spread.Spread.tests`."""

    @property
    def errors(self) -> tuple[float, ...]:
        """At :data:`~.spread.QUANTILES`."""
        return self.limits[: len(QUANTILES)]

    def worst(self, spread: Spread) -> tuple[float, float, str]:
        """(error, floor, name) of the test whose error is largest beside its floor; of several the first."""
        errors, floors = spread.tests, self.limits
        found = scores(errors, floors)
        at = found.index(max(found))
        return errors[at], floors[at], _NAMES[at]

    def smaller(self, other: "Floor") -> "Floor":
        """The stricter of both, test by test."""
        return Floor(tuple(map(min, self.limits, other.limits)))

    def of_sum(self, gain: float, num_rows: int) -> "Floor":
        """Of a sum over rows, which may be off by as much more ``gain``, and in any channel; of ``num_rows`` itself, so
        that of one row the typical largest element is the largest of all."""
        *errors, own, _, element, peak = self.limits
        return Floor((*errors, own + gain, math.inf, peak if num_rows == 1 else element, peak))

    def lifted(self, by: Sequence[float]) -> "Floor":
        """Where rows may be off by that many times as much, at :data:`~.spread.QUANTILES`."""
        if max(by) == 1.0:
            return self
        *others, peak = self.limits[len(by) :]
        return Floor((*(error * more for error, more in zip(self.errors, by, strict=True)), *others, peak * by[-1]))

    def scaled(self, gain: float) -> "Floor":
        """The same where a common gain of that size is explained besides."""
        *errors, own, channel, element, peak = self.limits
        return Floor((*errors, own + gain, channel, element, peak))


def scores(errors: Sequence[float], floors: Sequence[float]) -> list[float]:
    """error / floor of each; no error is 0 whatever the floor."""
    return [
        0.0 if error == 0.0 else error / floor if floor > 0.0 else math.inf
        for error, floor in zip(errors, floors, strict=True)
    ]


def score(error: float, floor: float) -> float:
    """The same of one."""
    return 0.0 if error == 0.0 else error / floor if floor > 0.0 else math.inf


@lru_cache(maxsize=4096)
def unit(baseline: str, target: str, reduction: int) -> float:
    """Relative error that one module adds, computed in both dtypes; ``reduction`` is the length of its sums."""
    coarse = max(dtypes.epsilon(baseline), dtypes.epsilon(target))
    # Sums are in float32 at least as a rule, and those of float64 tensors in float64.
    narrow = 2.0**-52 if coarse <= 2.0**-52 else 2.0**-23
    return 0.2 * math.sqrt(2.0) * math.hypot(coarse, narrow * math.sqrt(max(reduction, 1)))


def local_floor(
    inputs: Largest,
    base: float,
    spread: Spread,
    condition: float,
    eps: float,
    *,
    mixes: bool = False,
    sums_rows: bool = False,
    limit: float = ROW_LIMIT,
    tail_limit: float = 0.0,
    stretch: float = 1.0,
) -> Floor:
    """The floor of a module given the errors of what went into it; ``base`` is its own rounding.

    ``mixes``: rows may be mixed on the way, as in attention; then their errors are alike and do not average out.
    ``sums_rows``: it is a sum over the rows of the inputs, such as a parameter's gradient.
    ``limit``: the most that a row may be off, and half of what its largest element may be; ``tail_limit`` where that is
    more the most that any row but the typical may.
    ``stretch``: how much larger the condition may be of single rows.
    """
    few, worst = _few(spread), inputs.errors[-1]
    errors = [
        slack * condition * math.hypot(error, tail * base)
        for slack, tail, error in zip(SLACK, TAIL, inputs.errors, strict=True)
    ]
    errors[0] *= few
    summed = condition * worst if sums_rows else 0.0  # one token may make a whole channel of the sum
    stretch = stretch * _narrow(spread)
    if stretch != 1.0:
        errors[1:] = [stretch * error for error in errors[1:]]
    element = min(2.0 * few * condition * math.hypot(inputs.element, 2.0 * base), 2.0 * limit)
    lifts = (PEAK_UNKNOWN if mixes else PEAK) * stretch * condition
    peak = lifts * math.hypot(inputs.peak, EXTREME * base, worst)
    if eps >= STORED:
        peak = min(peak, lifts * math.hypot(inputs.peak, EXTREME * unit(*("bfloat16",) * 2, 1), worst) + eps)
    return Floor(
        (
            *_rising(errors, limit, max(tail_limit, limit * _narrow(spread))),
            _gain_floor(spread, inputs.gain, base, eps) + (summed_gain(inputs) if sums_rows else 0.0),
            math.inf if mixes else max(spread.channel_noise, eps, summed, CHANNEL * math.hypot(base, inputs.channel)),
            peak if sums_rows and spread.num_rows == 1 else element,  # as of_sum
            peak,
        )
    )


def path_floor(
    modelled: float,
    spread: Spread,
    base: float,
    eps: float,
    *,
    limit: float = ROW_LIMIT,
    tail_limit: float = 0.0,
) -> Floor:
    """The floor of a site at which the rounding of everything in front of it adds up to ``modelled``; ``limit`` and
    ``tail_limit`` as of :func:`local_floor`."""
    grown, few, narrow = PATH * modelled, _few(spread), _narrow(spread)
    errors = [slack * tail * grown * narrow for slack, tail in zip(SLACK, TAIL, strict=True)]
    errors[0] = few * grown
    return Floor(
        (
            *_rising(errors, limit, max(tail_limit, limit * narrow)),
            _gain_floor(spread, grown, base, eps),
            max(spread.channel_noise, eps, grown),
            min(4.0 * few * grown, 2.0 * limit),
            EXTREME * SLACK[-1] * TAIL[-1] * grown * narrow,
        )
    )


def _few(spread: Spread) -> float:
    """The median of few rows is as wild as their worst."""
    return 1.0 + 3.0 / max(spread.num_rows, 1)


def _narrow(spread: Spread) -> float:
    """How much wider the tail is of rows of w elements only, such as a gate of one number: error and size of such a
    row are sums of w squares each, and their ratio is as wild as the root of F(w, w). Beside the median, with rows
    counted as a quarter of the typical size at least, its 98 % lies at 9.5, 5.5 and 3.3 and the largest of 400,000 at
    25, 16 and 10 for w = 1, 2, 4; :data:`TAIL` holds 3 and 5. A few elements may all be next to nothing, so that the
    most that a row may be off grows alike."""
    return max(1.0, NARROW / spread.width) if spread.width else 1.0


def _rising(errors: Sequence[float], limit: float, tail_limit: float = 0.0) -> list[float]:
    """Never stricter for the worst row than for the typical one, and never above the limit."""
    last = min(errors[0], limit)
    found, most = [last], max(limit, tail_limit)
    for error in errors[1:]:
        error = most if most < error else error
        last = last if last > error else error
        found.append(last)
    return found


def _gain_floor(spread: Spread, inherited: float, base: float, eps: float) -> float:
    """Rounding has no direction: a common gain beyond half an epsilon and its own sampling error is systematic."""
    rows = max(spread.num_rows, 1)
    sampling = 3.0 * max(spread.gain_sd, spread.errors[0] / rows) / math.sqrt(rows)
    return max(0.5 * eps, base) + 2.0 * inherited + sampling


def summed_gain(inputs: Largest) -> float:
    """What of the gain of a sum over rows the gains of the rows explain: it is their mean, weighted by what each row
    adds, and where one row adds nearly all, it is that row's."""
    return 3.0 * inputs.gain_sd


assert len(TAIL) == len(SLACK) == len(QUANTILES)
