"""The C++ measure beside mere reading of the same arrays, in one process, element type by element type.

    python benchmarks/measure_ceiling.py [--mib 128] [--width 4096] [--rounds 9] [--native 1,avx2]

Two arrays a type, each larger than the caches, about a third of whose values differ a little. The ceiling is the
quicker of two ways in which numpy reads both as 64-bit integers (a sum and a bitwise or); what is measured are the
default measures, row by row. Rounds are interleaved and the least is shown: of processor time on one thread, and of
wall time where every core has its share of the rows, which says little while others use them. ``avx2`` is the same in
a process that leaves 64-byte vectors alone.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import numpy as np

from tapscope import dtypes
from tapscope.kernels.native import compare_rows

Array = np.ndarray[Any, Any]
PAIRS = (
    ("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "bfloat16"),
    ("float64", "float64"), ("complex64", "complex64"), ("float8_e4m3fn", "float8_e4m3fn"), ("int8", "int8"),
    ("bool", "bool"), ("int32", "int32"), ("int64", "int64"),
)  # fmt: skip
TILE = 1 << 20
"""Values that are made; larger arrays repeat them."""


def pair(names: tuple[str, str], nbytes: int, width: int) -> tuple[Array, Array]:
    """Baseline and target, [rows, width]; the larger has so many bytes."""
    rng = np.random.default_rng(0)
    one = rng.standard_normal(TILE) * 4
    two = one + np.where(rng.random(TILE) < 0.3, rng.standard_normal(TILE) * 0.05, 0.0)
    kinds = [dtypes.numpy_dtype(name) for name in names]
    rows = nbytes // max(kind.itemsize for kind in kinds) // width
    values = [
        np.resize((x > 0 if name == "bool" else x).astype(kind), rows * width)
        for x, name, kind in zip((one, two), names, kinds, strict=True)
    ]
    return values[0].reshape(rows, width), values[1].reshape(rows, width)


def shares(matrix: Array, parts: int) -> Iterator[Array]:
    """Its rows in so many parts."""
    bounds = [len(matrix) * i // parts for i in range(parts + 1)]
    return (matrix[first:stop] for first, stop in pairwise(bounds))


def least(calls: dict[str, Callable[[], object]], clock: Callable[[], float], rounds: int) -> dict[str, float]:
    """Seconds of each call, over interleaved rounds."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            start = clock()
            call()
            best[name] = min(best[name], clock() - start)
    return best


def measure(names: tuple[str, str], nbytes: int, width: int, rounds: int, pool: ThreadPoolExecutor, cores: int) -> str:
    """One line of the table."""
    one, two = pair(names, nbytes, width)
    parts = list(zip(shares(one, cores), shares(two, cores), strict=True))

    def words(matrix: Array) -> Array:
        return matrix.reshape(-1).view(np.int64)

    def each(work: Callable[[Array], object]) -> Callable[[tuple[Array, Array]], object]:
        return lambda both: [work(words(side)) for side in both]

    calls: dict[str, Callable[[tuple[Array, Array]], object]] = {
        "sum": each(np.sum),
        "or": each(np.bitwise_or.reduce),
        "measure": lambda both: compare_rows(*both),
    }
    alone = least({name: lambda f=f: f((one, two)) for name, f in calls.items()}, time.process_time, rounds)
    together = least(
        {name: lambda f=f: list(pool.map(f, parts)) for name, f in calls.items()}, time.perf_counter, rounds
    )
    cells = []
    for costs in (alone, together):
        read = min(costs["sum"], costs["or"])
        speeds = [(one.nbytes + two.nbytes) / seconds / 1e9 for seconds in (read, costs["measure"])]
        cells.append(f"{speeds[0]:7.1f} {speeds[1]:8.1f} {read / costs['measure']:6.0%}")
    return f"{'/'.join(dict.fromkeys(names)):<18} {cells[0]}   {cells[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=128, help="size of the larger array of a pair")
    parser.add_argument("--width", type=int, default=4096, help="elements of a row")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--native", default="1,avx2", help="values of TAPSCOPE_NATIVE, a process for each")
    args = parser.parse_args()
    settings = args.native.split(",")
    if settings != [os.environ.get("TAPSCOPE_NATIVE")]:
        for setting in settings:
            command = [sys.executable, *sys.argv, "--native", setting]
            subprocess.run(command, check=True, env={**os.environ, "TAPSCOPE_NATIVE": setting})
        return
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    print(f"TAPSCOPE_NATIVE={settings[0]}, rows of {args.width:,}, {args.mib} MiB, GB/s: least of {args.rounds} rounds")
    print(f"{'':<18} {'1 thread: read, measure, share':>23}   {f'{cores} threads: read, measure, share':>23}")
    with ThreadPoolExecutor(cores) as pool:
        for names in PAIRS:
            print(measure(names, args.mib << 20, args.width, args.rounds, pool, cores), flush=True)


if __name__ == "__main__":
    main()
