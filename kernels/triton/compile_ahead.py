"""Parallel ahead-of-time compilation: launches are skipped, and threads compile the kernels they would need.

Triton compiles a kernel at its first launch, sequentially and in 0.1 to 2 s each. Most of that time is spent in LLVM
and ptxas, which release the GIL. Triton up to 3.6 also compiles a C launcher for each kernel, in 0.2 s.

The ranks of a machine need the same kernels and share Triton's disk cache. Each rank compiles its own share first and
then the shares of the other ranks, which are cache hits if those ranks have finished. No rank waits for another.
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
except ImportError:  # other Triton versions
    AsyncCompileMode = None

_MAX_THREADS = 16
compiling_threads: set[int] = set()
"""Identifiers of the threads whose launches only compile."""


class CompiledKernels:
    """Result of :func:`compiled_ahead`."""

    def __init__(self) -> None:
        self.names: list[str] = []
        """Names of the kernels that missed Triton's cache."""


def is_available() -> bool:
    """Return whether this version of Triton can compile in threads; False under the interpreter."""
    return AsyncCompileMode is not None and hasattr(knobs.compilation, "listener") and not is_interpreted()


@contextmanager
def compiled_ahead(rank: int = 0, size: int = 1) -> Iterator[CompiledKernels]:
    """Context manager: kernels that this thread launches inside are compiled, not launched; exit waits for them.

    Kernel outputs are therefore not written. Call wrappers inside only on dummy tensors, or during the capture of a
    CUDA graph that is discarded. A kernel that fails to compile raises at its first launch after the context. Rank
    ``rank`` of ``size`` compiles every ``size``-th kernel first. Requires :func:`is_available`.
    """
    compiled, ident = CompiledKernels(), threading.get_ident()
    previous_listener: Any = knobs.compilation.listener

    def listen(**event: Any) -> None:
        if not event.get("cache_hit"):
            compiled.names.append(event["src"].name)
        if previous_listener is not None:
            previous_listener(**event)

    knobs.compilation.listener = listen
    mode_token = active_mode.set(None)  # Triton does not reset it if a compilation raises
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
        active_mode.reset(mode_token)
        knobs.compilation.listener = previous_listener


class ShareFirst(Executor):
    """Executor that starts the jobs of its own rank's share immediately and other jobs in :meth:`start_others`.

    Job ``i`` belongs to the share of rank ``i % size``.
    """

    def __init__(self, threads: Executor, rank: int, size: int) -> None:
        self._threads, self._rank, self._size = threads, rank, size
        self._started: list[Future[Any]] = []
        self._others: list[_Deferred] = []

    def submit(self, job: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        """Submit ``job`` and return its future; waiting for the result starts a deferred job."""
        if (len(self._started) + len(self._others)) % self._size != self._rank:
            self._others.append(_Deferred(self._threads, job))
            return self._others[-1]
        self._started.append(self._threads.submit(job))
        return self._started[-1]

    def start_others(self) -> None:
        """Wait for this rank's share, then start the other jobs."""
        wait(self._started)
        for each in self._others:
            each.start()


class _KernelJobs(ShareFirst):
    """Executor of compilation jobs, which also compile the kernel's C launcher into Triton's cache."""

    def submit(self, compile_kernel: Callable[[], Any], /) -> Future[Any]:  # type: ignore[override]
        """Submit a compilation and return the future of its kernel, see :meth:`ShareFirst.submit`."""

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
        except Exception as error:  # noqa: BLE001 - result() raises it
            self.set_exception(error)
