"""Parallel kernel compilation at engine start; intermediate buckets are compiled only if the cache lacks kernels."""

import threading
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.execution.cuda_graph_manager import CUDAGraphManager
from tapscope.kernels import triton


class Graphs:
    """Graphs of four buckets that note the buckets compiled."""

    sizes = (1, 2, 4, 8)

    def __init__(self) -> None:
        self.compiled: list[list[int]] = []

    def compile_kernels(self, sizes: Collection[int], observer: Any) -> None:
        assert observer is None or observer.is_tapping
        self.compiled.append(sorted(sizes))


class Observer:
    """Notes whether its taps are attached."""

    is_tapping = False

    @contextmanager
    def all_taps(self) -> Iterator[None]:
        self.is_tapping = True
        yield
        self.is_tapping = False


@pytest.fixture
def cache_misses(monkeypatch: pytest.MonkeyPatch) -> list[list[str] | None]:
    """Kernels missing in Triton's cache at each of the next compilations; None: threads cannot compile."""
    found: list[list[str] | None] = []

    @contextmanager
    def compiled_ahead(device: torch.device, rank: int, size: int) -> Iterator[Any]:
        assert (rank, size) == (1, 2)
        names = found.pop(0)
        yield None if names is None else SimpleNamespace(names=names)

    monkeypatch.setattr(triton, "compiled_ahead", compiled_ahead)
    return found


def compile_kernels(*graphs: Any, observer: Any = None) -> None:
    CUDAGraphManager(TensorParallel(1, 2), *graphs).compile_kernels(torch.device("cuda"), observer)


@pytest.mark.parametrize(
    ("misses", "sizes"),
    [
        ([["a", "b"], ["c"]], [[1, 8], [2, 4]]),
        ([["a"], []], [[1, 8], [2, 4]]),
        ([[]], [[1, 8]]),
        ([None], []),
    ],
)
def test_buckets_between_are_compiled_if_the_cache_lacks_kernels(
    cache_misses: list[list[str] | None],
    misses: list[list[str] | None],
    sizes: list[list[int]],
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache_misses += misses
    decode, prefill = Graphs(), Graphs()
    with caplog.at_level("INFO"):
        compile_kernels(decode, prefill)
    assert decode.compiled == prefill.compiled == sizes
    assert not cache_misses
    count = sum(len(names or ()) for names in misses)
    assert (f"compiled {count} Triton kernels in" in caplog.text) == (count > 0)


def test_kernels_of_steps_with_taps_are_those_of_decoding(
    cache_misses: list[list[str] | None], caplog: pytest.LogCaptureFixture
) -> None:
    cache_misses += [["a"], ["b", "c"]]
    decode, prefill, observer = Graphs(), Graphs(), Observer()
    with caplog.at_level("INFO"):
        compile_kernels(decode, prefill, observer=observer)
    assert decode.compiled == [[1, 8], [2, 4]]
    assert prefill.compiled == []
    assert not observer.is_tapping
    assert "compiled 3 Triton kernels of steps with taps in" in caplog.text


@pytest.mark.parametrize("where", ["capture", "kernel"])
def test_failure_is_reported_in_one_line_and_the_start_goes_on(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """In the capture, or while loading a compiled kernel."""
    knobs = pytest.importorskip("triton").knobs
    active_mode = pytest.importorskip("triton.runtime._async_compile").active_mode
    from tapscope.kernels.triton import compile_ahead

    def fail(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    def compile_one(sizes: Collection[int], observer: Any) -> None:
        if where == "capture":
            fail()
        active_mode.get().submit("kernel", lambda: SimpleNamespace(src=None, metadata=None), fail)

    without_gpu = SimpleNamespace(active=SimpleNamespace(launcher_cls=lambda *_: None))
    monkeypatch.setattr(compile_ahead, "driver", without_gpu)
    monkeypatch.setattr(triton, "why_not", lambda device: None)
    monkeypatch.setattr(compile_ahead, "is_available", lambda: True)
    before = knobs.compilation.listener
    with caplog.at_level("INFO"):
        compile_kernels(SimpleNamespace(sizes=(1, 2), compile_kernels=compile_one))
    (record,) = caplog.records
    assert record.levelname == "INFO"
    assert record.exc_info is None
    assert "at their first launch" in record.message
    assert "operation not permitted when stream is capturing" in record.message
    assert active_mode.get() is None
    assert not compile_ahead.compiling_threads
    assert knobs.compilation.listener is before


def test_ranks_compile_their_share_before_that_of_others() -> None:
    """Kernels that one rank has compiled are in the cache when the other ranks reach them."""
    pytest.importorskip("triton")
    from tapscope.kernels.triton.compile_ahead import ShareFirst

    cache: set[int] = set()
    compiled: dict[int, list[int]] = {0: [], 1: []}
    shares_end = threading.Barrier(2)

    def compile_all(rank: int) -> list[int]:
        def compile_kernel(number: int) -> int:
            if number not in cache:
                compiled[rank].append(number)
                cache.add(number)
            if number == 8 + rank:
                shares_end.wait(60)
            return number

        with ThreadPoolExecutor(1) as threads:
            jobs = ShareFirst(threads, rank, 2)
            futures = [jobs.submit(partial(compile_kernel, number)) for number in range(10)]
            jobs.start_others()
            return [future.result() for future in futures]

    with ThreadPoolExecutor(2) as ranks:
        assert list(ranks.map(compile_all, range(2))) == [list(range(10))] * 2
    assert compiled == {0: [0, 2, 4, 6, 8], 1: [1, 3, 5, 7, 9]}


def test_rank_without_the_others_compiles_everything() -> None:
    """Includes a kernel whose result is needed earlier, and one that raises."""
    pytest.importorskip("triton")
    from tapscope.kernels.triton.compile_ahead import ShareFirst

    ran: list[int] = []
    with ThreadPoolExecutor(1) as threads:
        jobs = ShareFirst(threads, 2, 3)
        futures = [jobs.submit(partial(ran.append, number)) for number in range(6)]
        failing = jobs.submit(lambda: 1 // 0)
        futures[3].result()
        jobs.start_others()
        wait([*futures, failing], 60)
    assert ran == [2, 5, 3, 0, 1, 4]
    assert isinstance(failing.exception(), ZeroDivisionError)


def test_device_without_kernels_runs_what_would_be_compiled() -> None:
    with triton.compiled_ahead(torch.device("cpu")) as compiled:
        assert compiled is None
