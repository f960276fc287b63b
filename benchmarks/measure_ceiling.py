"""The C++ comparison kernel relative to reading the same arrays, in one process, by dtype.

    python benchmarks/measure_ceiling.py [--mib 128] [--width 4096] [--rounds 9] [--native 1,avx2]

Two arrays per dtype, each larger than the caches; about a third of their values differ slightly. Their placement
imitates two mapped files: each starts `--shift` bytes into a page, `--apart` bytes after the end of the other.
(`--shift 16 --apart 4096` is where malloc places two large arrays, which is a pitfall on AMD CPUs: the L1 cache finds a
line by an address hash in which bits 12 and 27 cancel. At a distance of 128 MiB and a page, lines of both sides then
evict each other wherever a vector straddles two lines. Code that reads both sides alternately takes up to twice as
long; the ceiling does not.)

The ceiling is the faster of two ways in which numpy reads both arrays as 64-bit integers (a sum and a bitwise or). The
measured kernel computes the default measures, row by row. Rounds are interleaved and the minimum is shown: of CPU time
on one thread, and of wall time with the rows split over all cores, which is unreliable if other processes use them.
``avx2`` is the same in a process without 64-byte vectors.
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

from tapscope.core import dtypes
from tapscope.kernels.native import compare_rows

Array = np.ndarray[Any, Any]
PAIRS = (
    ("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"), ("float32", "bfloat16"),
    ("float64", "float64"), ("complex64", "complex64"), ("float8_e4m3fn", "float8_e4m3fn"),
    ("float8_e5m2", "float8_e5m2"), ("float8_e4m3fnuz", "float8_e4m3fnuz"),
    ("float8_e8m0fnu", "float8_e8m0fnu"), ("int8", "int8"), ("bool", "bool"), ("int32", "int32"), ("int64", "int64"),
)  # fmt: skip
PAGE = 4096
TILE = 1 << 20
"""Number of generated values; larger arrays repeat them."""


def pair(names: tuple[str, str], nbytes: int, width: int, apart: int, shift: int) -> tuple[Array, Array]:
    """Return baseline and target, [rows, width], in one memory block; ``nbytes`` is the size of the larger one."""
    rng = np.random.default_rng(0)
    one = rng.standard_normal(TILE) * 4
    two = one + np.where(rng.random(TILE) < 0.3, rng.standard_normal(TILE) * 0.05, 0.0)
    if "float8_e8m0fnu" in names:  # E8M0 has no sign
        one, two = abs(one), abs(two)
    kinds = [dtypes.numpy_dtype(name) for name in names]
    rows = nbytes // max(kind.itemsize for kind in kinds) // width
    sizes = [rows * width * kind.itemsize for kind in kinds]
    room = np.empty(sum(sizes) + apart + shift + 2 * PAGE, np.uint8)
    start = -room.ctypes.data % PAGE + shift
    sides = []
    for values, name, kind, size in zip((one, two), names, kinds, sizes, strict=True):
        side = room[start : start + size].view(kind)
        side[:] = np.resize((values > 0 if name == "bool" else values).astype(kind), rows * width)
        sides.append(side.reshape(rows, width))
        start += -(-size // PAGE) * PAGE + apart
    return sides[0], sides[1]


def scheduled(matrix: Array, parts: int) -> Iterator[Array]:
    """Split the rows into equal parts."""
    bounds = [len(matrix) * i // parts for i in range(parts + 1)]
    return (matrix[first:stop] for first, stop in pairwise(bounds))


def least(calls: dict[str, Callable[[], object]], clock: Callable[[], float], rounds: int) -> dict[str, float]:
    """Return the minimum seconds of each call over interleaved rounds."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            start = clock()
            call()
            best[name] = min(best[name], clock() - start)
    return best


def measure(
    names: tuple[str, str], sides: tuple[Array, Array], rounds: int, pool: ThreadPoolExecutor, cores: int
) -> str:
    """Return one row of the table."""
    one, two = sides
    parts = list(zip(scheduled(one, cores), scheduled(two, cores), strict=True))

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
    parser.add_argument("--width", type=int, default=4096, help="elements per row")
    parser.add_argument("--apart", type=int, default=5 * PAGE, help="bytes between the two arrays of a pair")
    parser.add_argument("--shift", type=int, default=0, help="bytes from the start of a page to that of an array")
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
            sides = pair(names, args.mib << 20, args.width, args.apart, args.shift)
            print(measure(names, sides, args.rounds, pool, cores), flush=True)


if __name__ == "__main__":
    main()
