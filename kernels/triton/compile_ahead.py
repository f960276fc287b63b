"""Kernels compiled in parallel: launches are left out, and threads compile what they would need.

Triton compiles a kernel when it is first launched, 0.1 to 2 s each, one after the other. Most of that is in LLVM and
ptxas, which run without Python's lock.
"""

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from triton import knobs

from tapscope.kernels.triton import is_interpreted

try:
    from triton.runtime._async_compile import AsyncCompileMode, active_mode
except ImportError:  # another version of Triton
    AsyncCompileMode = None

_MAX_THREADS = 16
leaving_out: set[int] = set()
"""Identifiers of threads whose kernels are compiled only, not launched."""


class CompiledKernels:
    """What :func:`compiled_ahead` has compiled."""

    def __init__(self) -> None:
        self.names: list[str] = []
        """Of the kernels that Triton's cache did not have."""


def is_available() -> bool:
    """Whether this version of Triton compiles in threads; not where its interpreter runs the kernels."""
    return AsyncCompileMode is not None and hasattr(knobs.compilation, "listener") and not is_interpreted()


@contextmanager
def compiled_ahead() -> Iterator[CompiledKernels]:
    """What this thread launches inside is compiled at the end, and is not launched.

    So nothing computes what kernels would have written: wrappers may be called on tensors of which no one reads the
    values, or within the capture of a CUDA graph that is thrown away. A kernel that does not compile raises when it is
    launched. Only where :func:`is_available`.
    """
    compiled, ident = CompiledKernels(), threading.get_ident()
    before: Any = knobs.compilation.listener

    def listen(**event: Any) -> None:
        if not event.get("cache_hit"):
            compiled.names.append(event["src"].name)
        if before is not None:
            before(**event)

    knobs.compilation.listener = listen
    mode = active_mode.set(None)  # left in place by Triton where a compilation raises
    num_threads = min(_MAX_THREADS, len(os.sched_getaffinity(0)))
    try:
        with ThreadPoolExecutor(num_threads) as threads, AsyncCompileMode(threads, ignore_errors=True):
            leaving_out.add(ident)
            try:
                yield compiled
            finally:
                leaving_out.discard(ident)
    finally:
        active_mode.reset(mode)
        knobs.compilation.listener = before
