"""Sketches of many tensors in one launch, for CUDA graphs; the counters equal those of single launches.

A launch reads its tensors from a table on the device (:mod:`.launch_table`), which must not change as long as a graph
may replay the launch. A table row holds the two words of :mod:`.launch_table`, then the arguments of
:func:`.sketch.write_partial` from ``address`` on. The array ``places`` follows the last row.

Tensors of one dtype share a launch, except that tensors of whole blocks use another specialization.
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
_Rows = list[tuple[int, ...]]  # (number of programs, *arguments of write_partial) of each tensor
_COLUMNS = tl.constexpr(12)


class Request(NamedTuple):
    """A tensor to sketch, with the arguments of :meth:`Sketches.add`."""

    tensor: Tensor
    keys: Tensor
    part: Part
    out: int


def sketch_many(sketches: Sketches, requests: Iterable[Request], upload: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Sketch tensors of one device with one launch per specialization and one merge launch.

    If the buffers of ``sketches`` cannot hold all tensors, the call launches and merges several times. ``upload``
    copies a table [words] int64 from the CPU to the device; the copy must be complete when ``upload`` returns, also
    during CUDA graph capture. Returns the tables. A graph that captured the call needs the tables, the tensors and
    their keys to stay alive. Raises UsageError like :meth:`Sketches.add`.
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
        launch, args = sketches.take(tensor, keys, part, count, out)
        rows.setdefault(tuple(launch.constants.items()), []).append((launch.programs, *args))
        count += 1
    tables += _launch_all(rows, upload)
    sketches.merge(count)
    return tables


def launch_variants(device: torch.device, dtype: torch.dtype) -> None:
    """Launch every specialization that :func:`sketch_many` and :meth:`Sketches.add` may need for ``dtype``.

    ``dtype`` is one of :data:`.sketch.TYPES`. Call it inside :func:`.compiled_ahead` to compile the kernels, or before
    a graph capture to load them.
    """
    sketches = Sketches(device, 1, most_programs(device))
    keys, out = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(COUNTERS, device=device)
    for width in (COUNTERS, 1):  # IS_WHOLE and not
        values, part = torch.zeros(1, width, dtype=dtype, device=device), Part(1, width, 0, 0, width)
        sketch_many(sketches, [Request(values, keys, part, out.data_ptr())], lambda table: table.to(device))
        sketches.add(values, keys, part, 0, out.data_ptr())
        sketches.merge(1)


def _launch_all(rows: dict[_Constants, _Rows], upload: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """Launch each specialization once and return the tables."""
    tables = []
    for constants, tensors in rows.items():
        places, firsts = places_of([row[0] for row in tensors])
        words = [word for first, row in zip(firsts, tensors, strict=True) for word in (first, *row)]
        table = upload(torch.tensor(words + places, dtype=torch.int64, device="cpu"))
        grid = len(places), 1, 1
        _launch(table.device, grid, (table, table[len(words) :]), dict(constants), num_warps=NUM_WARPS)
        tables.append(table)
    return tables


@triton.jit
def _sketch_table_kernel(
    table, places, BITS: tl.constexpr, MANTISSA: tl.constexpr, BLOCKS: tl.constexpr, IS_WHOLE: tl.constexpr
):  # fmt: skip
    """Write the partial counters of all tensors in the table."""
    row, first, programs = place_in(table, places, _COLUMNS)
    write_partial(
        tl.program_id(0) - first, programs, tl.load(row + 2), tl.load(row + 3), tl.load(row + 4), tl.load(row + 5),
        tl.load(row + 6), tl.load(row + 7), tl.load(row + 8), tl.load(row + 9), tl.load(row + 10), tl.load(row + 11),
        BITS, MANTISSA, BLOCKS, IS_WHOLE,
    )  # fmt: skip


_launch = Launcher(_sketch_table_kernel)
