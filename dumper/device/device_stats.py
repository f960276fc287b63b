"""Statistics computed on the device: one row of 16 words per value, copied to the host in blocks.

The kernel that computes a row is launched in the hook, in the stream that computed the value. Later writes therefore
do not affect the row, only the row is copied, and no tensor memory is held. Rows of one stream share a block. The block
is copied when it is full, when the step ends, or before the next value whose bytes are kept. A block with sketches has
256 counters per row in addition.
"""

import contextlib
import functools
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from tapscope.dumper.device.driver_copies import packed_copies, start_copies
from tapscope.dumper.device.private_memory import allocate, call_apart, is_pooled
from tapscope.dumper.records.snapshot import EXCHANGE
from tapscope.kernels import triton
from tapscope.run_format import sketch

if TYPE_CHECKING:
    from tapscope.dumper.records.site_port import SitePort
    from tapscope.kernels.triton.launch import DriverLaunch
    from tapscope.kernels.triton.sketch import Sketches
    from tapscope.kernels.triton.tap import Parts

_merges: "dict[torch.device, DriverLaunch]" = {}
BLOCK = 256
"""Rows per block."""
ROW_WORDS = 16
"""64-bit words per row on the device: 15 of the summary, and 1 counter for the kernel."""
COUNTERS = sketch.COUNTERS
cuda: Any = torch.cuda  # parts of it have no type hints


class SketchRequest(NamedTuple):
    """Arguments for sketching a tensor [rows, width] on the device."""

    keys: Tensor
    """Row keys: [rows] int64 on the device, -1 for padding."""
    part: tuple[int, int, int, int, int]
    """See :class:`tapscope.kernels.triton.sketch.Part`."""


@functools.lru_cache(maxsize=64)
def kernel_for(device: torch.device, dtype: torch.dtype) -> Callable[..., None] | None:
    """Return the launcher of the statistics kernel for ``dtype``, :func:`tapscope.kernels.triton.tap.begin`.

    Returns None without CUDA or Triton, and for an unsupported dtype.
    """
    if triton.why_not(device) is not None or device.type != "cuda":
        return None
    from tapscope.kernels.triton import tap  # needs Triton

    element = torch.empty(0, dtype=dtype).real.dtype if dtype.is_complex else dtype
    return tap.begin if element in tap.FORMATS else None


def teach(record_template: Any, tensor: Tensor, port: "SitePort") -> bool:
    """Store the kernel launches for tensors of this layout in ``record_template``, for the native writer.

    Returns False if the native writer cannot launch the kernels for ``tensor``.
    """
    if EXCHANGE is None or tensor.dtype.is_complex:
        return False
    if kernel_for(tensor.device, tensor.dtype) is None:
        return False
    from tapscope.kernels.triton import tap  # needs Triton

    launch = tap.row_launch(tensor.detach(), after_sketch=port.keep == "sketch")
    if port.keep == "sketch":
        known = port.device_sketch
        if launch is None or known is None or known.members != port.latest.members or is_pooled():
            return False
        from tapscope.kernels.triton.sketch import Part, sketch_launch

        by_rows, slot, part, _ = known.place
        kernel_launch = sketch_launch(tensor.detach(), Part(*part), slot)
        if kernel_launch is None:
            return False
        record_template.set_sketch_launch(*kernel_launch, part, slot if by_rows else -1, known.grid, (port, by_rows))
    return launch is not None and bool(record_template.set_row_launch(EXCHANGE, tensor, *launch))


def parts_on(device: torch.device) -> "Parts":
    """Allocate a buffer for the partial results of one stream, outside the pool of any CUDA graph."""
    from tapscope.kernels.triton import tap  # needs Triton

    def make() -> "Parts":
        tap.prepare(device)
        return tap.Parts(device)

    with torch.inference_mode(False):  # the buffer outlives the inference mode of the first value,
        return call_apart(make) if is_pooled() else make()  # and the memory pool of a graph


def _rows(device: torch.device) -> Tensor:
    """Allocate zeroed rows; merging a row that no kernel has begun is a no-op."""
    shape = (BLOCK, ROW_WORDS)
    if is_pooled():
        return allocate(shape, torch.int64, device).zero_()
    return torch.zeros(shape, dtype=torch.int64, device=device)


class BlockMemory(NamedTuple):
    """Buffers of a block, reused by later blocks of the same stream."""

    rows: Tensor
    """Statistics rows on the device: [256, 16] int64."""
    host: Tensor
    """Page-locked host copy of :attr:`rows`."""
    copied: Any
    """CUDA event that completes when the copy has arrived."""
    counters: Tensor | None = None
    """Sketch counters on the device: [256, 256] float32."""
    host_counters: Tensor | None = None
    """Page-locked host copy of :attr:`counters`."""


class StatsBlock:
    """Consecutive statistics rows of one stream, up to 256."""

    def __init__(
        self,
        device: torch.device,
        stream: torch.cuda.Stream,
        spare: "deque[BlockMemory]",
        parts: "Parts",
        sketches: "Sketches | None" = None,
    ) -> None:
        """Take buffers from ``spare``, to which they return in the end, or allocate new ones.

        With ``sketches``, each row also has counters. ``spare``, ``parts`` and ``sketches`` belong to the stream and
        serve one open block at a time.
        """
        self._stream, self._spare, self._sketches = stream, spare, sketches
        self.parts = parts
        """Partial results of rows that are not merged yet."""
        try:
            self._memory = spare.popleft()
        except IndexError:
            with torch.inference_mode(False):  # the buffers outlive the inference mode of the first value
                rows = _rows(device)
                host = torch.empty(rows.shape, dtype=torch.int64, pin_memory=True)
                counters = host_counters = None
                if sketches is not None:
                    counters = torch.empty(BLOCK, COUNTERS, device=device)
                    host_counters = torch.empty(BLOCK, COUNTERS, pin_memory=True)
            self._memory = BlockMemory(rows, host, cuda.Event(blocking=True), counters, host_counters)
        self._rows, self._host, self._copied, self._counters, self._host_counters = self._memory
        self.num_rows, self._has_arrived = 0, False

    def __del__(self) -> None:
        """Return the buffers to ``spare``, now that no handle reads the rows."""
        with contextlib.suppress(Exception):  # the device has failed
            if self._has_arrived or self._copied.query():
                self._spare.append(self._memory)

    def next_row(self) -> tuple[Tensor, "StatsRow"]:
        """Allocate the next row; returns the row on the device and its handle."""
        index = self.num_rows
        self.num_rows += 1
        return self._rows[index], StatsRow(self, index)

    def sketch(self, tensor: Tensor, request: "SketchRequest", index: int) -> None:
        """Launch the sketch kernel for a dense tensor, into the counters of row ``index``; launch errors propagate."""
        from tapscope.kernels.triton.sketch import Part  # needs Triton

        assert self._sketches is not None
        assert self._counters is not None
        out = self._counters.data_ptr() + 4 * COUNTERS * index
        self._sketches.add(tensor, request.keys, Part(*request.part), index, out)

    @property
    def is_full(self) -> bool:
        """Whether the block has no room for another value."""
        has_room = self.parts.has_room and (self._sketches is None or self._sketches.has_room)
        return self.num_rows == BLOCK or not has_room

    @property
    def place(self) -> tuple[int, ...]:
        """Kernel arguments for the native writer.

        Device addresses of the rows, the partial results and the hash keys; number of rows and of partial results.
        With sketches, also the device address of the counters and the values of :attr:`Sketches.place`.
        """
        from tapscope.kernels.triton.digest import keys_on  # needs Triton

        keys = keys_on(self._rows.device).data_ptr()
        rows = self._rows.data_ptr(), self.parts.memory.data_ptr(), keys, BLOCK, self.parts.count
        if self._sketches is None or self._counters is None:
            return rows
        return *rows, self._counters.data_ptr(), *self._sketches.place

    def close(self) -> None:
        """Merge partial results and start copying the rows to the host."""
        if self._close_by_driver():
            return
        from tapscope.kernels.triton import tap  # needs Triton

        count, device = self.num_rows, self._rows.device
        with cuda.stream(self._stream):
            tap.merge(self._rows[:count])
            self.parts.used = 0
            self._host[:count].copy_(self._rows[:count], non_blocking=True)
            if self._sketches is not None and self._counters is not None and self._host_counters is not None:
                self._sketches.merge(count)
                self._host_counters[:count].copy_(self._counters[:count], non_blocking=True)
        self._copied.record(self._stream)
        if count and device not in _merges and (kernel_launch := tap.merge_launch(self._rows)) is not None:
            _merges[device] = kernel_launch

    def _close_by_driver(self) -> bool:
        """Close the block by a single call of the C++ library; returns False, with no effect, if that is impossible.

        Not possible for an empty block, with sketches, or before :meth:`close` has run once on the device.
        """
        rows, count, kernel_launch = self._rows, self.num_rows, _merges.get(self._rows.device)
        if self._sketches is not None or kernel_launch is None or not count:
            return False
        address = rows.data_ptr()
        copies = packed_copies([(self._host.data_ptr(), address, count * 8 * ROW_WORDS)])
        merge, stream = (kernel_launch, count, address), self._stream.cuda_stream
        if not start_copies(rows.device, self._copied, copies, stream=stream, merge=merge):
            return False
        self.parts.used = 0
        return True

    def address_of(self, index: int) -> int:
        """Return the host address of the row ``index``."""
        return self._host.data_ptr() + index * 8 * ROW_WORDS

    def counters_of(self, index: int) -> int:
        """Return the host address of the counters of the row ``index``; 0 without sketches."""
        counters = self._host_counters
        return 0 if counters is None else counters.data_ptr() + 4 * COUNTERS * index

    def wait(self) -> None:
        """Sleep until the rows of a closed block have arrived on the host."""
        if not (self._has_arrived or self._copied.query()):
            with cuda.device(self._rows.device):
                self._copied.synchronize()
        self._has_arrived = True


class StatsRow:
    """Handle of the statistics row of one value; a :class:`tapscope.dumper.device.device.CopyHandle`."""

    held_bytes = 0
    ran_out = False

    def __init__(self, block: StatsBlock, index: int) -> None:
        self._block, self._index = block, index
        self.address = block.address_of(index)
        self.counters_address = block.counters_of(index)

    @property
    def is_last(self) -> bool:
        """Whether the block of this row is full."""
        return self._block.is_full

    def wait(self) -> None:
        """Sleep until the row has arrived on the host; its block must be closed."""
        self._block.wait()
