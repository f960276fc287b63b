"""Pool: small pairs of sites examined many at a time, large ones by several threads, which measure without the GIL."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from tapscope.comparator.matching.match import Pair
from tapscope.comparator.pair_analysis.pair_analyzer import AnalyzedPair, PairAnalyzer
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.core import dtypes

MAX_THREADS = 4
"""More would only wait for each other: what is not measuring holds the GIL."""
LARGE = 1 << 19
"""Bytes of a firing from which on its pair is given to a thread; for a smaller one that costs more than it gains."""
MAX_BATCH = 1024
"""Pairs that are measured together."""


def analyze_all(examiner: PairAnalyzer, pairs: Sequence[Pair], advance: Callable[[], None]) -> list[PairResult]:
    """What :meth:`PairAnalyzer.examine` gives for every pair, in order and whatever the number of threads.

    ``advance`` is called after each, in the calling thread. What a pair raises is raised when its turn has come.
    """
    found = []
    for look in _looks(examiner, pairs):
        found.append(examiner.advised(look))
        advance()
    return found


def _looks(examiner: PairAnalyzer, pairs: Sequence[Pair]) -> Iterator[AnalyzedPair]:
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    batches = list(_batches(pairs))
    large = [i for i, batch in enumerate(batches) if len(batch) == 1 and _num_bytes(batch[0]) >= LARGE]
    if threads < 2 or len(large) < 2:
        yield from chain.from_iterable(map(examiner.look, batches))
        return
    from concurrent.futures import Future, ThreadPoolExecutor

    pool = ThreadPoolExecutor(threads, "tapscope-measure")
    try:
        waiting: dict[int, Future[list[AnalyzedPair]]] = {i: pool.submit(examiner.look, batches[i]) for i in large}
        for i, batch in enumerate(batches):
            yield from waiting.pop(i).result() if i in waiting else examiner.look(batch)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _batches(pairs: Iterable[Pair]) -> Iterator[list[Pair]]:
    """The pairs in order, small neighbours together: a call costs more than they do."""
    batch: list[Pair] = []
    nbytes = 0
    for pair in pairs:
        here = _num_bytes(pair) * len(pair.baseline.firings if pair.baseline else ())
        if batch and (nbytes + here > LARGE or len(batch) == MAX_BATCH):
            yield batch
            batch, nbytes = [], 0
        batch.append(pair)
        nbytes += here
    if batch:
        yield batch


def _num_bytes(pair: Pair) -> int:
    """Of a firing on one rank."""
    if pair.baseline is None or pair.target is None:
        return 0
    dtype = pair.baseline.dtype
    return 0 if dtype is None else math.prod(pair.baseline.shape) * dtypes.itemsize(dtype)
