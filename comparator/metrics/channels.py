"""Channels: detect a scaled channel, an error that the norm of a row dilutes by the square root of its width.

The rounding of a channel averages out over rows, a scale does not. Therefore, a sample of rows, of bounded size, is
read again column by column. Rows with nonfinite values are skipped.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from tapscope.comparator.assembly.blocks import Rows
from tapscope.comparator.metrics.joined_rows import ReadJoin, overlaps
from tapscope.comparator.metrics.lazy_pair import LazyPair
from tapscope.comparator.metrics.measure import MeasuredPair
from tapscope.kernels.native import Strip
from tapscope.kernels.native.channels import KINDS, NO_CHANNEL, Channel, add_channel_sums, find_channel

Array = np.ndarray[Any, Any]

MAX_ELEMENTS = 65536
"""Maximum number of elements read per side, unless :data:`_FEW_ROWS` rows have more."""
_FEW_ROWS = 32
"""Number of rows read of wide tensors, which would otherwise have too few rows to average over."""
_MAX_COLUMNS = 1 << 20
"""Number of columns above which they are elements of a flat tensor rather than channels, and too many to sum."""
_MAX_ROWS = 256
_MAX_JOINS = 8


def worst_channel(opened: LazyPair, measured: MeasuredPair) -> Channel:
    """Return the channel with the largest ratio of gain to noise, for a pair with values on both sides."""
    last = len(measured.parts) - 1
    if last < 0:
        return NO_CHANNEL
    parts = [measured.parts[i] for i in sorted({round(last * n / (_MAX_JOINS - 1)) for n in range(_MAX_JOINS)})]
    width = measured.width if measured.stored is not None else _width(opened, parts)
    if not 1 < width <= _MAX_COLUMNS:
        return NO_CHANNEL
    rows = [sample(part.num_rows, width, len(parts)) for part in parts]
    is_nonfinite = measured.rows.nonfinite_baseline + measured.rows.nonfinite_target > 0
    rows = [at[~is_nonfinite[part.first + at]] for part, at in zip(parts, rows, strict=True)]
    if measured.stored is None:
        strips = _strips(opened, parts, rows)
    else:
        stored, first = measured.stored
        strips = stored.in_order(
            np.concatenate([first + part.first + at for part, at in zip(parts, rows, strict=True)])
        )
    sums = np.zeros((2, len(KINDS), width))
    for strip in strips:
        add_channel_sums(strip, sums)
    return find_channel(sums, sum(map(len, rows)))


def _width(opened: LazyPair, parts: Sequence[ReadJoin]) -> int:
    """Return the number of columns of the joined rows; 0 if they have different widths."""
    sides = (side for part in parts for side in (opened.left[part.join.baseline], opened.right[part.join.target]))
    widths = {sum(block.width for block in side) for side in sides}
    return widths.pop() if len(widths) == 1 else 0


def _strips(opened: LazyPair, parts: Sequence[ReadJoin], rows: Sequence[Array]) -> Iterator[Strip]:
    """Yield the selected rows of each join."""
    first = 0
    for part, at in zip(parts, rows, strict=True):
        join = part.join
        picked = _chosen(join.baseline_rows, at), _chosen(join.target_rows, at)
        for column, one, two in overlaps(opened.left[join.baseline], opened.right[join.target]):
            (a, i), (b, j) = (
                (side.rows(some), None) if side.values is None else (side.values, some)
                for side, some in zip((one, two), picked, strict=True)
            )
            yield Strip(a, b, i, j, row=first, column=column)
        first += len(at)


@lru_cache(maxsize=256)
def sample(num: int, width: int, num_joins: int) -> Array:
    """Return the indices of evenly spaced rows out of ``num``.

    All joins together have at most :data:`MAX_ELEMENTS` elements or :data:`_FEW_ROWS` rows, whichever is more. The
    limit for the widest tensors is the number of elements that one row may have.
    """
    if not num:
        return _read_only(np.empty(0, np.int64))
    most = max(MAX_ELEMENTS // max(width, 1), min(_FEW_ROWS, _MAX_COLUMNS // max(width, 1)))
    wanted = max(1, min(num, _MAX_ROWS // num_joins, most // num_joins))
    at = (np.arange(wanted) * ((num - 1) / max(wanted - 1, 1))).astype(np.int64)
    at[wanted - 1 :] = num - 1 if wanted > 1 else 0  # regardless of rounding
    return _read_only(at)


def _read_only(array: Array) -> Array:
    array.flags.writeable = False
    return array


def _chosen(rows: Rows, at: Array) -> Array:
    return at + (rows.start or 0) if isinstance(rows, slice) else rows[at]
