"""Small rows: how far off rows next to nothing are, which their errors beside the typical row do not tell.

A row's error is measured beside a share of the typical row at least
(:data:`~tapscope.kernels.native.aggregate.SMALL_ROW`). That is too little where a norm follows: it divides each row by
its own size, so that what comes out is off by as much as the row was of itself, and a row of which nothing but rounding
is left comes out as large as any. And it is too much where a function nobody saw makes rows that are small because what
they were made of cancels (a head of a linear attention whose query meets nothing in the state): their rounding is that
of the other rows.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from tapscope.comparator.metrics.error_distribution import QUANTILES, Quantiles
from tapscope.comparator.metrics.images import is_conv_class
from tapscope.kernels.native import RowMeasures
from tapscope.kernels.native.aggregate import median, quantiles
from tapscope.run_format.index import SiteInfo

Array = np.ndarray[Any, Any]

_NORM = re.compile(r"norm", re.IGNORECASE)
_MOST = 10.0
"""Error of a row beyond which it says nothing more."""
_STANDS_OUT = 3.0
"""How much further off than the typical row the worst is before it is asked why."""
NO_AMPLIFICATION = (1.0,) * len(QUANTILES)
"""By how much a norm enlarges errors that need no lift, at :data:`~.spread.QUANTILES`."""


def norm_modules_of(sites: Mapping[str, SiteInfo]) -> frozenset[str]:
    """Paths of the modules that divide each row by its size; a batch norm divides by what it learned, others of images
    by the size of many rows."""
    return frozenset(
        site.rpartition(":")[0]
        for site, info in sites.items()
        if info.cls and _NORM.search(info.cls) and not is_conv_class(info.cls)
    )


def is_norm_input(site: str, norms: Collection[str]) -> bool:
    """Whether the site is what a norm is given, going forward."""
    path, _, port = site.rpartition(":")
    return path in norms and port.startswith("in[") and not port.endswith(".grad")


def row_relative_errors_of(rows: RowMeasures) -> Quantiles:
    """Errors of rows, each relative to itself alone, at :data:`QUANTILES`; what is zero on one side is all off."""
    parts, wholes = np.sqrt(rows.sum_sq_diff), np.sqrt(rows.sum_sq_baseline)
    most: Array = np.where(parts > 0.0, _MOST, 0.0)
    return quantiles(np.minimum(np.divide(parts, wholes, out=most.copy(), where=wholes > 0.0), _MOST), QUANTILES)


def has_outlier_row(errors: Array) -> Array:
    """Whether the worst rows of sites are far off beside the typical one; ``errors`` are [quantiles, sites]."""
    found: Array = errors[-1] > _STANDS_OUT * errors[0]
    return found


def errors_above_typical(rows: RowMeasures, at_worst: Array, errors: Quantiles) -> tuple[Quantiles, float]:
    """The ``errors`` of rows at :data:`QUANTILES`, but that of the typical row relative to that one at least, and the
    largest element's beside the elements of that one at least."""
    parts, wholes = np.sqrt(rows.sum_sq_diff), np.sqrt(rows.sum_sq_baseline)
    typical = median(wholes)
    if not typical > 0.0:
        return (), 0.0
    found = quantiles(parts / np.maximum(wholes, typical), QUANTILES)
    sizes = np.maximum(wholes, typical) / np.sqrt(np.maximum(rows.width, 1))
    peak = float((rows.max_abs / np.maximum(np.abs(at_worst), sizes)).max())
    return (errors[0], *(max(errors[0], error) for error in found[1:])), peak
