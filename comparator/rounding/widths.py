"""Widths: the shapes of a module's parameters, and how long the sums are that it makes."""

import math
from collections.abc import Mapping

from tapscope.comparator.examination.examined import Examined
from tapscope.comparator.runs.names import is_partial, reduced
from tapscope.index import SiteInfo

Params = Mapping[str, tuple[int, ...]]
_NONE: Params = {}


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
