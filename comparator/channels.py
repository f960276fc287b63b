"""Channels: whether one channel is scaled, which the norm of a row dilutes by the root of its width.

The rounding of a channel averages out over rows, a scale does not. So a sample of rows is read once more, column by
column: bounded, whatever the tensor. Rows that hold non-finite values are left out.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tapscope.comparator.blocks import Block, Rows
from tapscope.comparator.joined_rows import overlaps
from tapscope.comparator.measure import Measured, Opened
from tapscope.kernels.native.channels import KINDS, channel_sums
from tapscope.kernels.native.overview import median

Array = np.ndarray[Any, Any]

MAX_ELEMENTS = 65536
"""Elements of either side that are read."""
MIN_ROWS = 6
"""Below this there is nothing to average over; counted as rows of equal size, sum(b^2)^2 / sum(b^4)."""
_MAX_ROWS = 256
_MAX_JOINS = 8
_SIGMA = 7.0
"""How many standard deviations of its own mean a channel may be off: among 10^5 channels the worst is 4.4."""
_QUARTILE = 20.0
"""How many times the lower quartile of all channels one may be off: 6 standard deviations of a normal distribution.
The quartile stays clean when up to three quarters of the channels are damaged (one head of four, of two)."""
_LASTING = 12.0
"""How many times the typical lasting error one channel's may be: those of weights are the same in every row, and where
rows are alike (a bias, a strong mean) they do not average out; over channels they are not normal."""


@dataclass(frozen=True, slots=True)
class Channel:
    """The channel that is furthest from a common scale, beside its noise."""

    index: int
    gain: float
    """sum(baseline * difference) / sum(baseline^2) over the sampled rows."""
    noise: float
    """What of the gain the scatter over rows and over channels explains."""


QUIET = Channel(0, 0.0, 0.0)
"""Nothing to say: too few rows, or one channel."""


def worst_channel(opened: Opened, measured: Measured) -> Channel:
    """The channel whose gain is largest beside its noise, of a pair with values on both sides."""
    last = len(measured.parts) - 1
    if last < 0:
        return QUIET
    parts = [measured.parts[i] for i in sorted({round(last * n / (_MAX_JOINS - 1)) for n in range(_MAX_JOINS)})]
    sides = [(opened.left[join.baseline], opened.right[join.target]) for join, _, _ in parts]
    widths = {sum(block.width for block in side) for pair in sides for side in pair}
    if len(widths) != 1 or widths == {1}:
        return QUIET
    sums, num_rows, (width,) = np.zeros((2, len(KINDS), *widths)), 0, widths
    odd = measured.rows.nonfinite_baseline + measured.rows.nonfinite_target > 0
    for (join, start, num), (left, right) in zip(parts, sides, strict=True):
        at = _sample(num, width, len(parts))
        at = at[~odd[start + at]]
        _add(sums, left, right, (_chosen(join.baseline_rows, at), _chosen(join.target_rows, at)), num_rows)
        num_rows += len(at)
    return find_channel(sums, num_rows)


def _sample(num: int, width: int, num_joins: int) -> Array:
    """Some of ``num`` rows, evenly apart."""
    if not num:
        return np.empty(0, np.int64)
    wanted = max(1, min(num, _MAX_ROWS // num_joins, MAX_ELEMENTS // max(width, 1) // num_joins))
    return np.unique(np.linspace(0, num - 1, wanted).astype(np.int64))


def _chosen(rows: Rows, at: Array) -> Array:
    return at + (rows.start or 0) if isinstance(rows, slice) else rows[at]


def _add(sums: Array, left: list[Block], right: list[Block], rows: tuple[Array, Array], first: int) -> None:
    """Add the sums of some rows, of which the first is the ``first`` of all."""
    for offset, one, two in overlaps(left, right):
        values, index = [], []
        for side, some in zip((one, two), rows, strict=True):
            values.append(side.rows(some) if side.values is None else side.values)
            index.append(None if side.values is None else some)
        sums[:, :, offset : offset + one.width] += channel_sums(*values, *index, first=first)


def find_channel(sums: Array, num_rows: int) -> Channel:
    """The channel whose gain is largest beside its noise, of :func:`~tapscope.kernels.native.channel_sums` over
    ``num_rows`` rows."""
    if num_rows < MIN_ROWS or sums.shape[2] < 2:
        return QUIET
    energy, fourth, product, squared, cubic = sums[0] + sums[1]
    size = np.maximum(energy, median(energy))  # beside the others a small channel's scale is nothing
    effective = np.divide(energy**2, fourth, out=np.zeros_like(energy), where=energy > 0)
    if not size.all():
        return QUIET
    gain = product / size
    # Errors are relative, so a row weighs by its square both in the gain and in the variance of the gain (White 1980):
    # the sum of b^2 (d - gain b)^2, multiplied out.
    scatter = np.sqrt(np.maximum(squared - 2.0 * gain * cubic + gain * gain * fourth, 0.0)) / size
    few = 1.0 + 4.0 / np.maximum(effective, 1.0)
    common = max(_QUARTILE * _quartile(np.abs(gain)), _LASTING * _lasting(sums))
    noise = np.maximum(_SIGMA * few * scatter, common)
    noise = np.where(effective < MIN_ROWS, np.inf, np.maximum(noise, np.finfo(np.float32).tiny))
    worst = int(np.argmax(np.abs(gain) / noise))
    return Channel(worst, float(gain[worst]), float(noise[worst])) if np.isfinite(noise[worst]) else QUIET


def _quartile(values: Array) -> float:
    """The lower quartile, between two values where it falls between them."""
    at, share = divmod(0.25 * (len(values) - 1), 1.0)
    places = int(at), min(int(at) + 1, len(values) - 1)
    low, high = np.partition(values, places)[list(places)].tolist()
    return float(low + share * (high - low))


def _lasting(sums: Array) -> float:
    """The typical gain of a channel that is the same in two halves of the rows, so that no averaging removes it."""
    halves = []
    for energy, _, product, _, _ in sums:
        size = np.maximum(energy, median(energy))
        halves.append(np.divide(product, size, out=np.zeros_like(size), where=size > 0))
    both, apart = (median(np.abs(halves[0] + sign * halves[1])) for sign in (1.0, -1.0))
    return 1.4826 * 0.5 * math.sqrt(max(both * both - apart * apart, 0.0))
