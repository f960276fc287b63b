"""Pool: pairs are analyzed in batches, large batches by several threads, which measure without the GIL, or all of them
by worker processes."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import TypeVar

from tapscope.comparator.matching.match import Pair
from tapscope.comparator.pair_analysis.pair_analyzer import AnalyzedPair, PairAnalyzer
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.runs.series import sources_of
from tapscope.core import dtypes

_Found = TypeVar("_Found")
MAX_THREADS = 4
"""More threads would only wait for each other: everything but measuring holds the GIL."""
LARGE = 1 << 19
"""Bytes of a batch that is worth a thread."""
MAX_BATCH = 1024
"""Pairs that are measured together."""
MAX_BATCH_BYTES = 1 << 24
"""Bytes of their firings on one rank of the baseline; a pair that has more is measured alone."""


def analyze_all(
    analyzer: PairAnalyzer, pairs: Sequence[Pair], advance: Callable[[], None], jobs: int = 1
) -> list[PairResult]:
    """The result of :meth:`PairAnalyzer.analyze` for every pair, in order, whatever the number of threads and ``jobs``.

    ``advance`` is called after each pair, in the calling thread. An exception of a pair is raised in its turn.
    """
    found = []
    for look in _looks(analyzer, pairs, jobs):
        found.append(analyzer.with_suggested_dims(look))
        advance()
    return found


def _looks(analyzer: PairAnalyzer, pairs: Sequence[Pair], jobs: int) -> Iterator[AnalyzedPair]:
    if jobs > 1 and len(batches := list(_batches(pairs))) > 1:
        from tapscope.comparator.pair_analysis.worker_processes import analyze_in_processes

        return analyze_in_processes(analyzer, batches, jobs)
    return in_batches(analyzer.analyze_batch, pairs)


def in_batches(work: Callable[[Sequence[Pair]], Sequence[_Found]], pairs: Iterable[Pair]) -> Iterator[_Found]:
    """What ``work`` finds of each pair, in order, by threads where a batch is large enough."""
    batches = list(_batches(pairs))
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    large = [i for i, (_, nbytes) in enumerate(batches) if nbytes >= LARGE]
    if threads < 2 or len(large) < 2:
        yield from chain.from_iterable(work(batch) for batch, _ in batches)
        return
    from concurrent.futures import Future, ThreadPoolExecutor

    pool = ThreadPoolExecutor(threads, "tapscope-measure")
    try:
        waiting: dict[int, Future[Sequence[_Found]]] = {i: pool.submit(work, batches[i][0]) for i in large}
        for i, (batch, _) in enumerate(batches):
            yield from waiting.pop(i).result() if i in waiting else work(batch)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _batches(pairs: Iterable[Pair]) -> Iterator[tuple[list[Pair], int]]:
    """(adjacent pairs, bytes of their firings): a call costs more than a small pair does."""
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
    """Bytes of a pair's payloads in both runs, as if all firings were like the first."""
    stored = [one for side in (pair.baseline, pair.target) if side is not None for one in sources_of(side)]
    return sum(one.num_records * (one.first.entry.nbytes if one.first.entry else 0) for one in stored)


def _num_bytes(pair: Pair) -> int:
    """Bytes of a firing on one rank."""
    if pair.baseline is None or pair.target is None:
        return 0
    dtype = pair.baseline.dtype
    return 0 if dtype is None else math.prod(pair.baseline.shape) * dtypes.itemsize(dtype)
