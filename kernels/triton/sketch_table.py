"""Sketches of many tensors in one launch, as a CUDA graph takes them: the counters are those of single launches.

A launch reads its tensors from a table on the device (:mod:`.launch_table`), which stays as it is while a graph may
replay the launch. The first two words of a row precede the arguments of :func:`.sketch.write_partial` from the address
on; the places follow the last row.

Tensors of one type share a launch. Those of whole blocks have one of their own, as these are another kernel.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapscope.kernels.triton.launch import Launcher
from tapscope.kernels.triton.launch_table import place_in, places_of
from tapscope.kernels.triton.sketch import COUNTERS, NUM_WARPS, Part, Sketches, most_programs, write_partial

_Constants = tuple[tuple[str, object], ...]
_Rows = list[tuple[int, ...]]  # number of programs, and arguments
_COLUMNS = tl.constexpr(12)


class Request(NamedTuple):
    """A tensor to sketch, as :meth:`Sketches.add` has it."""

    tensor: Tensor
    keys: Tensor
    part: Part
    out: int


def sketch_many(sketches: Sketches, requests: Iterable[Request], upload: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Sketch tensors of one device, complete at the end: with one launch for each kernel and one that merges, and more
    of them where ``sketches`` has no room for all.

    ``upload`` copies a table [words] int64 from the CPU to the device; it is there when that returns, also while a
    CUDA graph is captured. Returns the tables, which must live as long as a graph that has captured the call, as must
    the tensors and their keys. Raises UsageError as :meth:`Sketches.add`.
    """
    tables: list[Tensor] = []
    rows: dict[_Constants, _Rows] = {}
    count = 0
    for request in requests:
        if count == sketches.capacity or not sketches.has_room:
            tables += _launch_all(rows, upload)
            sketches.merge(count)
            rows, count = {}, 0
        tensor, keys, part, out = request
        how, args = sketches.take(tensor, keys, part, count, out)
        rows.setdefault(tuple(how.constants.items()), []).append((how.programs, *args))
        count += 1
    tables += _launch_all(rows, upload)
    sketches.merge(count)
    return tables


def launch_variants(device: torch.device, dtype: torch.dtype) -> None:
    """Launch every kernel that :func:`sketch_many` and :meth:`Sketches.add` may need for ``dtype``, one of
    :data:`.sketch.TYPES`: inside :func:`.compiled_ahead`, where that compiles them, or so that they are loaded before a
    capture."""
    sketches = Sketches(device, 1, most_programs(device))
    keys, out = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(COUNTERS, device=device)
    for width in (COUNTERS, 1):  # whole blocks, and other columns
        values, part = torch.zeros(1, width, dtype=dtype, device=device), Part(1, width, 0, 0, width)
        sketch_many(sketches, [Request(values, keys, part, out.data_ptr())], lambda table: table.to(device))
        sketches.add(values, keys, part, 0, out.data_ptr())
        sketches.merge(1)


def _launch_all(rows: dict[_Constants, _Rows], upload: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """One launch for each kernel; returns its table."""
    tables = []
    for constants, alike in rows.items():
        places, firsts = places_of([row[0] for row in alike])
        words = [word for first, row in zip(firsts, alike, strict=True) for word in (first, *row)]
        table = upload(torch.tensor(words + places, dtype=torch.int64, device="cpu"))
        grid = len(places), 1, 1
        _launch(table.device, grid, (table, table[len(words) :]), dict(constants), num_warps=NUM_WARPS)
        tables.append(table)
    return tables


@triton.jit
def _sketch_table_kernel(
    table, places, BITS: tl.constexpr, MANTISSA: tl.constexpr, BLOCKS: tl.constexpr, IS_WHOLE: tl.constexpr
):  # fmt: skip
    """The partial counters of all tensors in the table."""
    row, first, programs = place_in(table, places, _COLUMNS)
    write_partial(
        tl.program_id(0) - first, programs, tl.load(row + 2), tl.load(row + 3), tl.load(row + 4), tl.load(row + 5),
        tl.load(row + 6), tl.load(row + 7), tl.load(row + 8), tl.load(row + 9), tl.load(row + 10), tl.load(row + 11),
        BITS, MANTISSA, BLOCKS, IS_WHOLE,
    )  # fmt: skip


_launch = Launcher(_sketch_table_kernel)
