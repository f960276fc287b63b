"""Statistics that the device computes: one row of 16 words per value, copied to the host in blocks. A block of
sketches has 256 counters for each of its rows.

The kernel that computes a row is launched in the hook, in the stream that computed the value: later writes do not show,
only the row is copied, and no memory is held. Rows of one stream share a block. The block is copied when it is full,
when the step ends, or when a value follows whose bytes are wanted.
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
"""64-bit words of a row on the device: those of a summary, and one that the kernel counts with."""
COUNTERS = sketch.COUNTERS
cuda: Any = torch.cuda  # parts of it have no type hints


class SketchRequest(NamedTuple):
    """What the device needs of a tensor [rows, width] besides its elements to sketch it."""

    keys: Tensor
    """[rows] int64 on the device: the row keys, -1 for padding."""
    part: tuple[int, int, int, int, int]
    """See :class:`tapscope.kernels.triton.sketch.Part`."""


@functools.lru_cache(maxsize=64)
def kernel_for(device: torch.device, dtype: torch.dtype) -> Callable[..., None] | None:
    """The kernel that begins the row of a tensor of ``dtype``, see :func:`tapscope.kernels.triton.tap.begin`; None when
    there is none."""
    if triton.why_not(device) is not None or device.type != "cuda":
        return None
    from tapscope.kernels.triton import tap  # needs Triton

    element = torch.empty(0, dtype=dtype).real.dtype if dtype.is_complex else dtype
    return tap.begin if element in tap.FORMATS else None


def teach(record_template: Any, tensor: Tensor, port: "SitePort") -> bool:
    """Let the native writer launch the kernels for tensors like this one; False where it cannot."""
    if EXCHANGE is None or tensor.dtype.is_complex:
        return False
    if kernel_for(tensor.device, tensor.dtype) is None:
        return False
    from tapscope.kernels.triton import tap  # needs Triton

    launch = tap.row_launch(tensor.detach(), after_sketch=port.keep == "sketch")
    if port.keep == "sketch":
        found = port.device_sketch
        if launch is None or found is None or found.members != port.latest.members or is_pooled():
            return False
        from tapscope.kernels.triton.sketch import Part, sketch_launch

        by_rows, slot, part, _ = found.place
        how = sketch_launch(tensor.detach(), Part(*part), slot)
        if how is None:
            return False
        record_template.set_sketch_launch(*how, part, slot if by_rows else -1, found.grid, (port, by_rows))
    return launch is not None and bool(record_template.set_row_launch(EXCHANGE, tensor, *launch))


def parts_on(device: torch.device) -> "Parts":
    """Room for partial results of the kernels of one stream, in memory of its own."""
    from tapscope.kernels.triton import tap  # needs Triton

    def make() -> "Parts":
        tap.prepare(device)
        return tap.Parts(device)

    with torch.inference_mode(False):  # it outlives the inference mode of the first value
        return call_apart(make) if is_pooled() else make()  # and the pool of a graph


def _rows(device: torch.device) -> Tensor:
    """Rows that no kernel has begun: merging them does nothing."""
    shape = (BLOCK, ROW_WORDS)
    if is_pooled():
        return allocate(shape, torch.int64, device).zero_()
    return torch.zeros(shape, dtype=torch.int64, device=device)


class BlockMemory(NamedTuple):
    """What a block needs; used again by a later one of the same stream."""

    rows: Tensor
    """On the device."""
    host: Tensor
    """Page-locked."""
    copied: Any
    """Event: the rows are in host memory."""
    counters: Tensor | None = None
    """Of sketches, on the device: [rows, 256] float32."""
    host_counters: Tensor | None = None
    """Page-locked."""


class StatsBlock:
    """Rows of one stream, in order."""

    def __init__(
        self,
        device: torch.device,
        stream: torch.cuda.Stream,
        spare: "deque[BlockMemory]",
        parts: "Parts",
        sketches: "Sketches | None" = None,
    ) -> None:
        """``spare`` is the memory of earlier blocks, where that of this block goes in the end.

        With ``sketches`` each row has counters too. All three belong to the stream, and to one block at a time.
        """
        self._stream, self._spare, self._sketches = stream, spare, sketches
        self.parts = parts
        """Partial results of rows that are not merged."""
        try:
            self._memory = spare.popleft()
        except IndexError:
            with torch.inference_mode(False):  # it outlives the inference mode of the first value
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
        """Nobody reads its rows any more."""
        with contextlib.suppress(Exception):  # the device has failed
            if self._has_arrived or self._copied.query():
                self._spare.append(self._memory)

    def next_row(self) -> tuple[Tensor, "StatsRow"]:
        """The next row on the device, and its handle."""
        index = self.num_rows
        self.num_rows += 1
        return self._rows[index], StatsRow(self, index)

    def sketch(self, tensor: Tensor, request: "SketchRequest", index: int) -> None:
        """Begin the sketch of a dense tensor, next to row ``index``; raises as the kernel's launch does."""
        from tapscope.kernels.triton.sketch import Part  # needs Triton

        assert self._sketches is not None
        assert self._counters is not None
        out = self._counters.data_ptr() + 4 * COUNTERS * index
        self._sketches.add(tensor, request.keys, Part(*request.part), index, out)

    @property
    def is_full(self) -> bool:
        """Whether no other value fits in."""
        has_room = self.parts.has_room and (self._sketches is None or self._sketches.has_room)
        return self.num_rows == BLOCK or not has_room

    @property
    def place(self) -> tuple[int, ...]:
        """Where the native writer launches kernels to: addresses on the device of the rows, of room for partial
        results, and of the hash's key, number of rows and of partial results; and with sketches addresses of the
        counters, and as of :attr:`Sketches.place`."""
        from tapscope.kernels.triton.digest import keys_on  # needs Triton

        keys = keys_on(self._rows.device).data_ptr()
        rows = self._rows.data_ptr(), self.parts.memory.data_ptr(), keys, BLOCK, self.parts.count
        if self._sketches is None or self._counters is None:
            return rows
        return *rows, self._counters.data_ptr(), *self._sketches.place

    def close(self) -> None:
        """Start to copy the rows to the host."""
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
        if count and device not in _merges and (how := tap.merge_launch(self._rows)) is not None:
            _merges[device] = how

    def _close_by_driver(self) -> bool:
        """As :meth:`close`, by one call of the C++ library.

        False, and nothing is done, with sketches and before :meth:`close` has run once on the device.
        """
        rows, count, how = self._rows, self.num_rows, _merges.get(self._rows.device)
        if self._sketches is not None or how is None or not count:
            return False
        address = rows.data_ptr()
        copies = packed_copies([(self._host.data_ptr(), address, count * 8 * ROW_WORDS)])
        merge, stream = (how, count, address), self._stream.cuda_stream
        if not start_copies(rows.device, self._copied, copies, stream=stream, merge=merge):
            return False
        self.parts.used = 0
        return True

    def address_of(self, index: int) -> int:
        """Host address of a row."""
        return self._host.data_ptr() + index * 8 * ROW_WORDS

    def counters_of(self, index: int) -> int:
        """Host address of the counters of a row; 0 where there are none."""
        counters = self._host_counters
        return 0 if counters is None else counters.data_ptr() + 4 * COUNTERS * index

    def wait(self) -> None:
        """Sleep until a closed block has arrived."""
        if not (self._has_arrived or self._copied.query()):
            with cuda.device(self._rows.device):
                self._copied.synchronize()
        self._has_arrived = True


class StatsRow:
    """The handle of one value's row (:class:`tapscope.dumper.device.device.CopyHandle`)."""

    held_bytes = 0
    ran_out = False

    def __init__(self, block: StatsBlock, index: int) -> None:
        self._block, self._index = block, index
        self.address = block.address_of(index)
        self.counters_address = block.counters_of(index)

    @property
    def is_last(self) -> bool:
        """Whether it is the last row of its block."""
        return self._block.is_full

    def wait(self) -> None:
        """Sleep until the row has arrived; its block must be closed."""
        self._block.wait()
