"""Reduction length: the number of products that a module sums for one output element, from the shapes of parameters."""

import math
import re
from collections.abc import Mapping

from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.runs.names import all_reduced_site, is_partial
from tapscope.run_format.index import SiteInfo

Params = Mapping[str, tuple[int, ...]]
"""Name of a parameter -> its local shape."""
_NO_PARAMS: Params = {}
_BATCH_NORM = re.compile(r"(Lazy|Sync)?BatchNorm([123]d)?")


def params_of(result: PairResult, sites: Mapping[str, SiteInfo]) -> Params:
    """Return the local shapes of the parameters of the module that the site belongs to."""
    for name in result.names:
        info = sites.get(all_reduced_site(name) if is_partial(name) else name)
        if info is not None and info.params:
            return info.params
    return _NO_PARAMS


def reduction_of(cls: str, params: Params, *, has_gradients: bool = False) -> int:
    """Return the length of the sums in a module with parameters; 0 if unknown.

    In a run with gradients (``has_gradients``), the length for stacked experts is the size of one expert's matrix: rows
    of their gradients are sums over few tokens, whose errors do not average out.
    """
    if "Embedding" in cls:
        return 1
    if not params:
        return 0
    matrices = [shape for shape in params.values() if len(shape) >= 2]
    if cls == "Conv1D":  # GPT-2's, which stores its weight as [in, out]
        return max((shape[0] for shape in matrices), default=0)
    lengths = [math.prod(shape[1:]) if has_gradients else _length(cls, shape) for shape in matrices]
    return max(lengths, default=max((s[0] for s in params.values() if s), default=0))


def _length(cls: str, shape: tuple[int, ...]) -> int:
    """Return the number of products in one sum: a convolution kernel, or one matrix of stacked experts, whose axis
    order varies."""
    is_stacked = len(shape) == 3 and "Conv" not in cls
    return max(shape[1:]) if is_stacked else math.prod(shape[1:])


def batch_norm_reduction(cls: str, shape: tuple[int, ...], params: Params) -> int:
    """Return the length of the sums of a batch norm over a value of shape ``shape``; 0 for any other module.

    Its statistics, and the gradients that pass through them, are sums over all positions of a channel.
    """
    if not params or not _BATCH_NORM.fullmatch(cls):
        return 0
    return _places(shape, max((p[0] for p in params.values() if p), default=0))


def gradient_reduction(shape: tuple[int, ...], parameter: tuple[int, ...]) -> int:
    """Return the length of the sums of a parameter's gradient; 0 if unknown.

    The sums are over the token rows, or positions of an image, of the output's gradient, whose shape is ``shape``. A
    bias or a linear map has one row for each channel.
    """
    return _places(shape, parameter[0] if parameter else 0)


def _places(shape: tuple[int, ...], channels: int) -> int:
    return math.prod(shape) // channels if channels and channels in shape else 0
