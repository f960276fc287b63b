"""Kernels compiled in parallel: launches are left out, and threads compile what they would need.

Triton compiles a kernel when it is first launched, 0.1 to 2 s each, one after the other. Most of that is in LLVM and
ptxas, which run without Python's lock. Triton up to 3.6 also compiles a launcher in C for each kernel, in 0.2 s.

Ranks of one host need the same kernels and have one cache on disk. Each compiles its share first, and then goes through
those of the others, which it finds in the cache if they were as fast. No rank waits for another.
"""

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

from triton import knobs
from triton.runtime import driver

from tapscope.kernels.triton import is_interpreted

try:
    from triton.runtime._async_compile import AsyncCompileMode, active_mode
except ImportError:  # another version of Triton
    AsyncCompileMode = None

_MAX_THREADS = 16
compiling_threads: set[int] = set()
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
def compiled_ahead(rank: int = 0, size: int = 1) -> Iterator[CompiledKernels]:
    """What this thread launches inside is compiled at the end, and is not launched.

    So nothing computes what kernels would have written: wrappers may be called on tensors of which no one reads the
    values, or within the capture of a CUDA graph that is thrown away. A kernel that does not compile raises when it is
    launched. ``rank`` of ``size`` compiles every ``size``-th kernel before the others. Only where
    :func:`is_available`.
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
        with ThreadPoolExecutor(num_threads) as threads:
            jobs = _KernelJobs(threads, rank, size)
            with AsyncCompileMode(jobs, ignore_errors=True):
                compiling_threads.add(ident)
                try:
                    yield compiled
                finally:
                    compiling_threads.discard(ident)
                    jobs.start_others()
    finally:
        active_mode.reset(mode)
        knobs.compilation.listener = before


class ShareFirst(Executor):
    """Starts the jobs of one rank's share immediately, and those of other ranks' when :meth:`start_others` is called.

    Job ``i`` is in the share of rank ``i % size``.
    """

    def __init__(self, threads: Executor, rank: int, size: int) -> None:
        self._threads, self._rank, self._size = threads, rank, size
        self._started: list[Future[Any]] = []
        self._others: list[_Deferred] = []

    def submit(self, job: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        """Future of ``job``, whose result starts it if it was not started."""
        if (len(self._started) + len(self._others)) % self._size != self._rank:
            self._others.append(_Deferred(self._threads, job))
            return self._others[-1]
        self._started.append(self._threads.submit(job))
        return self._started[-1]

    def start_others(self) -> None:
        """Once this rank's share has ended, start the other jobs."""
        wait(self._started)
        for each in self._others:
            each.start()


class _KernelJobs(ShareFirst):
    """Jobs that compile kernels: each also leaves the kernel's launcher in Triton's cache."""

    def submit(self, compile_kernel: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        """Future of the kernel, see :meth:`ShareFirst.submit`."""

        def job() -> Any:
            kernel = compile_kernel()
            driver.active.launcher_cls(kernel.src, kernel.metadata)
            return kernel

        return super().submit(job)


class _Deferred(Future[Any]):
    """Future of a job that starts on request."""

    def __init__(self, threads: Executor, job: Callable[[], Any]) -> None:
        super().__init__()
        self._threads, self._job = threads, job
        self._is_started = False

    def start(self) -> None:
        if not self._is_started:
            self._is_started = True
            self._threads.submit(self._run)

    def result(self, timeout: float | None = None) -> Any:
        self.start()
        return super().result(timeout)

    def _run(self) -> None:
        try:
            self.set_result(self._job())
        except Exception as error:  # noqa: BLE001 - the result raises it
            self.set_exception(error)
