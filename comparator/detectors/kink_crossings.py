"""Kink crossings: elements of a gradient that one run's ReLU propagates and the other's does not.

The derivative of ReLU is 0 or 1. A value that is within its own error of 0 may be on either side. Its gradient is then
complete in one run and zero in the other: an error as large as the element, however small the error of the value. Such
elements are zero in exactly one run. This detector counts them and measures the error that they cause in each row.
:class:`~..noise_floor.derivative_error.DerivativeJump` decides whether the errors of the values explain their number.
"""

from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import structs

from tapscope.comparator.alignment.prepare import PairPreparer
from tapscope.comparator.detectors.detector import Detector, Evidence, Stage
from tapscope.comparator.metrics import chunks
from tapscope.comparator.metrics.error_distribution import QUANTILES
from tapscope.comparator.noise_floor.constants import RELU_ZERO_SHARE
from tapscope.comparator.noise_floor.derivative_error import KinkCrossings
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.runs.series import zero_fraction
from tapscope.core.errors import DataError
from tapscope.kernels.native.aggregate import SMALL_ROW

_MIN_OUTLIER_RATIO = 4.0
"""Minimum ratio of the worst row's error to the median row's error for a gradient to be read again."""
_MAX_ELEMENTS = 1 << 26
"""Maximum number of elements read over all sites."""


class FindKinkCrossings(Detector):
    """Finds elements of gradients that are zero in exactly one run, possibly because of a ReLU."""

    name = "kink_crossings"
    stage = Stage.EXPECT

    def detect(self, evidence: Evidence) -> Evidence:
        """Run this detector; see :meth:`.Detector.detect`."""
        return structs.replace(evidence, kink_crossings=kink_crossings(evidence.judged, evidence.preparer))


def kink_crossings(results: Sequence[PairResult], preparer: PairPreparer) -> Mapping[str, KinkCrossings]:
    """Return site -> elements that are zero in exactly one run, for gradients with many zeros in both runs."""
    by_site: dict[str, KinkCrossings] = {}
    left = _MAX_ELEMENTS
    for one in filter(_may_cross, results):
        if left <= 0:
            break
        try:
            crossings = _measure(one, preparer)
        except DataError:
            continue
        if crossings is not None:
            by_site[one.site] = crossings
            left -= crossings.num_elements
    return by_site


def _may_cross(result: PairResult) -> bool:
    if not result.site.endswith(".grad") or result.basis != "values" or result.distribution is None or result.problem:
        return False
    sides = result.pair.baseline, result.pair.target
    errors = result.distribution.errors
    return errors[-1] > _MIN_OUTLIER_RATIO * errors[0] and all(
        s is not None and zero_fraction(s) > RELU_ZERO_SHARE for s in sides
    )


def _measure(result: PairResult, preparer: PairPreparer) -> KinkCrossings | None:
    """Measure the crossings in the rows that differ; None if no element is zero in exactly one run."""
    count = num_elements = 0
    crossed, sizes = [], []
    for chunk in chunks.rows(preparer.prepare(result.pair)):
        if chunk.baseline.shape != chunk.target.shape:
            return None
        baseline, target = chunk.baseline.astype(np.float64), chunk.target.astype(np.float64)
        in_one = (baseline == 0.0) != (target == 0.0)
        count += int(in_one.sum())
        num_elements += in_one.size
        crossed.append(np.square(np.where(in_one, target - baseline, 0.0)).sum(1))
        sizes.append(np.square(baseline).sum(1))
    if not count:
        return None
    squares, size = np.concatenate(crossed), np.concatenate(sizes)
    typical = float(np.median(size[size > 0.0])) if (size > 0.0).any() else 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        errors = np.sqrt(squares / np.maximum(size, SMALL_ROW**2 * typical))
    quantiles = np.quantile(errors, QUANTILES)
    total = float(size.sum())
    mean = float(np.sqrt(squares.sum() / total)) if total > 0.0 else np.inf
    return KinkCrossings(count, num_elements, tuple(quantiles.tolist()), mean)
