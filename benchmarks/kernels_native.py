"""Speed of the native summary and comparison kernels in one thread: GB/s, and the share of the read rate.

    python benchmarks/kernels_native.py [--mebibytes 128] [--width 4096] [--only-take]

Predicted before the first run: summaries at 6 GB/s or more, digests at 28, comparison at 60 % of the read ceiling for
fp32 and bf16, less for fp16, whose subnormals cost a branchless selection.

The ceiling is ``np.sum`` over the bytes as int64; every figure is the best of several interleaved rounds.
"""

import argparse
import ctypes
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from tapscope.core import dtypes
from tapscope.kernels.native import backend, compare_rows, digest_of, summarize, summarize_array, take

Array = np.ndarray[Any, Any]
DTYPES = ("float32", "bfloat16", "float16", "float64", "float8_e4m3fn", "int64")


def best_seconds(calls: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Return the minimum CPU seconds of each call; rounds are interleaved, so that other load slows all alike."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds):
        for name, call in calls.items():
            start = time.thread_time()
            call()
            best[name] = min(best[name], time.thread_time() - start)
    return best


def make_pair(dtype: str, nbytes: int, width: int) -> tuple[Array, Array]:
    """Return two nearly equal matrices of ``nbytes`` each."""
    rows = max(1, nbytes // (width * dtypes.itemsize(dtype)))
    rng = np.random.default_rng(0)
    baseline = rng.standard_normal((rows, width), np.float32)
    target = baseline + rng.standard_normal((rows, width), np.float32) * np.float32(1e-3)
    scale = 1 if dtypes.is_float(dtype) else 100
    kind = dtypes.numpy_dtype(dtype)
    return (baseline * scale).astype(kind), (target * scale).astype(kind)


def measure_dtype(dtype: str, nbytes: int, width: int, rounds: int) -> str:
    """Return one row of the table."""
    baseline, target = make_pair(dtype, nbytes, width)
    words = baseline.reshape(-1).view(np.int64), target.reshape(-1).view(np.int64)
    flat = baseline.reshape(1, -1), target.reshape(1, -1)
    seconds = best_seconds(
        {
            "read": lambda: (words[0].sum(), words[1].sum()),
            "summarize": lambda: summarize_array(baseline),
            "rows": lambda: compare_rows(baseline, target),
            "tolerance": lambda: compare_rows(baseline, target, atol=1e-3, rtol=1.6e-2),
            "flat": lambda: compare_rows(*flat),
        },
        rounds,
    )
    speed = {name: (1 if name == "summarize" else 2) * baseline.nbytes / s / 1e9 for name, s in seconds.items()}
    cells = (f"{speed[name]:7.1f} ({speed[name] / speed['read']:4.0%})" for name in list(speed)[1:])
    return f"{dtype:14}{speed['read']:8.1f} " + " ".join(cells)


def microseconds_per_call(calls: int = 20000) -> tuple[float, float]:
    """Return the microseconds per call of summarize and compare_rows on a tensor of 64 values."""
    tiny = np.ones((1, 64), np.float32)
    address = tiny.ctypes.data
    both = best_seconds(
        {
            "summarize": lambda: [summarize(address, 64, "float32") for _ in range(calls)],
            "compare": lambda: [compare_rows(tiny, tiny) for _ in range(calls // 4)],
        },
        rounds=3,
    )
    return both["summarize"] / calls * 1e6, both["compare"] / (calls // 4) * 1e6


SIZES = (2 << 10, 256 << 10, 4 << 20)


def measure_take(dtype: str, nbytes: int, rounds: int) -> str:
    """Return one row of the table of takes, for a tensor that stays in the cache, as a layer's output in its hook."""
    values = (
        np.random.default_rng(0).standard_normal(nbytes // dtypes.itemsize(dtype)).astype(dtypes.numpy_dtype(dtype))
    )
    room = np.zeros_like(values)
    words, source, target, count = values.view(np.int64), values.ctypes.data, room.ctypes.data, values.size
    calls = max(2, (1 << 20) // nbytes)
    ways: dict[str, Callable[[], object]] = {
        "read": lambda: words.sum(),
        "memcpy": lambda: ctypes.memmove(target, source, nbytes),
        "take": lambda: take(source, count, dtype),
        "no bag": lambda: take(source, count, dtype, bag=False),
        "take, copy": lambda: take(source, count, dtype, target),
        "no bag, copy": lambda: take(source, count, dtype, target, bag=False),
        "digest_of": lambda: digest_of(source, nbytes),
    }
    seconds = best_seconds({name: repeated(way, calls) for name, way in ways.items()}, rounds)
    each = {name: value / calls for name, value in seconds.items()}
    limits = {name: each["memcpy" if "copy" in name else "read"] for name in ways}
    cells = (
        f"{nbytes / each[n] / 1e9:6.1f} ({limits[n] / each[n]:4.0%}){each[n] * 1e6:8.2f} us" for n in list(ways)[2:]
    )
    return f"{dtype:14}{nbytes >> 10:6} KiB " + " ".join(cells)


def repeated(way: Callable[[], object], calls: int) -> Callable[[], object]:
    """Return a function that makes ``calls`` calls."""

    def run() -> None:
        for _ in range(calls):
            way()

    return run


def print_takes(rounds: int) -> None:
    """Print the dumper's cost per hook."""
    print("take: GB/s (share of reading; of memcpy where it copies) and microseconds a call, Python included")
    names = ("take", "without the bag", "with a copy", "copy, no bag", "digest_of")
    print(f"{'':25}" + " ".join(f"{name:>24}" for name in names))
    for dtype in ("float32", "bfloat16", "float16", "int64", "float8_e4m3fn"):
        for nbytes in SIZES:
            print(measure_take(dtype, nbytes, rounds), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mebibytes", type=int, default=128, help="size of each matrix; keep it well above the cache")
    parser.add_argument("--width", type=int, default=4096, help="elements per row")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only-take", action="store_true", help="skip the comparison")
    options = parser.parse_args()
    print("backend:", *backend())
    print_takes(options.rounds)
    if options.only_take:
        return
    print(f"GB/s (share of reading), {options.mebibytes} MiB a side, rows of {options.width}")
    print(f"{'dtype':14}{'read':>8} {'summary':>14} {'compare rows':>14} {'with tolerance':>14} {'one long row':>14}")
    for dtype in DTYPES:
        print(measure_dtype(dtype, options.mebibytes << 20, options.width, options.rounds), flush=True)
    one, two = microseconds_per_call()
    print(f"one call on 64 float32: summarize {one:.1f} us, compare_rows {two:.1f} us")


if __name__ == "__main__":
    main()
