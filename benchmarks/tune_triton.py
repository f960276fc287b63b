"""Tune the launches of the Triton kernels; prints the tables of kernels/triton.

    python benchmarks/tune_triton.py [decode | prefill | linear]

For each class of shapes, every launch is compiled and measured in a CUDA graph; the figure of the class is the
geometric mean over its shapes. Launches that do not compile (too much shared memory) are skipped.
"""

import itertools
import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from kernels_triton import BF16, CUDA, PAGE, graph_us, noise, paged
from torch.nn import functional

from tapscope.kernels.triton.linear import LINEAR_LAUNCHES, LinearLaunch, few_rows_linear
from tapscope.kernels.triton.paged_decode import LAUNCHES, Launch, paged_decode
from tapscope.kernels.triton.paged_prefill import PREFILL_LAUNCHES, PrefillLaunch, paged_prefill

FP8 = torch.float8_e4m3fn
DECODE = {
    (64, 2, False): [(32, 4096, 16, 8, 64, BF16), (4, 2048, 14, 2, 64, BF16)],
    (128, 2, False): [(32, 4096, 32, 8, 128, BF16), (32, 4096, 16, 8, 128, BF16), (1, 4096, 32, 8, 128, BF16)],
    (256, 2, False): [(32, 2048, 16, 8, 256, BF16), (1, 4096, 8, 4, 256, BF16)],
    (1024, 2, False): [(32, 4096, 16, 1, 576, BF16), (1, 4096, 16, 1, 576, BF16)],
    (1024, 2, True): [(32, 4096, 128, 1, 576, BF16), (4, 4096, 128, 1, 576, BF16)],
    (128, 1, False): [(32, 4096, 32, 8, 128, FP8), (1, 4096, 32, 8, 128, FP8)],
    (64, 1, False): [(32, 4096, 16, 8, 64, FP8)],
    (256, 1, False): [(32, 2048, 16, 8, 256, FP8)],
}
LINEAR = [(4096, 1024), (1024, 2048), (6144, 1024), (1024, 3072), (4096, 4096), (6144, 4096)]
"""(outputs, inputs): the layers of Qwen3-0.6B and two of Llama-8B."""
PREFILL = {
    (64, 2): [(1, 0, 8192, 14, 2, 64), (8, 512, 512, 16, 8, 64)],
    (128, 2): [(1, 0, 8192, 32, 8, 128), (64, 512, 64, 32, 8, 128), (1, 8192, 2048, 16, 8, 128)],
    (256, 2): [(1, 0, 8192, 16, 8, 256), (8, 512, 512, 8, 4, 256)],
}


def launches(dim: int, itemsize: int) -> Iterator[Launch]:
    """Yield the candidate launches; with n stages, keys and values have n - 1 buffers each.

    ``resident`` only changes the number of parts of a sequence, so it needs no recompilation.
    """
    blocks = (16, 32, 64) if dim > 256 else (32, 64, 128)
    for block, warps, stages, registers in itertools.product(blocks, (4, 8), (2, 3, 4), (None, 128)):
        buffers = (stages - 1) * block * min(dim, 576) * itemsize * (1 if dim > 256 else 2)
        if buffers <= 200 << 10 and (warps == 4 or (registers is None and (block >= 64 or dim > 256))):
            yield from (Launch(block, warps, stages, registers, resident) for resident in (1, 2, 4))


def decode_calls(shapes: list[tuple[int, int, int, int, int, torch.dtype]]) -> list[Callable[[], object]]:
    """Return one decode call per shape."""
    calls: list[Callable[[], object]] = []
    for batch, length, heads, kv_heads, dim, stored in shapes:
        table, lengths, pages = paged(batch, length)
        keys, query = noise(pages, PAGE, kv_heads, dim, dtype=stored), noise(batch, heads, dim)
        values = None if dim == 576 else noise(pages, PAGE, kv_heads, dim, dtype=stored)
        call = query, keys, values, table, lengths, dim**-0.5
        calls.append(partial(paged_decode, *call, value_dim=512 if dim == 576 else None))
    return calls


def prefill_launches(dim: int) -> Iterator[PrefillLaunch]:
    """Yield the candidate launches; stages as in :func:`launches`."""
    for rows, block, warps, stages in itertools.product((64, 128, 256), (32, 64, 128), (4, 8), (2, 3, 4)):
        if (stages - 1) * block * dim * 4 <= 200 << 10 and not (rows == 64 and warps == 8):
            yield PrefillLaunch(rows, block, warps, stages)


def prefill_calls(shapes: list[tuple[int, int, int, int, int, int]]) -> list[Callable[[], object]]:
    """Return one prefill call per shape."""
    calls: list[Callable[[], object]] = []
    for batch, cached, rows, heads, kv_heads, dim in shapes:
        table, lengths, pages = paged(batch, cached + rows)
        keys, values = (noise(pages, PAGE, kv_heads, dim) for _ in range(2))
        query, starts = noise(batch * rows, heads, dim), torch.arange(batch + 1, device=CUDA, dtype=torch.int32) * rows
        calls.append(partial(paged_prefill, query, keys, values, table, starts, lengths, dim**-0.5))
    return calls


def linear_launches(rows: int) -> Iterator[LinearLaunch]:
    """Yield the candidate launches."""
    outputs = (2, 4, 8) if rows == 1 else (16, 32)
    for out, block, warps, stages in itertools.product(outputs, (128, 256, 512, 1024), (2, 4, 8), (3, 5)):
        size = (out + (1 if rows == 1 else max(16, rows))) * block * 2 * stages
        if size <= 200 << 10 and (rows == 1) == (out < 16) and not (rows == 1 and (block < 512 or stages > 3)):
            yield LinearLaunch(out, block, warps, stages)


def tune_linear() -> None:
    """Print the best launches over all shapes, next to torch's time; weights are read from memory."""
    for rows in LINEAR_LAUNCHES:
        calls, theirs = [], []
        for outs, ins in LINEAR:
            copies = [noise(outs, ins) for _ in range(max(2, (160 << 20) // (2 * outs * ins)))]
            inputs = noise(rows, ins)
            calls.append((copies, inputs))
            theirs.append(_each_us(functional.linear, copies, inputs))
        print(f"linear {rows} rows of {LINEAR}: torch {[round(t, 1) for t in theirs]}", flush=True)
        found = []
        for launch in linear_launches(rows):
            try:
                times = [_each_us(partial(few_rows_linear, launch=launch), *call) for call in calls]
            except Exception as error:  # noqa: BLE001  (triton's errors have no common class)
                print(f"  {launch}: {type(error).__name__}", flush=True)
                continue
            found.append((math.prod(times) ** (1 / len(times)), launch, times))
        for mean, launch, times in sorted(found)[:4]:
            print(f"  {launch}  {mean:.1f} us {[round(time, 1) for time in times]}", flush=True)
        torch.cuda.empty_cache()


def _each_us(linear: Callable[..., object], weights: list[torch.Tensor], inputs: torch.Tensor) -> float:
    """Return the microseconds of one product; consecutive products use different weights."""
    return graph_us(lambda: [linear(inputs, weight) for weight in weights], 1, 5) / len(weights)


def tune(table: dict[Any, Any], place: Any, tried: Iterator[Any], calls: list[Callable[[], object]]) -> None:
    """Print the four best launches of a class."""
    found = []
    for launch in tried:
        table[place] = launch
        try:
            times = [graph_us(call, 5, 5) for call in calls]
        except Exception as error:  # noqa: BLE001  (triton's errors have no common class)
            print(f"  {launch}: {type(error).__name__}", flush=True)
            continue
        found.append((math.prod(times) ** (1 / len(times)), launch, times))
    for mean, launch, times in sorted(found)[:4]:
        print(f"{place}: {launch}  {mean:.1f} us {[round(time, 1) for time in times]}", flush=True)
    torch.cuda.empty_cache()


def main() -> None:
    """Print the best launches of every class."""
    if not torch.cuda.is_available():
        raise SystemExit(f"nothing to tune: no {CUDA.type} device here")
    kinds = sys.argv[1:] or ["decode", "prefill", "linear"]
    for place, shapes in DECODE.items() if "decode" in kinds else ():
        tune(LAUNCHES, place, launches(*place[:2]), decode_calls(shapes))
    for place, rows in PREFILL.items() if "prefill" in kinds else ():
        tune(PREFILL_LAUNCHES, place, prefill_launches(place[0]), prefill_calls(rows))
    if "linear" in kinds:
        tune_linear()


if __name__ == "__main__":
    main()
