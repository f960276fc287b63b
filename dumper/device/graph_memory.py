"""Static memory of a captured graph: its taps write there at every replay, and one copy brings all of it to the host.

A tensor that a graph computes is gone when the graph goes on, because its memory is used again. So a tap that keeps the
tensor records a copy into this memory, and one that keeps statistics records the kernel that writes a row of 16 words.
After a replay the memory is snapshotted in the stream of the replay, and a stream of ours copies the snapshot to
page-locked memory (:class:`Fetch`), so that neither the next replay nor the host waits.

What a tap gives to the rules after a replay is a tensor in this memory. For statistics it is a *stand-in*: the shape
and dtype of the tensor over the memory of its row.
"""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tapscope.dumper.device.device_stats import ROW_WORDS, kernel_for
from tapscope.dumper.device.private_memory import call_apart
from tapscope.dumper.records.snapshot import UnsupportedTensor, learn_plain

_ALIGNMENT = 256
_FIRST_CHUNK, _LARGEST_CHUNK = 1 << 20, 64 << 20
_TABLE_ROWS = 512
ONLY_STATISTICS = "the CUDA graph was captured when no more than statistics was kept here; capture it again"
cuda: Any = torch.cuda  # parts of it have no type hints
_local = threading.local()


class GraphMemory:
    """The memory of the taps of one graph on one device. Offsets count over all chunks."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._chunks: list[_Chunk] = []
        self._rows: set[int] = set()  # addresses of rows of statistics
        self._table: _Table | None = None
        if device.type == "cuda":
            call_apart(lambda: _warm(device))

    @property
    def nbytes(self) -> int:
        """Bytes that are used."""
        return sum(chunk.used for chunk in self._chunks)

    def keep(self, tensor: Tensor) -> Tensor:
        """Record a copy of ``tensor``; returns where it will be after each replay. Empty tensors are returned as is."""
        if not tensor.numel():
            return tensor
        tensor = tensor.detach()
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        memory = self._place(tensor.numel() * tensor.element_size())
        with torch.inference_mode(False), torch.no_grad():
            target = memory.view(tensor.dtype).view(tensor.shape)
        target.copy_(tensor)
        learn_plain(target)
        return target

    def summarize(self, tensor: Tensor, *, is_packed: bool) -> Tensor | None:
        """Record the statistics of ``tensor``; returns its stand-in, or None where no kernel serves it.

        ``is_packed``: its rows are tokens, of which each replay may hold fewer, see :meth:`set_rows`.
        """
        if not tensor.numel() or kernel_for(tensor.device, tensor.dtype) is None:
            return None
        from tapscope.kernels.triton import tap  # needs Triton

        memory = self._place(8 * ROW_WORDS)
        with torch.inference_mode(False), torch.no_grad():
            row = memory.view(torch.int64)
            stand_in = memory[: tensor.element_size()].view(tensor.dtype)[0].expand(tensor.shape)
        tensor = tensor.detach()
        if is_packed:
            if self._table is None or self._table.is_full:
                self._table = _Table(self._device, self._table)
            flat, count = tap.flattened(tensor)
            entry = self._table.add(flat, count, len(tensor))
            tap.summarize_many(entry, flat.dtype, count * flat.element_size(), row.view(1, -1))
        else:
            tap.summarize(tensor, row)
        self._rows.add(memory.data_ptr())
        learn_plain(stand_in)
        return stand_in

    def set_rows(self, count: int) -> None:
        """The next replay computes ``count`` valid token rows; the remaining rows of packed tensors are padding."""
        if self._table is not None:
            self._table.set_rows(count)

    def find(self, address: int) -> tuple["_Chunk", int] | None:
        """The chunk that holds an address, and the offset there."""
        for chunk in self._chunks:
            offset = address - chunk.address
            if 0 <= offset < chunk.used:
                return chunk, offset
        return None

    def is_row(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is the stand-in of one whose statistics alone are computed."""
        return tensor.data_ptr() in self._rows

    @property
    def chunks(self) -> Sequence["_Chunk"]:
        """Its parts."""
        return self._chunks

    def _place(self, nbytes: int) -> Tensor:
        chunk = self._chunks[-1] if self._chunks else None
        if chunk is None or chunk.used + nbytes > chunk.memory.numel():
            size = min(_LARGEST_CHUNK, _FIRST_CHUNK << 2 * len(self._chunks))
            chunk = _Chunk(call_apart(lambda: _zeros((max(size, nbytes),), torch.uint8, self._device)))
            self._chunks.append(chunk)
        begin = chunk.used
        chunk.used = min(chunk.memory.numel(), -(-(begin + nbytes) // _ALIGNMENT) * _ALIGNMENT)
        with torch.inference_mode(False):
            return chunk.memory[begin : begin + nbytes]


class _Chunk:
    """One allocation."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.address = memory.data_ptr()
        self.used = 0


class _Table:
    """Addresses and element counts of packed tensors, which the kernels read on the device: [tensors, 2] int64."""

    def __init__(self, device: torch.device, before: "_Table | None") -> None:
        self._before = before
        self._memory = call_apart(lambda: _zeros((_TABLE_ROWS, 2), torch.int64, device))
        self._host = torch.zeros(_TABLE_ROWS, 2, dtype=torch.int64)
        self._row_counts = torch.zeros(_TABLE_ROWS, dtype=torch.int64)  # elements of a row
        self._used = 0
        self._count = -1

    @property
    def is_full(self) -> bool:
        """Whether another one is needed."""
        return self._used == _TABLE_ROWS

    def add(self, flat: Tensor, count: int, rows: int) -> Tensor:
        """A place for a tensor of ``rows`` rows and ``count`` elements: [1, 2] on the device."""
        index = self._used
        self._used += 1
        self._host[index, 0] = flat.data_ptr()
        self._row_counts[index] = count // rows
        self._count = -1
        return self._memory[index : index + 1]

    def set_rows(self, count: int) -> None:
        """Every tensor has ``count`` rows from the next launch on."""
        if self._before is not None:
            self._before.set_rows(count)
        if count == self._count:
            return
        self._count = count
        self._host[:, 1] = self._row_counts * count
        used = self._host[: self._used]
        self._memory[: self._used].copy_(used.pin_memory() if self._memory.is_cuda else used, non_blocking=True)


class Fetch:
    """The values of one replay on their way to the host; begins when the first of them is asked for."""

    def __init__(self, memory: GraphMemory) -> None:
        self._memory = memory
        self._host: Tensor | None = None
        self._bases: dict[int, int] = {}  # address of a chunk -> where its copy begins in the host's memory
        self._last_offset = -1
        self._event: Any = None
        self.learned: list[tuple[Any, int]] | None = None
        """While the records of a replay are learned: each record, and the offset of its value or -1."""
        self._snapshots: list[Tensor] = []

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

    def _handle(self, chunk: _Chunk, offset: int) -> "FetchHandle":
        address = self.begin()
        self._last_offset = self._bases[chunk.address] + offset
        return FetchHandle(self, address + self._last_offset)

    def begin(self) -> int:
        """Start to copy the memory, unless that was done; returns the address of the copy on the host."""
        if self._host is None:
            self._begin()
        assert self._host is not None
        return self._host.data_ptr()

    def learn(self, record: Any) -> None:
        """A record was queued."""
        if self.learned is not None:
            self.learned.append((record, self._last_offset))
        self._last_offset = -1

    def _begin(self) -> None:
        """Snapshot the used memory and copy it to the host; where there is no memory for that, copy directly."""
        chunks = [chunk for chunk in self._memory.chunks if chunk.used]
        device, total = chunks[0].memory.device, 0
        for chunk in chunks:
            self._bases[chunk.address] = total
            total += chunk.used
        with torch.inference_mode(False), torch.no_grad():
            if device.type != "cuda":
                self._host = torch.cat([chunk.memory[: chunk.used] for chunk in chunks])
                return
            self._host = host = torch.empty(total, dtype=torch.uint8, device="cpu", pin_memory=True)
            sources = [chunk.memory[: chunk.used] for chunk in chunks]
            current, side = cuda.current_stream(device), _side(device)
            try:
                snapshots = [source.clone() for source in sources]
            except torch.OutOfMemoryError:
                snapshots, side = sources, current
            else:
                side.wait_stream(current)
                self._snapshots = snapshots
            self._event = cuda.Event(blocking=True)
            with cuda.stream(side):
                for chunk, snapshot in zip(chunks, snapshots, strict=True):
                    base = self._bases[chunk.address]
                    host[base : base + chunk.used].copy_(snapshot, non_blocking=True)
                self._event.record(side)

    def wait(self) -> None:
        """Sleep until all of it is there."""
        if self._event is None:
            return
        if not self._event.query():
            with cuda.device(self._memory.chunks[0].memory.device):
                self._event.synchronize()
        self._snapshots = []  # the device memory of the snapshot is free again


class FetchHandle:
    """One value of a fetch (:class:`tapscope.dumper.device.device.CopyHandle`)."""

    __slots__ = ("_fetch", "address", "held_bytes")
    is_last = False
    is_under_way = True
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


_sides: dict[torch.device, Any] = {}


def _side(device: torch.device) -> Any:
    return _sides.get(device) or _sides.setdefault(device, cuda.Stream(device))


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory of zeros, which are there when this returns.

    Kernels that run before a table is filled, in a rehearsal, find tensors of no elements.
    """
    memory = torch.zeros(shape, dtype=dtype, device=device)
    if device.type == "cuda":
        cuda.current_stream(device).synchronize()
    return memory


def _warm(device: torch.device) -> None:
    """What kernels of statistics need on the device before a capture."""
    with cuda.device(device):
        if kernel_for(device, torch.float32) is not None:
            from tapscope.kernels.triton import tap

            tap.prepare(device)
            cuda.current_stream(device).synchronize()
