"""Near-zero rows: errors relative to the row itself, which errors relative to the typical row do not show.

The error of a row is measured relative to at least a fraction of the typical row
(:data:`~tapscope.kernels.native.aggregate.SMALL_ROW`). That is too lenient for the input of a norm: the norm divides
each row by its own size, so its output has the row's error relative to the row itself, and a row of pure rounding
becomes as large as any other. It is too strict for an untapped function whose rows are small because their terms
cancel, such as a head of linear attention whose query matches no key in the state: these rows have the rounding of the
other rows.
"""

import re
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from tapscope.comparator.metrics.error_distribution import QUANTILES, Quantiles
from tapscope.comparator.metrics.images import is_conv_class
from tapscope.core.site import module_of
from tapscope.kernels.native import RowMeasures
from tapscope.kernels.native.aggregate import median, quantiles
from tapscope.run_format.index import SiteInfo

Array = np.ndarray[Any, Any]

_NORM = re.compile(r"norm", re.IGNORECASE)
_MAX_ROW_ERROR = 10.0
"""Maximum meaningful error of a row."""
_STANDS_OUT = 3.0
"""Ratio of the worst row's error to the typical row's error above which the worst row is an outlier."""
NO_AMPLIFICATION = (1.0,) * len(QUANTILES)
"""Amplification by a norm, at :data:`~.error_distribution.QUANTILES`, if there is none."""


def norm_modules_of(sites: Mapping[str, SiteInfo]) -> frozenset[str]:
    """Return the paths of the modules that normalize each row.

    A batch norm uses learned statistics, and other norms of images use those of many rows.
    """
    return frozenset(module_of(site) for site, info in sites.items() if normalises_rows(info.cls))


def normalises_rows(cls: str) -> bool:
    """Return whether modules of this class divide each row by its own size."""
    return _NORM.search(cls) is not None and not is_conv_class(cls)


def is_norm_input(site: str, norms: Collection[str]) -> bool:
    """Return whether the site is the input of a norm in the forward pass."""
    path, _, port = site.rpartition(":")
    return path in norms and port.startswith("in[") and not port.endswith(".grad")


def row_relative_errors_of(rows: RowMeasures) -> Quantiles:
    """Return the errors of rows, each relative to the row itself, at :data:`QUANTILES`; 1 for a row that is zero in the
    target only, and :data:`_MAX_ROW_ERROR` for one that is zero in the baseline only."""
    parts, wholes = np.sqrt(rows.sum_sq_diff), np.sqrt(rows.sum_sq_baseline)
    most: Array = np.where(parts > 0.0, _MAX_ROW_ERROR, 0.0)
    return quantiles(
        np.minimum(np.divide(parts, wholes, out=most.copy(), where=wholes > 0.0), _MAX_ROW_ERROR), QUANTILES
    )


def has_outlier_row(errors: Array) -> Array:
    """Return whether the worst row of each site is an outlier relative to the typical one; ``errors`` are [quantiles,
    sites]."""
    is_outlier: Array = errors[-1] > _STANDS_OUT * errors[0]
    return is_outlier


def errors_above_typical(rows: RowMeasures, at_worst: Array, errors: Quantiles) -> tuple[Quantiles, float]:
    """Return the row errors at :data:`QUANTILES` relative to at least the typical row, and the largest element's error.

    ``errors`` are the errors of the rows at the quantiles. The element's error is relative to at least the typical
    row's elements.
    """
    parts, wholes = np.sqrt(rows.sum_sq_diff), np.sqrt(rows.sum_sq_baseline)
    typical = median(wholes)
    if not typical > 0.0:
        return (), 0.0
    errors_of_large = quantiles(parts / np.maximum(wholes, typical), QUANTILES)
    sizes = np.maximum(wholes, typical) / np.sqrt(np.maximum(rows.width, 1))
    peak = float((rows.max_abs / np.maximum(np.abs(at_worst), sizes)).max())
    return (errors[0], *(max(errors[0], error) for error in errors_of_large[1:])), peak
