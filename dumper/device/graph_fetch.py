"""Fetch: one device-to-host copy of the values that the taps of a CUDA graph wrote during one replay."""

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
    """The pending copy of one replay's tap memory to the host; starts when the first value is requested."""

    def __init__(self, memory: GraphMemory) -> None:
        self._memory = memory
        self._buffer: HostBuffer | None = None
        self._host: Tensor | None = None
        self._has_arrived = False
        self._last_offset = -1
        self.learned: list[tuple[Any, int, bool]] | None = None
        """While a replay plan is being learned: (record, offset of its value or -1, whether it has a payload)."""

    def __del__(self) -> None:
        """Return the host buffer to the graph's memory for the next replay, now that no handle reads the copy."""
        buffer = getattr(self, "_buffer", None)
        with contextlib.suppress(Exception):  # the device has failed
            if buffer is not None and (self._has_arrived or buffer.event.query()):
                self._memory.buffers.append(buffer)

    def handle_of(self, tensor: Tensor) -> "FetchHandle | None":
        """Return the handle of a tensor in the graph's memory; None for any other or non-contiguous tensor.

        Raises UnsupportedTensor for a stand-in, whose elements were not copied.
        """
        place = self._memory.find(tensor.data_ptr())
        if place is None:
            return None
        if self._memory.is_row(tensor):
            raise UnsupportedTensor(ONLY_STATISTICS)
        return self._handle(*place) if tensor.is_contiguous() else None

    def is_row(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is a stand-in, see :mod:`.graph_memory`."""
        return self._memory.is_row(tensor)

    def stats_handle_of(self, tensor: Tensor) -> "FetchHandle | None":
        """Return the handle of the statistics row of a stand-in; None for any other tensor."""
        if not self._memory.is_row(tensor):
            return None
        place = self._memory.find(tensor.data_ptr())
        assert place is not None
        return self._handle(*place)

    def is_sketched(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is a stand-in whose sketch is computed, too."""
        return tensor.data_ptr() in self._memory.sketched

    def sketch_handle_of(
        self, tensor: Tensor, info: StepInfo, place: DevicePlace | None
    ) -> "tuple[FetchHandle, int] | None":
        """Return (handle of the statistics, host address of the counters) of a stand-in at ``place`` in step ``info``.

        Returns None if the graph's kernels computed no sketch, or one for other rows or columns.
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
        """Start the copy if necessary; returns the handle of the whole memory."""
        return FetchHandle(self, self.begin())

    def begin(self) -> int:
        """Start the copy if necessary; returns the host address of the copied memory."""
        if self._host is None:
            self._begin()
        assert self._host is not None
        return self._host.data_ptr()

    def learn(self, record: Any) -> None:
        """Append a queued record, with the offset of its value, to :attr:`learned` if a plan is being learned."""
        if self.learned is not None:
            self.learned.append((record, self._last_offset, record.slot is not None))
        self._last_offset = -1

    def _begin(self) -> None:
        """Start copying the used memory to the host.

        Little memory is copied in the stream of the replay. More is first snapshotted on the device, if it has enough
        memory, and the snapshot is copied in a side stream.
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
        """Sleep until the copy has arrived."""
        buffer = self._buffer
        if buffer is None or self._has_arrived:
            return
        if not buffer.event.query():
            with cuda.device(self._memory.chunks[0].memory.device):
                buffer.event.synchronize()
        self._has_arrived = True


class FetchHandle:
    """Handle of one value of a fetch; a :class:`tapscope.dumper.device.device.CopyHandle`."""

    __slots__ = ("_fetch", "address", "held_bytes")
    is_last = False
    ran_out = False

    def __init__(self, fetch: Fetch, address: int) -> None:
        self._fetch = fetch
        self.address = address
        self.held_bytes = 0

    def wait(self) -> None:
        """Sleep until the fetch has arrived."""
        self._fetch.wait()


@contextmanager
def fetching(fetch: Fetch) -> Iterator[None]:
    """Context manager: this thread reads values in the graph's memory through ``fetch``."""
    before, _local.fetch = getattr(_local, "fetch", None), fetch
    try:
        yield
    finally:
        _local.fetch = before


def fetch_here() -> Fetch | None:
    """Return the fetch that is active in this thread; None outside of :func:`fetching`."""
    return getattr(_local, "fetch", None)


def _side(device: torch.device) -> Any:
    return _sides.get(device) or _sides.setdefault(device, cuda.Stream(device))
