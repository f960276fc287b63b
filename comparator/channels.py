"""Channels: whether one channel is scaled, which the norm of a row dilutes by the root of its width.

The rounding of a channel averages out over rows, a scale does not. So a sample of rows is read once more, column by
column: bounded, whatever the tensor.
"""

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from tapscope.comparator.align import Join
from tapscope.comparator.blocks import Rows, blocks
from tapscope.comparator.prepare import Prepared

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


def worst_channel(ready: Prepared) -> Channel:
    """The channel whose gain is largest beside its noise, of a pair with values on both sides."""
    joins = [join for join in ready.plan.joins if not ready.equal_by_hash(join)]
    joins = [joins[i] for i in sorted({round(x) for x in np.linspace(0, len(joins) - 1, _MAX_JOINS)})] if joins else []
    pairs = [_sample(ready, join, len(joins)) for join in joins]
    widths = {side.shape[1] for pair in pairs for side in pair}
    if len(widths) != 1 or sum(len(one) for one, _ in pairs) < MIN_ROWS or widths == {1}:
        return QUIET
    return find_channel(*(np.concatenate(side) for side in zip(*pairs, strict=True)))


def find_channel(baseline: Array, target: Array) -> Channel:
    """The channel of two [rows, channels] float64 arrays whose gain is largest beside its noise."""
    sound = np.isfinite(baseline).all(1) & np.isfinite(target).all(1)
    baseline, target = baseline[sound], target[sound]
    rows = len(baseline)
    if rows < MIN_ROWS or baseline.shape[1] < 2:
        return QUIET
    diff, square = target - baseline, baseline * baseline
    energy = square.sum(0)
    size = np.maximum(energy, np.median(energy))  # beside the others a small channel's scale is nothing
    effective = np.divide(energy**2, (square * square).sum(0), out=np.zeros_like(energy), where=energy > 0)
    if not size.all():
        return QUIET
    gain = (baseline * diff).sum(0) / size
    # Errors are relative, so a row weighs by its square both in the gain and in the variance of the gain (White 1980).
    scatter = np.sqrt((square * (diff - gain * baseline) ** 2).sum(0)) / size
    few = 1.0 + 4.0 / np.maximum(effective, 1.0)
    common = max(_QUARTILE * float(np.quantile(np.abs(gain), 0.25)), _LASTING * _lasting(square, baseline * diff))
    noise = np.maximum(_SIGMA * few * scatter, common)
    noise = np.where(effective < MIN_ROWS, np.inf, np.maximum(noise, np.finfo(np.float32).tiny))
    worst = int(np.argmax(np.abs(gain) / noise))
    return Channel(worst, float(gain[worst]), float(noise[worst])) if np.isfinite(noise[worst]) else QUIET


def _lasting(square: Array, products: Array) -> float:
    """The typical gain of a channel that is the same in two halves of the rows, so that no averaging removes it."""
    halves = []
    for half in (slice(0, None, 2), slice(1, None, 2)):
        energy = square[half].sum(0)
        size = np.maximum(energy, np.median(energy))
        halves.append(np.divide(products[half].sum(0), size, out=np.zeros_like(size), where=size > 0))
    both, apart = (float(np.median(np.abs(halves[0] + sign * halves[1]))) for sign in (1.0, -1.0))
    return 1.4826 * 0.5 * math.sqrt(max(both * both - apart * apart, 0.0))


def _sample(ready: Prepared, join: Join, num_joins: int) -> tuple[Array, Array]:
    """Some rows of a join on both sides, [rows, width] float64, evenly apart."""
    one, two = ready.left[join.baseline], ready.right[join.target]
    assert one.piece is not None
    assert two.piece is not None
    sides = blocks(one.piece, one.run, ready.layouts[0].axes), blocks(two.piece, two.run, ready.layouts[1].axes)
    width = sum(block.width for block in sides[0])
    rows = min(_num_rows(rows, side[0].num_rows) for rows, side in zip(_rows(join), sides, strict=True))
    wanted = max(1, min(rows, _MAX_ROWS // num_joins, MAX_ELEMENTS // max(width, 1) // num_joins))
    at = np.unique(np.linspace(0, rows - 1, wanted).astype(np.int64)) if rows else np.empty(0, np.int64)
    found = []
    for side, some in zip(sides, _rows(join), strict=True):
        index = at + (some.start or 0) if isinstance(some, slice) else some[at]
        found.append(np.concatenate([block.rows(index) for block in side], axis=1).astype(np.float64))
    return found[0], found[1]


def _rows(join: Join) -> tuple[Rows, Rows]:
    return join.baseline_rows, join.target_rows


def _num_rows(rows: Rows, num: int) -> int:
    return len(range(*rows.indices(num))) if isinstance(rows, slice) else len(rows)
