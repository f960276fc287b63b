"""Pool: pairs of sites examined by several threads, which pays where measuring takes long without the GIL."""

import math
import os
from collections.abc import Callable, Iterator, Sequence

from tapscope import dtypes
from tapscope.comparator.examine import Examiner, Look
from tapscope.comparator.examined import Examined
from tapscope.comparator.match import Pair

MAX_THREADS = 4
"""More would only wait for each other: what is not measuring holds the GIL."""
LARGE = 1 << 19
"""Bytes of a firing from which on its pair is given to a thread; for a smaller one that costs more than it gains."""


def examine_all(examiner: Examiner, pairs: Sequence[Pair], advance: Callable[[], None]) -> list[Examined]:
    """What :meth:`Examiner.examine` gives for every pair, in order and whatever the number of threads.

    ``advance`` is called after each, in the calling thread. What a pair raises is raised when its turn has come.
    """
    found = []
    for look in _looks(examiner, pairs):
        found.append(examiner.advised(look))
        advance()
    return found


def _looks(examiner: Examiner, pairs: Sequence[Pair]) -> Iterator[Look]:
    threads = min(MAX_THREADS, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)
    large = {i for i, pair in enumerate(pairs) if _is_large(pair)} if threads > 1 else set()
    if len(large) < 2:
        yield from map(examiner.look, pairs)
        return
    from concurrent.futures import Future, ThreadPoolExecutor

    pool = ThreadPoolExecutor(threads, "tapscope-measure")
    try:
        waiting: dict[int, Future[Look]] = {i: pool.submit(examiner.look, pairs[i]) for i in sorted(large)}
        for i, pair in enumerate(pairs):
            yield waiting.pop(i).result() if i in waiting else examiner.look(pair)
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _is_large(pair: Pair) -> bool:
    if pair.baseline is None or pair.target is None:
        return False
    first = pair.baseline.first
    return first.dtype is not None and math.prod(first.shape) * dtypes.itemsize(first.dtype) >= LARGE
