"""Softmax condition: how an error of scores propagates to the weights computed by a softmax.

For p = softmax(z), dp_j = p_j (dz_j - Σ p dz): a relative error of weights is an absolute error of scores. Attention
scores are products of queries and keys, each with its own error: their error is √2 times that error, relative to their
scatter over the keys. Scores are not recorded, but equal the logarithms of the weights up to a constant per row. With a
wide scatter, most rows put all weight on one key and are insensitive to errors, while rows undecided between two keys
have many times the typical error.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from tapscope.comparator.assembly.blocks import Block
from tapscope.comparator.metrics.channels import sample
from tapscope.comparator.metrics.error_distribution import QUANTILES, Quantiles
from tapscope.comparator.metrics.lazy_pair import LazyPair
from tapscope.comparator.metrics.measure import MeasuredPair
from tapscope.comparator.metrics.near_zero_rows import NO_AMPLIFICATION
from tapscope.kernels.native.aggregate import quantiles

Array = np.ndarray[Any, Any]

_PRODUCT = math.sqrt(2.0)
"""Condition of a product of two operands with equal errors."""
_FULL = 1.02
"""Upper bound of the sum of a row's weights, including 16-bit rounding."""


def softmax_condition_of(opened: LazyPair, measured: MeasuredPair) -> Quantiles:
    """Return the condition of attention weights at :data:`~.error_distribution.QUANTILES` over a sample of the
    baseline's rows.

    Weights are ``[batch, heads, queries, keys]``; the sharpest head of each row counts. Empty for values other than
    weights with sum 1.
    """
    some = []
    for part in measured.parts:
        side, rows = opened.left[part.join.baseline], part.join.baseline_rows
        num = len(range(*rows.indices(side[0].num_rows))) if isinstance(rows, slice) else len(rows)
        at = sample(num, sum(block.width for block in side), len(measured.parts))
        some.append((side, at + (rows.start or 0) if isinstance(rows, slice) else rows[at]))
    return _condition(some)


def softmax_condition_alone(firings: Sequence[list[Block]]) -> Quantiles:
    """Return the softmax condition of weights that only one run recorded, over a sample of their rows."""
    widths = [sum(block.width for block in side) for side in firings]
    return _condition([(s, sample(s[0].num_rows, w, len(firings))) for s, w in zip(firings, widths, strict=True)])


def _condition(some: Sequence[tuple[list[Block], Array]]) -> Quantiles:
    scatters = [np.empty(0)]
    for side, at in some:
        each = [_scatter(block, at) for block in side]
        if any(one is None for one in each):
            return ()
        scatters.append(np.max([one for one in each if one is not None], axis=0))
    scatter = np.concatenate(scatters)
    return tuple(_PRODUCT * one for one in quantiles(scatter, QUANTILES)) if len(scatter) else ()


def _scatter(block: Block, at: Array) -> Array | None:
    """Return the standard deviation of the scores of the sharpest head, [rows]; None for values other than attention
    weights."""
    weights = block.rows(at).astype(np.float64).reshape(len(at), -1, block.piece.shape[-1])
    if not (weights >= 0.0).all() or (weights.sum(2) > _FULL).any():
        return None
    scores = np.log(weights, out=np.zeros_like(weights), where=weights > 0.0)
    count = np.maximum((weights > 0.0).sum(2), 1)
    mean = scores.sum(2) / count
    squares = np.where(weights > 0.0, (scores - mean[:, :, None]) ** 2, 0.0).sum(2)
    scatter: Array = np.sqrt(squares / count).max(1, initial=0.0)
    return scatter


def excess_condition(condition: float, sharp: Quantiles) -> Quantiles:
    """Return the factor by which the errors of attention weights may exceed a given condition."""
    if not sharp:
        return NO_AMPLIFICATION
    excess = tuple(max(1.0, one / condition) for one in sharp)
    return excess if max(excess) > 1.0 else NO_AMPLIFICATION
