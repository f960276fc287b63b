"""Compiled: calls of the dumper inside a region that torch.compile turns into a graph, where Python does not run."""

import logging
from typing import Any

import torch

from tapscope.dumper.job import open_dumpers

_log = logging.getLogger("tapscope")
is_compiling = torch.compiler.is_dynamo_compiling
"""True only while torch.compile reads the calling code: nothing of the dumper may be traced then."""
_said: set[str] = set()


def _warn_skipped(name: Any) -> bool:
    """Say once for each name that the graph will not have this call; runs while the graph is made."""
    if open_dumpers.is_recording() and str(name) not in _said:
        _said.add(str(name))
        text = "tapscope: dump(%r) stands in a compiled region, whose graph leaves it out; %s"
        _log.warning(text, str(name), "exclude the caller with torch.compiler.disable")
    return True


def at_compile_time(function: Any) -> Any:
    """Have it called while a graph is made, and its result taken for a constant.

    As torch.compiler.assume_constant_result, which imports torch._dynamo for it: a second of every process.
    """
    function._dynamo_marked_constant = True
    return function


warn_skipped: Any = at_compile_time(_warn_skipped)
