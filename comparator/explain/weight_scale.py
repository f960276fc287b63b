"""Weight scale: the weight of a linear layer or norm is scaled, zero or negated, while its bias is unchanged."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from tapscope.comparator.explain.error_region import ErrorRegion
from tapscope.comparator.explain.hypothesis_test import Hypothesis
from tapscope.comparator.explain.input_columns import is_linear
from tapscope.comparator.explain.norms import is_norm
from tapscope.comparator.explain.scale import number

Array = np.ndarray[Any, Any]

MIN_ROWS = 8
NEUTRAL_TOLERANCE = 0.02
"""Tolerance of a factor: near 1, the bias is wrong; near 0, only the bias remains."""


def scaled_weights(region: ErrorRegion) -> Iterator[Hypothesis]:
    """Yield ``target = factor × (baseline - bias) + bias``, fitted on half of the rows and applied to the others."""
    if len(region.rows) < MIN_ROWS or not (is_linear(region.sample.site) or is_norm(region.sample.site)):
        return
    before, after = region.before, region.after
    if not np.isfinite(before).all() or not np.isfinite(after).all():
        return
    weight = np.broadcast_to(region.weight, before.shape)
    factor, _ = _fit(before, after, weight)
    if abs(factor - 1.0) < NEUTRAL_TOLERANCE:
        return
    values = np.empty_like(before)
    for mine, other in ((0, 1), (1, 0)):
        fitted = slice(other, None, 2)
        times, plus = _fit(before[fitted], after[fitted], weight[fitted])
        values[mine::2] = times * before[mine::2] + plus
    if abs(factor) < NEUTRAL_TOLERANCE:
        text = "target is the same in every row: the weight counts as zero, the bias alone is left"
    else:
        scaled = "−baseline" if abs(factor + 1.0) < NEUTRAL_TOLERANCE else f"{number(factor, region.noise)} × baseline"
        text = f"target = {scaled} + a number for each channel: the weight is {scaled}'s, the bias is not"
    yield Hypothesis("weight scale", text, values, 2)


def scaled_channels(region: ErrorRegion) -> Iterator[Hypothesis]:
    """Yield ``target = factor × (baseline - bias) + bias`` of a norm, with a separate factor per channel."""
    before, after = region.before, region.after
    if len(region.rows) < 2 * MIN_ROWS or not region.is_everywhere_in_rows or not is_norm(region.sample.site):
        return
    if not np.isfinite(before).all() or not np.isfinite(after).all():
        return
    values = np.empty_like(before)
    for mine, other in ((0, 1), (1, 0)):
        fitted = slice(other, None, 2)
        x, y = before[fitted], after[fitted]
        one, two = x.mean(axis=0), y.mean(axis=0)
        energy = ((x - one) ** 2).sum(axis=0)
        times = np.divide(((x - one) * (y - two)).sum(axis=0), energy, out=np.ones_like(energy), where=energy > 0)
        values[mine::2] = times * before[mine::2] + two - times * one
    text = "target = baseline × a separate factor per channel + a number: the weight differs, the bias does not"
    yield Hypothesis("norm channels", text, values, 3)


def _fit(before: Array, after: Array, weight: Array) -> tuple[float, Array]:
    """Return (common factor, offset per column) fitted by least squares."""
    square = weight**2
    total = square.sum(axis=0)
    one, two = ((square * side).sum(axis=0) / total for side in (before, after))
    x, y = (before - one) * weight, (after - two) * weight
    energy = float((x * x).sum())
    factor = float((x * y).sum()) / energy if energy > 0.0 else 1.0
    return factor, two - factor * one
