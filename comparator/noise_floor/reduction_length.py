"""Widths: the shapes of a module's parameters, and how long the sums are that it makes."""

import math
import re
from collections.abc import Mapping

from tapscope.comparator.pair_analysis.pair_result import Examined
from tapscope.comparator.runs.names import is_partial, reduced
from tapscope.run_format.index import SiteInfo

Params = Mapping[str, tuple[int, ...]]
_NONE: Params = {}
_BATCH = re.compile(r"(Lazy|Sync)?BatchNorm([123]d)?")


def params_of(one: Examined, sites: Mapping[str, SiteInfo]) -> Params:
    """Local shapes of the parameters of the module that the site belongs to."""
    for name in one.names:
        info = sites.get(reduced(name) if is_partial(name) else name)
        if info is not None and info.params:
            return info.params
    return _NONE


def reduction_of(cls: str, params: Params) -> int:
    """Length of the sums that a module with parameters makes; 0 where that is not known."""
    if "Embedding" in cls:
        return 1
    if not params:
        return 0
    matrices = [shape for shape in params.values() if len(shape) >= 2]
    if cls == "Conv1D":  # GPT-2's, which keeps its weight as [in, out]
        return max((shape[0] for shape in matrices), default=0)
    return max(
        (math.prod(shape[1:]) for shape in matrices), default=max((s[0] for s in params.values() if s), default=0)
    )


def summands_of(cls: str, shape: tuple[int, ...], params: Params) -> int:
    """Length of the sums that a batch norm makes of a value of that shape: its statistics, and the gradients that come
    back through them, are sums over all places of a channel. 0 of any other module."""
    if not params or not _BATCH.fullmatch(cls):
        return 0
    return _places(shape, max((p[0] for p in params.values() if p), default=0))


def summed_of(shape: tuple[int, ...], parameter: tuple[int, ...]) -> int:
    """Length of the sums of a parameter's gradient: the token rows, or places of an image, at which its module's output
    has a gradient, of that shape; 0 where that is not known. A bias, or a linear map, has a row for each channel."""
    return _places(shape, parameter[0] if parameter else 0)


def _places(shape: tuple[int, ...], channels: int) -> int:
    return math.prod(shape) // channels if channels and channels in shape else 0
