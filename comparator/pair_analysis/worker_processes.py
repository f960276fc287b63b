"""Worker processes: measure batches of pairs in forks of this process, which inherit its opened runs.

A worker sends results without their pairs, which this process has. The results are the same as if measured in this
process.
"""

import multiprocessing
import os
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import Any

from msgspec import Struct

from tapscope.comparator.pair_analysis.pair_analyzer import PackedPair, PairAnalyzer
from tapscope.comparator.pair_analysis.pool import Batch, Results, cost_of
from tapscope.core.errors import ConfigError, DataError


class WorkerProcesses(Struct, frozen=True):
    """A pool of ``count`` forks; each measures its share of the batches."""

    count: int

    def measure(self, analyzer: PairAnalyzer, batches: Sequence[Batch]) -> Results:
        """See :class:`~.pool.Workers`. Raises ConfigError on systems without ``fork``."""
        if "fork" not in multiprocessing.get_all_start_methods():
            raise ConfigError("--jobs needs fork(), which this system does not have; compare without it")
        workers: dict[Connection, Any] = {}
        try:
            for share in filter(None, shares_of(batches, self.count)):
                process, connection = _start(lambda at: analyzer.packed(batches[at][0]), share, list(workers))
                workers[connection] = process
            while workers:
                for ready in wait(list(workers)):
                    assert isinstance(ready, Connection)
                    place, packed = _receive(ready, workers[ready])
                    if place is None:
                        workers.pop(ready).join()
                    else:
                        yield place, packed
        finally:
            for connection, process in workers.items():
                connection.close()
                process.kill()
                process.join()


def shares_of(batches: Sequence[Batch], count: int) -> list[list[int]]:
    """Return the batch indices for each of ``count`` workers, each in order, balanced by cost."""
    shares: list[list[int]] = [[] for _ in range(count)]
    costs = [0] * count
    for at in sorted(range(len(batches)), key=lambda at: -cost_of(batches[at])):
        least = costs.index(min(costs))
        shares[least].append(at)
        costs[least] += cost_of(batches[at])
    return [sorted(share) for share in shares]


def _start(work: Callable[[int], list[PackedPair]], share: Sequence[int], others: Sequence[Connection]) -> Any:
    """Fork a worker that sends (index, result) for each batch index of ``share``, then (None, None); return (process,
    connection)."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)

    def run() -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process stops its workers
        for each in (here, *others):
            each.close()
        code = 1
        with suppress(BrokenPipeError):  # the parent process has exited
            try:
                for place in share:
                    there.send((place, work(place)))
                there.send((None, None))
                code = 0
            except BrokenPipeError:
                raise
            except BaseException as error:  # noqa: BLE001 - re-raised in the parent process
                there.send((None, error))
        os._exit(code)  # skip flushing buffers inherited from the parent

    process = context.Process(target=run, daemon=True, name="tapscope-measure")
    process.start()
    there.close()
    return process, here


def _receive(connection: Connection, process: Any) -> tuple[int | None, Any]:
    try:
        place, answer = connection.recv()
    except (EOFError, OSError):  # OSError if the connection ends within a message
        process.join()
        how = f"signal {-process.exitcode}" if process.exitcode < 0 else f"exit code {process.exitcode}"
        raise DataError(
            f"a worker process of --jobs ended before it returned its results ({how}; the kernel kills processes when "
            "memory runs out): compare again with fewer --jobs"
        ) from None
    if isinstance(answer, BaseException):
        raise answer
    return place, answer
