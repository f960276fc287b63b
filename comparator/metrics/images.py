"""Images: channels of tensors with the layout [batch, channels, positions], whose rows are along the last axis.

Without token rows, a row runs along the last axis, here the width of the image. One scaled channel is then a few rows
among thousands. Therefore, the positions of a sample are arranged with channels as columns, and summed like token rows
(:mod:`.channels`).
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from tapscope.comparator.assembly.blocks import Block
from tapscope.comparator.metrics.joined_rows import ReadJoin
from tapscope.comparator.metrics.lazy_pair import LazyPair
from tapscope.comparator.metrics.measure import MeasuredPair
from tapscope.core.site import module_of
from tapscope.kernels.native import Strip
from tapscope.kernels.native.channels import KINDS, NO_CHANNEL, Channel, add_channel_sums, find_channel
from tapscope.run_format.index import SiteInfo

Array = np.ndarray[Any, Any]
MAX_ELEMENTS = 65536
"""Maximum number of elements read per side over all firings, but at least one position of each."""
_MAX_POSITION_ELEMENTS = 1 << 20
"""Number of elements of all channels at one position (a row of the image) above which no channel is measured."""
_MAX_FIRINGS = 8
_IMAGE = 4
"""Minimum number of axes of an image without token rows; a signal, as convolutions process, has one axis less."""
_CONVOLVES = re.compile(r"(Lazy)?Conv(Transpose)?[123]d|(Lazy)?(Batch|Instance)Norm[123]d|GroupNorm|\w*Pool[123]d")
"""Classes of modules that process images or signals; not GPT-2's Conv1D, which is a linear map."""


def is_conv_class(cls: str) -> bool:
    """Return whether modules of this class combine rows of an image or signal, with channels on the second axis."""
    return _CONVOLVES.fullmatch(cls) is not None


def conv_modules_of(sites: Mapping[str, SiteInfo]) -> frozenset[str]:
    """Return the paths of the modules with such a class."""
    return frozenset(module_of(site) for site, info in sites.items() if info.cls and is_conv_class(info.cls))


def image_channel(opened: LazyPair, measured: MeasuredPair, *, is_signal: bool) -> Channel:
    """Return the channel along the second axis with the largest ratio of gain to noise; zero for tensors other than
    images.

    ``is_signal`` permits three axes, because the site is an input or output of a convolution or similar module.
    """
    last = len(measured.parts) - 1
    if last < 0 or any(layout.by_rows for layout in opened.layouts):
        return NO_CHANNEL
    parts = [measured.parts[i] for i in sorted({round(last * n / (_MAX_FIRINGS - 1)) for n in range(_MAX_FIRINGS)})]
    shapes = {whole.shape[1:] for part in parts for whole in _wholes(opened, part)}
    shape = next(iter(shapes))
    if len(shapes) != 1 or len(shape) + 1 < (_IMAGE - 1 if is_signal else _IMAGE) or shape[0] < 2:
        return NO_CHANNEL
    if shape[0] * shape[-1] > _MAX_POSITION_ELEMENTS or not all(_is_plain(opened, part) for part in parts):
        return NO_CHANNEL
    odd = measured.rows.nonfinite_baseline + measured.rows.nonfinite_target > 0
    sums, num = np.zeros((2, len(KINDS), shape[0])), 0
    for part in parts:
        for strip in _strips(opened, part, shape, odd, MAX_ELEMENTS // len(parts)):
            add_channel_sums(strip._replace(row=num), sums)
            num += len(strip.baseline)
    return find_channel(sums, num)


def _wholes(opened: LazyPair, part: ReadJoin) -> tuple[Any, Any]:
    join = part.join
    return opened.prepared.left[join.baseline], opened.prepared.right[join.target]


def _is_plain(opened: LazyPair, part: ReadJoin) -> bool:
    """Return whether both sides are one tensor each, with all rows in order and rows along the last axis."""
    one, two = _wholes(opened, part)
    num = math.prod(one.shape[:-1])
    are_all = all(
        isinstance(rows, slice) and rows.indices(num) == (0, num, 1)
        for rows in (part.join.baseline_rows, part.join.target_rows)
    )
    widths = {sum(block.width for block in side) for side in _sides(opened, part)}
    return are_all and one.shape == two.shape and part.num_rows == num and widths == {one.shape[-1]}


def _sides(opened: LazyPair, part: ReadJoin) -> tuple[list[Block], list[Block]]:
    return opened.left[part.join.baseline], opened.right[part.join.target]


def _strips(opened: LazyPair, part: ReadJoin, shape: tuple[int, ...], odd: Array, most: int) -> Iterator[Strip]:
    """Yield some finite positions of one firing, [positions x width, channels] of either side."""
    channels, rest, width = shape[0], math.prod(shape[1:-1]), shape[-1]
    num = part.num_rows // channels
    wanted = max(1, min(num, most // (channels * width)))
    at = np.unique(np.linspace(0, num - 1, wanted).astype(np.int64))
    rows = (at // rest * channels * rest + at % rest)[:, None] + rest * np.arange(channels)
    rows = rows[~odd[part.first + rows].any(axis=1)]
    if len(rows):
        one, two = (_channels_last(side, rows.ravel(), channels, width) for side in _sides(opened, part))
        yield Strip(one, two)


def _channels_last(side: list[Block], rows: Array, channels: int, width: int) -> Array:
    values = np.concatenate([block.rows(rows) for block in side], axis=1)
    return np.ascontiguousarray(values.reshape(-1, channels, width).transpose(0, 2, 1).reshape(-1, channels))
