"""Sketches of many tensors in one launch, as a CUDA graph takes them: the counters are those of single launches.

A launch reads its tensors from a table on the device: int64 words, which stay as they are while a graph may replay the
launch. Word n says where in the table the row of program n begins. Programs that share a tensor share its row:

    first program, number of programs, arguments of :func:`.sketch.write_partial` from the address on

Tensors of one type share a launch. Those of whole blocks have one of their own, as these are another kernel.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tapscope.kernels.triton.launch import Launcher
from tapscope.kernels.triton.sketch import NUM_WARPS, Part, Sketches, write_partial

_Constants = tuple[tuple[str, object], ...]
_Rows = list[tuple[int, ...]]  # number of programs, and arguments


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


def _launch_all(rows: dict[_Constants, _Rows], upload: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """One launch for each kernel; returns its table."""
    tables = []
    for constants, alike in rows.items():
        programs = sum(row[0] for row in alike)
        table = upload(_table_of(alike, programs))
        _launch(table.device, (programs, 1, 1), (table,), dict(constants), num_warps=NUM_WARPS)
        tables.append(table)
    return tables


def _table_of(rows: _Rows, programs: int) -> Tensor:
    """The table [words] int64 of one launch, on the CPU."""
    places: list[int] = []
    words: list[int] = []
    for row in rows:
        first = len(places)
        places += [programs + len(words)] * row[0]
        words += (first, *row)
    return torch.tensor(places + words, dtype=torch.int64, device="cpu")


@triton.jit
def _sketch_table_kernel(
    table, BITS: tl.constexpr, MANTISSA: tl.constexpr, BLOCKS: tl.constexpr, IS_WHOLE: tl.constexpr
):  # fmt: skip
    """The partial counters of all tensors in the table."""
    program = tl.program_id(0)
    row = table + tl.load(table + program)
    number = (program - tl.load(row)).to(tl.int32)
    write_partial(
        number, tl.load(row + 1).to(tl.int32), tl.load(row + 2), tl.load(row + 3), tl.load(row + 4), tl.load(row + 5),
        tl.load(row + 6), tl.load(row + 7), tl.load(row + 8), tl.load(row + 9), tl.load(row + 10), tl.load(row + 11),
        BITS, MANTISSA, BLOCKS, IS_WHOLE,
    )  # fmt: skip


_launch = Launcher(_sketch_table_kernel)
