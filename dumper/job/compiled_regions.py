"""Compiled regions: handle calls of the dumper in code that torch.compile traces, where no Python code runs later."""

import logging
from typing import Any

import torch

from tapscope.dumper.job import open_dumpers

_log = logging.getLogger("tapscope")
is_compiling = torch.compiler.is_dynamo_compiling
"""Return whether torch.compile is tracing the calling code; code of the dumper must not be traced."""
_warned: set[str] = set()


def _warn_skipped(name: Any) -> bool:
    """Warn once per name that the compiled graph omits this ``dump()`` call; runs at compile time."""
    if open_dumpers.is_recording() and str(name) not in _warned:
        _warned.add(str(name))
        text = "tapscope: dump(%r) is called in a compiled region, whose graph omits it; %s"
        _log.warning(text, str(name), "exclude the caller with torch.compiler.disable")
    return True


def at_compile_time(function: Any) -> Any:
    """Decorator: torch.compile calls ``function`` at compile time and embeds the result as a constant.

    Like torch.compiler.assume_constant_result, which imports torch._dynamo and would cost every process a second.
    """
    function._dynamo_marked_constant = True
    return function


warn_skipped: Any = at_compile_time(_warn_skipped)
