"""Ray workers: measure batches of pairs in tasks on an existing Ray cluster.

A task receives paths, options and indices of pairs. Its process opens and matches the runs once, and keeps them for
later tasks. Values are therefore read from storage by the node that compares them, and only results return to the
caller.
"""

import logging
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
from msgspec import Struct

from tapscope._version import __version__
from tapscope.comparator.matching.match import Pair
from tapscope.comparator.options.options import CompareOptions
from tapscope.comparator.pair_analysis.pair_analyzer import PackedPair, PairAnalyzer
from tapscope.comparator.pair_analysis.pool import Batch, Results, cost_of
from tapscope.comparator.pipeline.match_runs import MatchedRuns, match_runs
from tapscope.comparator.pipeline.measure_pairs import analyzer_of
from tapscope.comparator.pipeline.open_runs import open_runs
from tapscope.comparator.runs.corrupt_records import CorruptRecords
from tapscope.core.errors import ConfigError, DataError, UnreachableError
from tapscope.core.extras import require
from tapscope.core.gc_control import gc_paused
from tapscope.remote import url_of
from tapscope.run_format.record import Key
from tapscope.run_format.run import Run
from tapscope.sources import open_run
from tapscope.tensor_files.quantization import dequantized

MAX_RETRIES = 3
"""Number of times that Ray retries a task whose worker or node was lost."""
_PROBE_S = 10.0
"""Timeout of the connection probe, in seconds: Ray itself aborts the process after two minutes if nothing listens at
the address."""
_SILENCE_S = 60.0
_LEAST_S, _MOST_S = 1.5, 20.0
"""Minimum and maximum duration of a task: Ray takes milliseconds to schedule one, and progress is shown after each."""
_FIRST_RATE = 1 << 26
"""Assumed cost per second until the first task is done; low, because the work per byte varies widely."""
_log = logging.getLogger("tapscope")


class PairSource(Struct, frozen=True):
    """Everything that another process needs to open the runs and find the same pairs."""

    id: str
    """Unique per measurement, so that each process opens the runs once."""
    version: str
    paths: tuple[Path, Path]
    meshes: tuple[dict[str, int], dict[str, int]]
    options: CompareOptions
    corrupt: tuple[dict[Key, str], dict[Key, str]]
    """Excluded records of each run, with their defects."""
    digest: str
    """Hash of the pairs, to detect a worker that sees other records."""

    @classmethod
    def of(cls, matched: MatchedRuns) -> "PairSource":
        """Create the source of the given matched runs."""
        runs, (left, right) = matched.opened.runs, matched.opened.corrupt
        return cls(
            uuid4().hex,
            __version__,
            (_absolute(runs[0].path), _absolute(runs[1].path)),
            (dict(runs[0].mesh), dict(runs[1].mesh)),
            matched.opened.options,
            (dict(left.reasons), dict(right.reasons)),
            _digest(matched.pairs),
        )

    def open(self) -> tuple[PairAnalyzer, list[Pair]]:
        """Open and match the runs again.

        Raises the errors of :func:`open_run`, and DataError if the pairs differ from those of the caller.
        """
        if self.version != __version__:
            raise ConfigError(f"it has tapscope {__version__}, the caller {self.version}: install the same version")
        with gc_paused():
            baseline, target = (_open(path, mesh) for path, mesh in zip(self.paths, self.meshes, strict=True))
            baseline, target = dequantized(baseline, target), dequantized(target, baseline)
            corrupt = (
                CorruptRecords(baseline, dict(self.corrupt[0]), _is_verified=True),
                CorruptRecords(target, dict(self.corrupt[1]), _is_verified=True),
            )
            matched = match_runs(open_runs(baseline, target, self.options, corrupt))
        if _digest(matched.pairs) != self.digest:
            runs = " or ".join(map(str, self.paths))
            raise DataError(f"{runs} has different records on the worker than for the caller")
        return analyzer_of(matched), matched.pairs


_opened: dict[str, tuple[PairAnalyzer, list[Pair]]] = {}
"""The most recent source that this process opened, by :attr:`PairSource.id`."""


@np.errstate(all="ignore")  # as in compare()
def measure_batches(source: PairSource, begin: int, sizes: Sequence[int]) -> "tuple[float, Any]":
    """Measure adjacent batches in the process of a task; return (seconds, one list of packed pairs per batch).

    ``begin`` is the index of the first pair, ``sizes`` the number of pairs of each batch. An exception is returned in
    place of the results.
    """
    try:
        if source.id not in _opened:
            _opened.clear()
            _opened[source.id] = source.open()
        analyzer, pairs = _opened[source.id]
        began, packed = time.perf_counter(), list[list[PackedPair]]()
        for size in sizes:
            packed.append(analyzer.packed(pairs[begin : begin + size]))
            begin += size
        return time.perf_counter() - began, packed
    except Exception as error:  # noqa: BLE001 - raised by the caller
        if isinstance(error, DataError | ConfigError) and error.args:
            error.args = (f"Ray worker on {socket.gethostname()}: {error.args[0]}", *error.args[1:])
        return 0.0, error


@contextmanager
def ray_connection(address: str | None) -> Iterator[None]:
    """Context manager: connect to a Ray cluster.

    ``address`` is what :func:`ray.init` accepts: ``auto``, ``HOST:PORT`` or ``ray://HOST:PORT``. Does nothing if it is
    None or if this process is already connected. Raises MissingExtraError without Ray, and UnreachableError if no
    cluster answers.
    """
    if address is None:
        yield
        return
    require("ray", f"--ray {address}")
    import ray

    if ray.is_initialized():
        yield
        return
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdecimal():
        try:
            socket.create_connection((host, int(port)), _PROBE_S).close()
        except (OSError, OverflowError) as error:
            raise UnreachableError(f"--ray {address}: no Ray cluster answers there ({error})") from None
    with redirect_stdout(sys.stderr):  # Ray's thread prints reports of lost workers to stdout
        try:
            ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            sentence = " ".join(str(error).split())[:200]
            raise UnreachableError(
                f"--ray {address}: no Ray cluster answers there ({sentence}); one with tokens needs RAY_AUTH_MODE=token"
            ) from None
        try:
            yield
        finally:
            ray.shutdown()


class RayWorkers:
    """Workers on the CPUs of the connected Ray cluster, one task per CPU; see :func:`ray_connection`."""

    def __init__(self, matched: MatchedRuns) -> None:
        import ray

        self._ray: Any = ray
        self._source = PairSource.of(matched)
        self.num_tasks = 0

    def measure(self, analyzer: PairAnalyzer, batches: Sequence[Batch]) -> Results:
        """Measure the batches and yield their results, see :class:`~tapscope.comparator.pair_analysis.pool.Workers`."""
        ray, schedule = self._ray, TaskSchedule(list(map(cost_of, batches)))
        task = ray.remote(measure_batches).options(num_cpus=1, max_retries=MAX_RETRIES, name="tapscope diff")
        source, running = ray.put(self._source), dict[Any, range]()
        begins = np.cumsum([0, *(len(pairs) for pairs, _ in batches)]).tolist()
        try:
            while running or schedule.num_left:
                cpus = self._num_cpus()
                while schedule.num_left and len(running) < schedule.depth * cpus:
                    part = schedule.next(cpus)
                    sizes = [len(batches[at][0]) for at in part]
                    running[task.remote(source, begins[part.start], sizes)] = part
                    self.num_tasks += 1
                (ref,) = self._wait(list(running))
                part = running.pop(ref)
                seconds, packed = self._result(ref)
                schedule.observe(part, seconds)
                yield from zip(part, packed, strict=True)
        finally:
            for ref in running:
                with suppress(Exception):  # the cluster may be gone
                    ray.cancel(ref, force=True)

    def _num_cpus(self) -> int:
        """Return the current number of CPUs, as a cluster may grow while tasks wait."""
        try:
            return max(1, int(self._ray.cluster_resources().get("CPU", 0)))
        except Exception as error:  # noqa: BLE001 - Ray's exceptions have no common base class
            raise self._lost(error) from None

    def _wait(self, running: list[Any]) -> list[Any]:
        ready, _ = self._ray.wait(running, timeout=_SILENCE_S)
        if not ready:
            _log.warning(
                "tapscope: no result from Ray for %.0f s; its CPUs may be in use (see `ray status`)", _SILENCE_S
            )
            ready, _ = self._ray.wait(running)
        return list(ready)

    def _result(self, ref: Any) -> tuple[float, list[list[PackedPair]]]:
        from ray.exceptions import RayError, RayTaskError

        try:
            seconds, packed = self._ray.get(ref)
        except RayTaskError as error:
            last = str(error).strip().rpartition("\n")[2]
            raise ConfigError(
                f"a Ray worker cannot run the task ({last}); its node needs tapscope {__version__}"
            ) from None
        except RayError as error:
            raise self._lost(error) from None
        if isinstance(packed, Exception):
            raise packed
        return seconds, packed

    def _lost(self, error: Exception) -> DataError:
        how = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200]}"
        return DataError(
            f"Ray lost a task {MAX_RETRIES + 1} times, or the cluster was lost ({how}); the kernel kills processes "
            "when memory runs out"
        )


class TaskSchedule:
    """Divides batches into tasks of at least :data:`_LEAST_S`, based on the durations of earlier tasks.

    Tasks become smaller towards the end, so that all workers finish at about the same time.
    """

    def __init__(self, costs: Sequence[int]) -> None:
        self._costs, self._at, self._left = costs, 0, sum(costs)
        self._done, self._seconds = 0, 0.0

    @property
    def depth(self) -> int:
        """Tasks in flight per worker: 2 once the task size is known, so that one waits at the worker."""
        return 2 if self._seconds else 1

    @property
    def num_left(self) -> int:
        """Number of batches that are not yet part of a task."""
        return len(self._costs) - self._at

    def next(self, num_workers: int) -> range:
        """Return the batches of the next task."""
        rate = self._done / self._seconds if self._seconds else _FIRST_RATE
        seconds = min(max(self._left / rate / (3 * num_workers), _LEAST_S), _MOST_S)
        begin, cost = self._at, 0
        while self.num_left and cost < seconds * rate:
            cost += self._costs[self._at]
            self._at += 1
        self._left -= cost
        return range(begin, self._at)

    def observe(self, part: range, seconds: float) -> None:
        """Record the duration of a finished task."""
        self._done += sum(self._costs[at] for at in part)
        self._seconds += seconds


def _absolute(path: str | Path) -> Path:
    return Path(path) if url_of(path) is not None else Path(path).absolute()


def _open(path: Path, mesh: dict[str, int]) -> Run:
    run = open_run(path)
    if run.mesh != mesh:
        run.assume_mesh(mesh)
    return run


def _digest(pairs: Sequence[Pair]) -> str:
    hasher = blake2b(digest_size=16)
    for pair in pairs:
        sides = [one and (one.site, one.num_records) for one in (pair.baseline, pair.target)]
        hasher.update(repr((pair.site, *sides)).encode())
    return hasher.hexdigest()
