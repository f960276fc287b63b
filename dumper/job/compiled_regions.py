"""Compiled regions: calls of the dumper in code that torch.compile turns into a graph, where Python does not run."""

import logging
from typing import Any

import torch

from tapscope.dumper.job import open_dumpers

_log = logging.getLogger("tapscope")
is_compiling = torch.compiler.is_dynamo_compiling
"""True only while torch.compile traces the calling code: no code of the dumper may be traced then."""
_warned: set[str] = set()


def _warn_skipped(name: Any) -> bool:
    """Warn once per name that the graph omits this call; runs while the graph is being built."""
    if open_dumpers.is_recording() and str(name) not in _warned:
        _warned.add(str(name))
        text = "tapscope: dump(%r) is called in a compiled region, whose graph omits it; %s"
        _log.warning(text, str(name), "exclude the caller with torch.compiler.disable")
    return True


def at_compile_time(function: Any) -> Any:
    """Have torch.compile call the function while it builds a graph, and use the result as a constant.

    Same as torch.compiler.assume_constant_result, which would import torch._dynamo: a second for every process.
    """
    function._dynamo_marked_constant = True
    return function


warn_skipped: Any = at_compile_time(_warn_skipped)
