"""The two bounds that form a floor: the local bound, given the errors of a site's inputs, and the bound along the path.

For a module that computes y from x in a dtype of machine epsilon ``eps``, with errors relative to the row:

- rounding to nearest leaves an error of 0.2 eps per value, on each side: ``0.2 sqrt(2) eps`` (:mod:`.local_rounding`);
- a sum of n products in another order is a random walk of float32 roundings: ``0.2 sqrt(2) 2^-23 sqrt(n)`` (Higham,
  *Accuracy and Stability of Numerical Algorithms*, 2nd ed., section 4.2; Higham and Mary, *A New Approach to
  Probabilistic Rounding Error Analysis*, SIAM J. Sci. Comput. 41(5), 2019: independent errors grow as sqrt(n), not n);
- the variances of these and of further effects add up to ``local``, the error that the module adds by itself. The error
  of the inputs propagates, multiplied by the condition k of the module.

A site must stay within both bounds:

- *local*: ``k hypot(error of the inputs, local)``. k is learned from the same module in other layers, which has a
  similar condition;
- *path*: ``PATH_CONDITION m``, where ``m`` adds up the ``local`` of everything upstream as if each module had condition
  1, so that an error that grows by just less than k in every module does not pass.
"""

from typing import Any, NamedTuple

import numpy as np

from tapscope.comparator.metrics.elementwise import hypot, larger, smaller
from tapscope.comparator.metrics.error_columns import ErrorColumns, LargestErrors
from tapscope.comparator.metrics.error_distribution import QUANTILES
from tapscope.comparator.noise_floor.constants import (
    CHANNEL_CONDITION,
    CONDITION_WIDENING,
    ELEMENT_CONDITION,
    LARGEST_OF_MILLION,
    MAX_ROW_ERROR,
    MEDIAN_SAMPLING,
    NARROW_PATH_WIDTH,
    NARROW_ROW_WIDTH,
    PATH_CONDITION,
    QUANTILE_WIDENING,
    STORAGE_EPSILON,
    UNOBSERVED_ELEMENT_CONDITION,
)
from tapscope.comparator.noise_floor.floor_table import FloorTable
from tapscope.comparator.noise_floor.local_rounding import rounding_error
from tapscope.core import dtypes

Array = np.ndarray[Any, Any]

_WIDENING, _CONDITION = np.array([QUANTILE_WIDENING]).T, np.array([CONDITION_WIDENING]).T


class SiteTerms(NamedTuple):
    """Terms of the bounds of some sites other than the errors of their inputs, with one element per site."""

    spreads: ErrorColumns
    local: Array
    """Error that one pass through the module adds."""
    eps: Array
    """Epsilon of the coarser dtype."""
    limit: Array | float = MAX_ROW_ERROR
    """Maximum error of the typical row, and half of the maximum error of its largest element."""
    tail_limit: Array | float = 0.0
    """Maximum error of any other row, if larger."""
    weight_rounding: Array | float = 1.0
    """Rounding error of a weight, in epsilons of its channel."""
    widens_narrow: bool = True
    """Whether the tail is wider for rows of few elements."""
    is_gradient: Array | bool = False
    """Whether the site is a gradient."""

    @property
    def few(self) -> Array:
        """Widening for few rows, whose median varies as much as their worst row."""
        return 1.0 + 3.0 / np.maximum(self.spreads.num_rows, 1)

    @property
    def narrow(self) -> Array:
        """Widening of the tail for rows of few elements, see :data:`~.constants.NARROW_ROW_WIDTH`.

        All of a few elements may be near zero, so the widening also applies to the maximum error of a row.
        """
        return self._narrower_than(NARROW_ROW_WIDTH)

    @property
    def narrow_path(self) -> Array:
        """Widening of the tail along a path for rows of few elements, see :data:`~.constants.NARROW_PATH_WIDTH`."""
        return self._narrower_than(NARROW_PATH_WIDTH)

    def _narrower_than(self, least: int) -> Array:
        width = self.spreads.width if self.widens_narrow else np.zeros_like(self.spreads.width)
        return np.where(width > 0, np.maximum(1.0, least / np.maximum(width, 1)), 1.0)

    @property
    def widening(self) -> Array:
        """[quantiles, sites]: widening of the errors at each quantile.

        Of n rows, n (1 - q) are above the quantile q. If these are fewer than two, the quantile is one of the two worst
        rows.
        """
        is_worst = np.maximum(self.spreads.num_rows, 1) * (1.0 - np.array([QUANTILES]).T) < 2.0
        is_worst[0] = False
        return np.where(is_worst, QUANTILE_WIDENING[-1], _WIDENING)

    @property
    def condition_widening(self) -> Array:
        """[quantiles, sites]: :data:`~.constants.CONDITION_WIDENING`, with its last element for quantiles of the worst
        rows."""
        return np.where(self.widening == QUANTILE_WIDENING[-1], CONDITION_WIDENING[-1], _CONDITION)

    def rising(self, errors: Array) -> Array:
        """Return limits that never fall from one quantile to the next, and never exceed the maximum error of a row.

        Shape [quantiles, sites], like ``errors``.
        """
        tail_limit = larger(self.tail_limit, self.limit * self.narrow)
        rising, most = [smaller(errors[0], self.limit)], larger(self.limit, tail_limit)
        for error in errors[1:]:
            error = np.where(most < error, most, error)
            rising.append(np.where(rising[-1] > error, rising[-1], error))
        return np.array(rising)

    def gain(self, inherited: Array, carried: Array | float = 0.0) -> Array:
        """Return the limit of a common gain, [sites].

        Rounding has no direction: a gain beyond half an epsilon and its own sampling error is systematic. Float32
        values computed from narrower values carry the errors of these, ``carried`` in the typical row. Half of that
        counts, and at most half of bfloat16's epsilon.

        In second order, errors e do have a direction: a norm of a row with independent errors shrinks the row by e^2 /
        2, and the product of two factors with the same errors grows by e^2. A gradient is linear in the gradients that
        it is computed from.
        """
        rows = np.maximum(self.spreads.num_rows, 1)
        deviation = 3.0 * MEDIAN_SAMPLING * larger(self.spreads.gain_sd, self.spreads.errors[0] / rows)
        narrow = 0.5 * smaller(carried, dtypes.epsilon("bfloat16"))
        second_order = np.where(self.is_gradient, 0.0, smaller(carried, 1.0) ** 2)
        return larger(0.5 * self.eps, self.local, narrow) + 2.0 * inherited + deviation / np.sqrt(rows) + second_order


def local_bound(
    given: LargestErrors,
    terms: SiteTerms,
    condition: Array | float,
    *,
    mixes: Array | bool = False,
    keeps_channels: Array | bool = False,
    sums_rows: Array | bool = False,
    stretch: Array | float = 1.0,
) -> FloorTable:
    """Compute the local bound, given the largest errors of each site's inputs.

    ``mixes``: rows are mixed, as in attention, so their errors are similar and do not average out. ``keeps_channels``:
    sites among these whose channels are stored along another axis (:mod:`..metrics.images`). ``sums_rows``: the site is
    a sum over the rows of its inputs, such as the gradient of a parameter. ``stretch``: factor by which the condition
    of single rows may be larger.
    """
    spreads, local, eps, few, worst = terms.spreads, terms.local, terms.eps, terms.few, given.errors[-1]
    errors = terms.condition_widening * condition * hypot(given.errors, terms.widening * local)
    errors[0] *= few
    stretch = stretch * terms.narrow
    summed = np.where(sums_rows, condition * worst * stretch, 0.0)  # a single token may contribute a whole channel
    errors[1:] *= np.where(stretch == 1.0, 1.0, stretch)
    terms = terms._replace(tail_limit=larger(terms.tail_limit, worst_limit(given, condition)))
    element = smaller(2.0 * few * condition * hypot(given.element, 2.0 * local), 2.0 * terms.limit)
    lifts = np.where(mixes, UNOBSERVED_ELEMENT_CONDITION, ELEMENT_CONDITION) * stretch * condition
    peak = lifts * hypot(given.peak, LARGEST_OF_MILLION * local, worst)
    if (eps >= STORAGE_EPSILON).any():  # computed in 16 bits, rounded to the storage format once
        rounded = np.full_like(local, LARGEST_OF_MILLION * rounding_error("bfloat16", "bfloat16", 1))
        peak = np.where(eps >= STORAGE_EPSILON, smaller(peak, lifts * hypot(given.peak, rounded, worst) + eps), peak)
    channel = larger(
        spreads.channel_noise, eps * terms.weight_rounding, summed, CHANNEL_CONDITION * hypot(local, given.channel)
    )
    return FloorTable(
        np.array(
            (
                *terms.rising(errors),
                terms.gain(given.gain, given.errors[0]) + np.where(sums_rows, summed_gain(given), 0.0),
                np.where(mixes & ~np.asarray(keeps_channels), np.inf, channel),
                np.where(sums_rows & (spreads.num_rows == 1), peak, element),  # like FloorTable.for_sums
                peak,
            )
        )
    )


def path_bound(modelled: Array, terms: SiteTerms, worst_rows: Array | float = 0.0) -> FloorTable:
    """Compute the bound along the path for sites whose upstream roundings add up to ``modelled``.

    ``worst_rows`` are larger errors upstream in single rows.
    """
    grown, few, narrow = PATH_CONDITION * modelled, terms.few, terms.narrow_path
    single = PATH_CONDITION * np.asarray(worst_rows)
    errors = terms.condition_widening * terms.widening * grown * narrow
    errors = np.where(terms.widening == QUANTILE_WIDENING[-1], larger(errors, single), errors)
    errors[0] = few * grown
    return FloorTable(
        np.array(
            (
                *terms.rising(errors),
                terms.gain(grown),
                larger(terms.spreads.channel_noise, terms.eps * terms.weight_rounding, grown),
                smaller(4.0 * few * grown, 2.0 * terms.limit),
                larger(LARGEST_OF_MILLION * CONDITION_WIDENING[-1] * QUANTILE_WIDENING[-1] * grown * narrow, single),
            )
        )
    )


def worst_limit(given: LargestErrors, condition: Array | float) -> Array:
    """Return the maximum error of a single row whose inputs already differ: the module's condition times their
    error."""
    limit: Array = condition * given.errors[-1]
    return limit


def summed_gain(given: LargestErrors) -> Array:
    """Return the common gain of a sum over rows that the gains of single rows explain.

    The gain of the sum is the mean of the row gains, weighted by the contribution of each row. It equals the gain of a
    single row that contributes nearly the whole sum.
    """
    return 3.0 * given.gain_sd


assert len(QUANTILE_WIDENING) == len(CONDITION_WIDENING) == len(QUANTILES)
