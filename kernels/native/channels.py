"""Per-channel sums over rows of two matrices of any dtypes, and detection of a channel with its own scale."""

import math
import struct
from typing import Any

import numpy as np
from msgspec import Struct

from tapscope.kernels.native import library
from tapscope.kernels.native.aggregate import median
from tapscope.kernels.native.row_blocks import Strip, checked, native_sides

Array = np.ndarray[Any, Any]

KINDS = ("energy", "fourth", "product", "squared", "cubic")
"""With b the baseline values and d the differences: sums of b^2, b^4, b d, (b d)^2 and b^3 d."""
MIN_ROWS = 6
"""Below this number of rows, no averaging is possible."""
_MIN_EFFECTIVE_ROWS = 3.0
"""Minimum effective number of rows that determine a channel, counted as rows of equal size, sum(b^2)^2 / sum(b^4). For
normally distributed values that is a third of the rows."""
_MAX_DEVIATE = 4.9
"""Limit in standard deviations of a normal distribution; 1 of 10^6 channels exceeds it by chance. For few rows, whose
scatter may be small by chance, the limit is wider."""
_MIN_DEVIATIONS = 7.0
"""Lower bound of the limit, in standard deviations of the channel's own mean, for any number of rows."""
_MIN_QUARTILE_RATIO = 20.0
"""Limit as a multiple of the lower quartile of all channels: 6 standard deviations of a normal distribution. The
quartile stays clean even if up to three quarters of the channels are damaged (one head of four, of two)."""
_MIN_LASTING_RATIO = 12.0
"""Limit as a multiple of the typical persistent error of a channel. Errors of weights are the same in every row; where
rows are alike (a bias, a strong mean) they do not average out, and over channels they are not normally distributed."""
_LAYOUT = struct.Struct("=q2d")


class Channel(Struct, frozen=True):
    """The channel that deviates most from a common scale, relative to its noise."""

    index: int
    gain: float
    """sum(baseline * difference) / sum(baseline^2) over the sampled rows."""
    noise: float
    """The gain that scatter over rows and over channels explains."""


NO_CHANNEL = Channel(0, 0.0, 0.0)
"""Result when no channel can be tested: too few rows, or a single channel."""


def channel_sums(
    baseline: Array,
    target: Array,
    baseline_rows: Array | None = None,
    target_rows: Array | None = None,
    *,
    first: int = 0,
) -> Array:
    """Return the sums of :data:`KINDS` over even and odd rows, counted from ``first``: [2, 5, width] float64.

    Row i of ``baseline`` is compared with row i of ``target``, or ``baseline_rows[i]`` with ``target_rows[i]``.
    Arguments and errors are those of :func:`.compare_rows`.
    """
    strip = checked(baseline, target, baseline_rows, target_rows)._replace(row=first)
    sums = np.zeros((2, len(KINDS), strip.baseline.shape[1]))
    add_channel_sums(strip, sums)
    return sums


def add_channel_sums(strip: Strip, sums: Array) -> None:
    """Add the sums of a strip to ``sums``, [2, 5, columns] float64 over all compared columns.

    Values are widened to float64; a non-finite value makes the sums of its channel non-finite. Raises ValueError and
    IndexError for invalid strips.
    """
    functions = library.functions()
    if functions is None:
        one, two, left, right, first, column = strip
        rows = one if left is None else one[left], two if right is None else two[right]
        _add_reference(*rows, first, sums[:, :, column : column + one.shape[1]])
    else:
        functions.channel_sums(*native_sides(strip), strip.row, strip.column, sums)


def find_channel(sums: Array, num_rows: int) -> Channel:
    """Return the channel whose gain is largest relative to its noise, from sums over ``num_rows`` rows."""
    if num_rows < MIN_ROWS or sums.shape[2] < 2:
        return NO_CHANNEL
    functions = library.functions()
    if functions is None:
        return find_channel_reference(sums)
    packed = functions.find_channel(sums)
    return find_channel_reference(sums) if packed is None else _channel(*_LAYOUT.unpack(packed))


def _channel(index: int, gain: float, noise: float) -> Channel:
    return Channel(index, gain, noise) if math.isfinite(noise) else NO_CHANNEL


# ---- numpy reference, also the fallback without a library or for non-finite sums
@np.errstate(over="ignore", under="ignore", invalid="ignore")
def _add_reference(baseline: Array, target: Array, first: int, sums: Array) -> None:
    """Add the sums of two matrices in numpy, with about ten float64 temporaries of their size."""
    b = baseline.astype(np.float64)
    square, change = b * b, b * (target.astype(np.float64) - b)
    for kind, terms in enumerate((square, square * square, change, change * change, square * change)):
        for half in range(2):
            sums[half, kind] += terms[(half + first) % 2 :: 2].sum(axis=0)


def find_channel_reference(sums: Array) -> Channel:
    """Compute :func:`find_channel` in numpy, without the check for :data:`MIN_ROWS`."""
    energy, fourth, product, squared, cubic = sums[0] + sums[1]
    size = np.maximum(energy, median(energy))  # a small channel is measured against the median
    effective = np.divide(energy**2, fourth, out=np.zeros_like(energy), where=energy > 0)
    if not size.all():
        return NO_CHANNEL
    gain, fit = product / size, np.divide(product, energy, out=np.zeros_like(energy), where=energy > 0)
    # Errors are relative, so a row is weighted by its square both in the gain and in the variance of the gain (White
    # 1980): the sum of b^2 (d - fit b)^2, multiplied out.
    scatter = np.sqrt(np.maximum(squared - 2.0 * fit * cubic + fit * fit * fourth, 0.0)) / size
    common = max(_MIN_QUARTILE_RATIO * _quartile(np.abs(gain)), _MIN_LASTING_RATIO * _lasting(sums))
    noise = np.maximum([_width(rows) for rows in effective.tolist()] * scatter, common)
    noise = np.where(effective < _MIN_EFFECTIVE_ROWS, np.inf, np.maximum(noise, np.finfo(np.float32).tiny))
    worst = int(np.argmax(np.abs(gain) / noise))
    return _channel(worst, float(gain[worst]), float(noise[worst]))


def _width(rows: float) -> float:
    """Return the limit for a gain, as a multiple of its scatter over ``rows`` rows of equal size.

    For few rows this is Student's quantile (D. Wallace, *Bounds on normal approximations to Student's and the
    chi-square distributions*, 1959, inverted). It is divided by the share of the scatter that remains after the gain is
    fitted to the largest row (HC3: J. MacKinnon and H. White, 1985), whose weight is at most 1 / sqrt(rows).
    """
    free = max(rows, _MIN_EFFECTIVE_ROWS) - 1.0
    deviate = _MAX_DEVIATE * (8.0 * free + 3.0) / (8.0 * free + 1.0)
    student = math.sqrt(free * math.expm1(deviate**2 / free)) / (1.0 - 1.0 / math.sqrt(free + 1.0))
    return max(_MIN_DEVIATIONS, student)


def _quartile(values: Array) -> float:
    """Return the lower quartile, interpolated linearly."""
    at, share = divmod(0.25 * (len(values) - 1), 1.0)
    places = int(at), min(int(at) + 1, len(values) - 1)
    low, high = np.partition(values, places)[list(places)].tolist()
    return float(low + share * (high - low))


def _lasting(sums: Array) -> float:
    """Return the typical persistent gain of a channel: the part that agrees in both halves of the rows.

    Averaging over more rows does not remove this part.
    """
    halves = []
    for energy, _, product, _, _ in sums:
        size = np.maximum(energy, median(energy))
        halves.append(np.divide(product, size, out=np.zeros_like(size), where=size > 0))
    both, apart = (median(np.abs(halves[0] + sign * halves[1])) for sign in (1.0, -1.0))
    return 1.4826 * 0.5 * math.sqrt(max(both * both - apart * apart, 0.0))
