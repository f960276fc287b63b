"""Pool: analyze pairs in batches, with threads for large batches (measuring releases the GIL), or in worker
processes."""

import math
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from itertools import chain
from typing import Protocol, TypeVar

from tapscope.comparator.matching.match import Pair
from tapscope.comparator.pair_analysis.pair_analyzer import AnalyzedPair, PackedPair, PairAnalyzer
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.runs.series import sources_of
from tapscope.core import dtypes

_Result = TypeVar("_Result")
MAX_THREADS = 4
"""More threads would only contend: all work except measuring holds the GIL."""
MIN_THREAD_BYTES = 1 << 19
"""Minimum size of a batch, in bytes, that is worth a thread."""
MAX_BATCH = 1024
"""Maximum number of pairs that are measured together."""
MAX_BATCH_BYTES = 1 << 24
"""Maximum size of a batch: bytes of the baseline's firings on one rank. A larger pair is measured alone."""
_PAIR_COST = 1 << 16
"""Fixed cost of a pair, expressed in bytes that take about as long to measure."""

Batch = tuple[list[Pair], int]
"""(adjacent pairs, bytes of their firings)."""
Results = Generator[tuple[int, list[PackedPair]], None, None]
"""(index of a batch, its :meth:`PairAnalyzer.packed` results)."""


class Workers(Protocol):
    """Interface to processes that measure batches."""

    def measure(self, analyzer: PairAnalyzer, batches: Sequence[Batch]) -> Results:
        """Yield the results of each batch once, in any order; closing the generator stops the workers.

        Raises exceptions of workers, and DataError if workers are lost.
        """


def cost_of(batch: Batch) -> int:
    """Return the cost of a batch, in bytes that take as long to measure."""
    return batch[1] + _PAIR_COST * len(batch[0])


def analyze_all(
    analyzer: PairAnalyzer, pairs: Sequence[Pair], advance: Callable[[], None], workers: Workers | None = None
) -> list[PairResult]:
    """Return the result of :meth:`PairAnalyzer.analyze` for every pair, in order; results do not depend on ``workers``.

    ``advance`` is called after each pair in the calling thread. The exception of a pair is raised when its turn comes.
    """
    results = []
    batches = list(batches_of(pairs))
    alone = in_batches(analyzer.analyze_batch, batches)
    for analyzed in alone if workers is None else _in_workers(analyzer, batches, workers):
        results.append(analyzer.with_suggested_dims(analyzed))
        advance()
    return results


def _in_workers(analyzer: PairAnalyzer, batches: Sequence[Batch], workers: Workers) -> Iterator[AnalyzedPair]:
    by_place: dict[int, list[PackedPair]] = {}
    with closing(workers.measure(analyzer, batches)) as results:
        for at, (batch, _) in enumerate(batches):
            while at not in by_place:
                place, packed = next(results)
                by_place[place] = packed
            yield from analyzer.unpacked(batch, by_place.pop(at))


def in_batches(work: Callable[[Sequence[Pair]], Sequence[_Result]], batches: Sequence[Batch]) -> Iterator[_Result]:
    """Yield the result of ``work`` for each pair, in order, using threads for batches that are large enough."""
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    large = [i for i, (_, nbytes) in enumerate(batches) if nbytes >= MIN_THREAD_BYTES]
    if threads < 2 or len(large) < 2:
        yield from chain.from_iterable(work(batch) for batch, _ in batches)
        return
    from concurrent.futures import Future, ThreadPoolExecutor

    pool = ThreadPoolExecutor(threads, "tapscope-measure")
    try:
        waiting: dict[int, Future[Sequence[_Result]]] = {i: pool.submit(work, batches[i][0]) for i in large}
        for i, (batch, _) in enumerate(batches):
            yield from waiting.pop(i).result() if i in waiting else work(batch)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def batches_of(pairs: Iterable[Pair]) -> Iterator[Batch]:
    """Group adjacent pairs into batches, because a call costs more than measuring a small pair."""
    batch: list[Pair] = []
    nbytes = 0
    for pair in pairs:
        here = _num_bytes(pair) * len(pair.baseline.firings if pair.baseline else ())
        if batch and (nbytes + here > MAX_BATCH_BYTES or len(batch) == MAX_BATCH):
            yield batch, nbytes
            batch, nbytes = [], 0
        batch.append(pair)
        nbytes += here
    if batch:
        yield batch, nbytes


def num_stored_bytes(pair: Pair) -> int:
    """Return the payload bytes of a pair in both runs, assuming that all firings are as large as the first."""
    stored = [one for side in (pair.baseline, pair.target) if side is not None for one in sources_of(side)]
    return sum(one.num_records * (one.first.entry.nbytes if one.first.entry else 0) for one in stored)


def _num_bytes(pair: Pair) -> int:
    """Return the bytes of one firing of the baseline on one rank."""
    if pair.baseline is None or pair.target is None:
        return 0
    dtype = pair.baseline.dtype
    return 0 if dtype is None else math.prod(pair.baseline.shape) * dtypes.itemsize(dtype)
