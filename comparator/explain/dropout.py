"""Dropout: attention weights that are randomly set to zero (Srivastava et al. 2014)."""

from typing import Any

import numpy as np

from tapscope.comparator.alignment.prepare import PairPreparer
from tapscope.comparator.assembly.read import read
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.verdict.explanation import Explanation
from tapscope.core.errors import DataError

Array = np.ndarray[Any, Any]

MAX_VALUES = 1 << 22
_MIN_DROPPED = 16
_RATE_RANGE = 0.02, 0.95
_MAX_SCALE_DEVIATION = 0.1
"""Maximum relative deviation of the remaining weights from 1 / (1 - rate)."""


def explain_dropout(preparer: PairPreparer, weights: PairResult | None) -> Explanation | None:
    """Return a dropout explanation from the first step whose attention weights are zero in the target only; None
    otherwise."""
    if weights is None or weights.problem or not weights.is_matched:
        return None
    ready = preparer.prepare(weights.pair)
    for one, two in zip(ready.left, ready.right, strict=False):
        if one.piece is None or two.piece is None or one.shape != two.shape or np.prod(one.shape) > MAX_VALUES:
            return None
        try:
            before, after = (np.asarray(read(w.piece, w.run)).astype(np.float64) for w in (one, two) if w.piece)
        except DataError:
            return None
        if sentence := dropout_rate(before, after):
            return Explanation("dropout", f"dropout is left on in target: {sentence}", 0.0, num_rows=len(before))
    return None


def dropout_rate(before: Array, after: Array) -> str:
    """Return a sentence with the fraction of weights that are zero in the target only; otherwise empty.

    The remaining weights must be 1 / (1 - rate) times larger.
    """
    seen = np.isfinite(before) & np.isfinite(after) & (before > 1e-6)
    lost = seen & (after == 0)
    if lost.sum() < _MIN_DROPPED or not _RATE_RANGE[0] < lost.sum() / seen.sum() < _RATE_RANGE[1]:
        return ""
    rate = float(lost.sum() / seen.sum())
    factor = float(np.median(after[seen & ~lost] / before[seen & ~lost]))
    if abs(factor * (1.0 - rate) - 1.0) > _MAX_SCALE_DEVIATION or factor < 1.0 + 0.5 * rate:
        return ""
    return f"{rate:.1%} of its attention weights are zero and the others {factor:.3g} × baseline's"
