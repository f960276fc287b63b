"""Near-zero rows: their errors relative to themselves, which errors relative to the typical row do not show.

A row's error is measured relative to at least a share of the typical row
(:data:`~tapscope.kernels.native.aggregate.SMALL_ROW`). That is too lenient before a norm: it divides each row by its
own norm, so that its output has the row's error relative to itself, and a row of pure rounding comes out as large as
any. It is too strict for an untapped function whose rows are small because their terms cancel (a head of a linear
attention whose query matches nothing in the state): their rounding is that of the other rows.
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
"""Largest error of a row that is meaningful."""
_STANDS_OUT = 3.0
"""Error of the worst row relative to the typical one from which it is an outlier."""
NO_AMPLIFICATION = (1.0,) * len(QUANTILES)
"""Amplification by a norm, at :data:`~.error_distribution.QUANTILES`, of errors that need none."""


def norm_modules_of(sites: Mapping[str, SiteInfo]) -> frozenset[str]:
    """Paths of the modules that normalise each row; a batch norm uses learned statistics, and other norms of images
    those of many rows."""
    return frozenset(module_of(site) for site, info in sites.items() if normalises_rows(info.cls))


def normalises_rows(cls: str) -> bool:
    """Whether modules of this class divide each row by its own size."""
    return _NORM.search(cls) is not None and not is_conv_class(cls)


def is_norm_input(site: str, norms: Collection[str]) -> bool:
    """Whether the site is the input of a norm, in the forward pass."""
    path, _, port = site.rpartition(":")
    return path in norms and port.startswith("in[") and not port.endswith(".grad")


def row_relative_errors_of(rows: RowMeasures) -> Quantiles:
    """Errors of rows, each relative to itself, at :data:`QUANTILES`; 1 for a row that is zero on one side only."""
    parts, wholes = np.sqrt(rows.sum_sq_diff), np.sqrt(rows.sum_sq_baseline)
    most: Array = np.where(parts > 0.0, _MAX_ROW_ERROR, 0.0)
    return quantiles(
        np.minimum(np.divide(parts, wholes, out=most.copy(), where=wholes > 0.0), _MAX_ROW_ERROR), QUANTILES
    )


def has_outlier_row(errors: Array) -> Array:
    """Whether the worst row of each site is far off relative to the typical one; ``errors`` are [quantiles, sites]."""
    is_outlier: Array = errors[-1] > _STANDS_OUT * errors[0]
    return is_outlier


def errors_above_typical(rows: RowMeasures, at_worst: Array, errors: Quantiles) -> tuple[Quantiles, float]:
    """The ``errors`` of rows at :data:`QUANTILES` relative to at least the typical row's norm, and the largest
    element's error relative to at least the typical row's elements."""
    parts, wholes = np.sqrt(rows.sum_sq_diff), np.sqrt(rows.sum_sq_baseline)
    typical = median(wholes)
    if not typical > 0.0:
        return (), 0.0
    errors_of_large = quantiles(parts / np.maximum(wholes, typical), QUANTILES)
    sizes = np.maximum(wholes, typical) / np.sqrt(np.maximum(rows.width, 1))
    peak = float((rows.max_abs / np.maximum(np.abs(at_worst), sizes)).max())
    return (errors[0], *(max(errors[0], error) for error in errors_of_large[1:])), peak
