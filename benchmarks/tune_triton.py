"""Measures launches of the Triton kernels and prints tables to put into kernels/triton.

    python benchmarks/tune_triton.py [decode]

For each class of shapes every launch is compiled and measured within a CUDA graph; the class's figure is the geometric
mean over its shapes. What does not compile (too much shared memory) is left out.
"""

import itertools
import math
import sys
from collections.abc import Callable, Iterator

import torch
from kernels_triton import BF16, CUDA, PAGE, graph_us, noise, paged

from tapscope.kernels.triton import paged_decode
from tapscope.kernels.triton.paged_decode import Launch

FP8 = torch.float8_e4m3fn
DECODE = {
    (64, 2): [(32, 4096, 16, 8, 64, BF16), (4, 2048, 14, 2, 64, BF16)],
    (128, 2): [(32, 4096, 32, 8, 128, BF16), (32, 4096, 16, 8, 128, BF16), (1, 4096, 32, 8, 128, BF16)],
    (256, 2): [(32, 2048, 16, 8, 256, BF16), (1, 4096, 8, 4, 256, BF16)],
    (1024, 2): [(32, 4096, 16, 1, 576, BF16), (32, 4096, 128, 1, 576, BF16), (1, 4096, 16, 1, 576, BF16)],
    (128, 1): [(32, 4096, 32, 8, 128, FP8), (1, 4096, 32, 8, 128, FP8)],
    (64, 1): [(32, 4096, 16, 8, 64, FP8)],
    (256, 1): [(32, 2048, 16, 8, 256, FP8)],
}


def launches(dim: int, itemsize: int) -> Iterator[Launch]:
    """What is tried."""
    blocks = (16, 32, 64) if dim > 256 else (32, 64, 128)
    for block, warps, stages in itertools.product(blocks, (4, 8), (2, 3, 4, 5)):
        if block * min(dim, 640) * itemsize * stages <= 160 << 10 and not (warps == 8 and block < 64 and dim <= 256):
            yield Launch(block, warps, stages)


def decode_calls(shapes: list[tuple[int, int, int, int, int, torch.dtype]]) -> list[Callable[[], object]]:
    """One call for each shape."""
    calls: list[Callable[[], object]] = []
    for batch, length, heads, kv_heads, dim, stored in shapes:
        table, lengths, pages = paged(batch, length)
        keys, query = noise(pages, PAGE, kv_heads, dim, dtype=stored), noise(batch, heads, dim)
        values = None if dim == 576 else noise(pages, PAGE, kv_heads, dim, dtype=stored)
        settings = {"value_dim": 512 if dim == 576 else None}
        call = query, keys, values, table, lengths, dim**-0.5
        calls.append(lambda call=call, settings=settings: paged_decode.paged_decode(*call, **settings))
    return calls


def tune_decode() -> None:
    """Print LAUNCHES of paged_decode.py, the best first for each class."""
    for place, shapes in DECODE.items():
        calls, found = decode_calls(shapes), []
        for launch in launches(*place):
            paged_decode.LAUNCHES[place] = launch
            try:
                times = [graph_us(call, 5, 5) for call in calls]
            except Exception as error:  # noqa: BLE001  (triton's errors have no common class)
                print(f"  {launch}: {type(error).__name__}", flush=True)
                continue
            found.append((math.prod(times) ** (1 / len(times)), launch, times))
        for mean, launch, times in sorted(found)[:4]:
            print(f"{place}: {launch}  {mean:.1f} us {[round(time, 1) for time in times]}", flush=True)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    if not torch.cuda.is_available():
        raise SystemExit(f"nothing to tune: no {CUDA.type} device here")
    {"decode": tune_decode}[(sys.argv[1:] or ["decode"])[0]]()
