"""Fetch: the values of one replay of a CUDA graph, copied from the memory of its taps to the host."""

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tapscope.core.observe import StepInfo
from tapscope.dumper.device.driver_copies import start_copies
from tapscope.dumper.device.graph_memory import ALIGNMENT, ROW_BYTES, Chunk, GraphMemory, HostBuffer
from tapscope.dumper.records.sketcher import DevicePlace
from tapscope.dumper.records.snapshot import UnsupportedTensor

ONLY_STATISTICS = "the CUDA graph was captured when no more than statistics was kept here; capture it again"
cuda: Any = torch.cuda  # parts of it have no type hints
_local = threading.local()
_sides: dict[torch.device, Any] = {}


class Fetch:
    """The values of one replay on their way to the host; begins when the first of them is asked for."""

    def __init__(self, memory: GraphMemory) -> None:
        self._memory = memory
        self._buffer: HostBuffer | None = None
        self._host: Tensor | None = None
        self._has_arrived = False
        self._last_offset = -1
        self.learned: list[tuple[Any, int, bool]] | None = None
        """While the records of a replay are learned: each record, the offset of its value or -1, whether it has
        bytes."""

    def __del__(self) -> None:
        """Nobody reads the copy any more: the next replay may use its memory."""
        buffer = getattr(self, "_buffer", None)
        with contextlib.suppress(Exception):  # the device has failed
            if buffer is not None and (self._has_arrived or buffer.event.query()):
                self._memory.buffers.append(buffer)

    def handle_of(self, tensor: Tensor) -> "FetchHandle | None":
        """The handle of a tensor in the graph's memory; None for any other, and for a part that is not dense.

        Raises UnsupportedTensor for a stand-in.
        """
        place = self._memory.find(tensor.data_ptr())
        if place is None:
            return None
        if self._memory.is_row(tensor):
            raise UnsupportedTensor(ONLY_STATISTICS)
        return self._handle(*place) if tensor.is_contiguous() else None

    def is_row(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is a stand-in."""
        return self._memory.is_row(tensor)

    def stats_handle_of(self, tensor: Tensor) -> "FetchHandle | None":
        """The handle of the statistics of a stand-in; None for any other tensor."""
        if not self._memory.is_row(tensor):
            return None
        place = self._memory.find(tensor.data_ptr())
        assert place is not None
        return self._handle(*place)

    def is_sketched(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is the stand-in of one whose sketch is computed."""
        return tensor.data_ptr() in self._memory.sketched

    def sketch_handle_of(
        self, tensor: Tensor, info: StepInfo, place: DevicePlace | None
    ) -> "tuple[FetchHandle, int] | None":
        """(handle of the statistics, address of the counters) of a stand-in at ``place`` in a step.

        None where the graph's kernels have computed another sketch than that.
        """
        kept = self._memory.sketched.get(tensor.data_ptr())
        if kept is None or place is None or self._memory.keys_of is not info:
            return None
        is_same = place.slots is None and place._replace(part=kept.part) == kept and place.part[1:] == kept.part[1:]
        handle = self.stats_handle_of(tensor) if is_same else None
        return None if handle is None else (handle, handle.address + ROW_BYTES)

    def _handle(self, chunk: Chunk, offset: int) -> "FetchHandle":
        address = self.begin()
        self._last_offset = self._memory.bases()[chunk] + offset
        return FetchHandle(self, address + self._last_offset)

    def whole(self) -> "FetchHandle":
        """Start to copy the memory, unless that was done; the handle of all of it."""
        return FetchHandle(self, self.begin())

    def begin(self) -> int:
        """Start to copy the memory, unless that was done; returns the address of the copy on the host."""
        if self._host is None:
            self._begin()
        assert self._host is not None
        return self._host.data_ptr()

    def learn(self, record: Any) -> None:
        """A record was queued."""
        if self.learned is not None:
            self.learned.append((record, self._last_offset, record.slot is not None))
        self._last_offset = -1

    def _begin(self) -> None:
        """Copy the used memory to the host.

        Little memory is copied in the stream of the replay; of more, a snapshot is copied in a stream of ours, unless
        the device has no memory for it.
        """
        memory = self._memory
        bases = memory.bases()
        last, base = next(reversed(bases.items()))
        total, device = base + -(-last.used // ALIGNMENT) * ALIGNMENT, last.memory.device
        if device.type != "cuda":
            with torch.inference_mode(False):
                self._host = torch.zeros(total, dtype=torch.uint8)
                for chunk, base in bases.items():
                    self._host[base : base + chunk.used].copy_(chunk.memory[: chunk.used])
            return
        self._buffer = buffer = memory.host_buffer(total)
        self._host = buffer.host
        aside = (_side(device), buffer.copy_of_snapshot) if buffer.copy_of_snapshot else None
        if start_copies(device, buffer.event, buffer.copies, aside=aside):
            return
        with torch.inference_mode(False), torch.no_grad():
            current = cuda.current_stream(device)
            for target, source in buffer.parts:
                target.copy_(source, non_blocking=True)
            if buffer.snapshot is None:
                buffer.event.record(current)
                return
            side = _side(device)
            side.wait_stream(current)
            with cuda.stream(side):
                buffer.host.copy_(buffer.snapshot, non_blocking=True)
            buffer.event.record(side)

    def wait(self) -> None:
        """Sleep until all of it is there."""
        buffer = self._buffer
        if buffer is None or self._has_arrived:
            return
        if not buffer.event.query():
            with cuda.device(self._memory.chunks[0].memory.device):
                buffer.event.synchronize()
        self._has_arrived = True


class FetchHandle:
    """One value of a fetch (:class:`tapscope.dumper.device.device.CopyHandle`)."""

    __slots__ = ("_fetch", "address", "held_bytes")
    is_last = False
    ran_out = False

    def __init__(self, fetch: Fetch, address: int) -> None:
        self._fetch = fetch
        self.address = address
        self.held_bytes = 0

    def wait(self) -> None:
        """Sleep until it is there."""
        self._fetch.wait()


@contextmanager
def fetching(fetch: Fetch) -> Iterator[None]:
    """Inside, values in the memory of a graph come by ``fetch``."""
    before, _local.fetch = getattr(_local, "fetch", None), fetch
    try:
        yield
    finally:
        _local.fetch = before


def fetch_here() -> Fetch | None:
    """The fetch that this thread is in."""
    return getattr(_local, "fetch", None)


def _side(device: torch.device) -> Any:
    return _sides.get(device) or _sides.setdefault(device, cuda.Stream(device))
