"""GraphMemory: static device memory that the taps of a captured graph write to at every replay.

A graph reuses the memory of its intermediate tensors during a replay. A tap that keeps a tensor therefore captures a
copy into this static memory. A tap that keeps statistics captures the kernel that writes a row of 16 words. After a
replay, the memory is snapshotted in the stream of the replay, and a side stream copies the snapshot to page-locked
memory (:class:`~.graph_fetch.Fetch`). Neither the next replay nor the host waits.

If the model promises that values do not change after its hooks saw them (``tap_values_final``), taps are batched: their
tensors stay referenced, one launch summarizes all tensors of a dtype, and one launch sketches them. The launches run on
a stream that forks from the model's stream and joins it when the call ends. Otherwise each tap launches its own kernel
immediately.

After a replay, each tap passes a tensor in this memory to the rules. For statistics this tensor is a *stand-in*: it has
the shape and dtype of the original, but its storage is the statistics row. The counters of a sketch follow the row.
"""

import contextlib
import functools
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tapscope.core.observe import StepInfo
from tapscope.dumper.device.device_row_keys import PADDING
from tapscope.dumper.device.device_stats import ROW_WORDS, kernel_for
from tapscope.dumper.device.driver_copies import packed_copies
from tapscope.dumper.device.private_memory import call_apart
from tapscope.dumper.records.sketcher import DevicePlace
from tapscope.dumper.records.snapshot import learn_plain
from tapscope.run_format.sketch import NBYTES

ALIGNMENT = 256
"""Alignment of values in bytes."""
ROW_BYTES = 8 * ROW_WORDS
"""Size of a statistics row in bytes; the counters of a sketch follow the row."""
_FIRST_CHUNK, _LARGEST_CHUNK = 1 << 20, 64 << 20
_TABLE_ROWS = 512
_LAUNCH_BYTES = 64 << 20
"""Bytes of batched tensors above which their taps are launched, concurrently with the model."""
_WAITING_BYTES = 256 << 20
"""Maximum bytes of batched tensors kept alive in the graph's pool; beyond it the model waits for their taps."""
_DIRECT_BYTES = 256 << 10
"""Memory up to this size is copied to the host in the stream of the replay, which is faster than a snapshot."""
cuda: Any = torch.cuda  # parts of it have no type hints


class _Deferred(NamedTuple):
    """A tensor of a tap whose kernel is launched later, in a batch."""

    tensor: Tensor
    row: Tensor | None
    """Destination of the statistics; None for a copy."""
    target: Tensor | None
    """Destination of the copy; None for statistics."""
    num_rows: int | None
    """Number of token rows of a packed tensor; None if the rows are not tokens."""
    version: int
    place: DevicePlace | None
    """Position of the tensor's elements in the whole tensor; None without a sketch."""


class HostBuffer(NamedTuple):
    """Host buffer, and optional device snapshot, for the memory of one replay."""

    host: Tensor
    """Page-locked destination, uint8."""
    snapshot: Tensor | None
    """Intermediate copy on the device; None to copy directly in the stream of the replay."""
    event: Any
    """CUDA event recorded after the copy to the host."""
    parts: list[tuple[Tensor, Tensor]]
    """(destination, source in the graph's memory) of the first copies, to the snapshot or directly to the host."""
    copies: bytes
    """:attr:`parts` as packed by :func:`.packed_copies`."""
    copy_of_snapshot: bytes
    """The packed copy from the snapshot to the host; empty without a snapshot."""


class GraphMemory:
    """Memory of the taps of one graph on one device, allocated in chunks. Offsets count across all chunks."""

    def __init__(self, device: torch.device, *, values_are_final: bool = False) -> None:
        """``values_are_final``: no tensor that a tap sees is written to later in the same call."""
        self._device = device
        self._chunks: list[Chunk] = []
        self._bases: dict[Chunk, int] | None = None  # None after the memory has grown
        self._rows: set[int] = set()  # addresses of statistics rows
        self.sketched: dict[int, DevicePlace] = {}
        """Address of a statistics row -> place of the tensor, for tensors whose sketch is computed, too."""
        self.keys_of: StepInfo | None = None
        """The step whose row keys the latest sketches use; None if the keys were unknown."""
        self._keys: Tensor | None = None
        self._num_keys = 0  # keys that are not padding
        self._table: _Table | None = None
        self._sketch_tables: list[Tensor] = []  # read by the captured sketch launches, so they must stay alive
        self._defers = values_are_final and device.type == "cuda"
        self._deferred: list[_Deferred] = []
        self._launched: list[_Deferred] = []
        self._known: dict[tuple[Any, ...], Tensor] = {}  # identity of a batched tensor -> its stand-in
        self._side: Any = None
        self.problems: list[str] = []
        """Reasons why statistics of the graph may differ from those of the values that the hooks saw."""
        self.buffers: deque[HostBuffer] = deque()
        """Buffers of earlier replays, ready for reuse."""
        if device.type == "cuda":
            call_apart(lambda: _warm(device))

    @property
    def nbytes(self) -> int:
        """Number of bytes in use."""
        return sum(chunk.used for chunk in self._chunks)

    def keep(self, tensor: Tensor) -> Tensor:
        """Capture a copy of ``tensor``; returns the tensor that contains the copy after each replay.

        An empty tensor is returned unchanged.
        """
        if not tensor.numel():
            return tensor
        tensor = tensor.detach()
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        memory = self._place(tensor.numel() * tensor.element_size())
        with torch.inference_mode(False), torch.no_grad():
            target = memory.view(tensor.dtype).view(tensor.shape)
        learn_plain(target)
        if self._defers:
            self._defer(_Deferred(tensor, None, target, None, _version(tensor), None))
        else:
            target.copy_(tensor)
        return target

    def summarize(self, tensor: Tensor, num_rows: int | None, place: DevicePlace | None = None) -> Tensor | None:
        """Capture the statistics of ``tensor``; returns its stand-in, or None if no kernel supports the tensor.

        ``num_rows`` is the number of token rows, of which a replay may compute fewer, see :meth:`set_rows`; None if
        the rows are not tokens. With ``place``, the sketch is captured, too, with the row keys of :meth:`set_keys`.
        """
        if not tensor.numel() or kernel_for(tensor.device, tensor.dtype) is None:
            return None
        if place is not None and not _prepare_sketch(tensor.device, tensor.dtype):
            return None
        from tapscope.kernels.triton import tap  # needs Triton

        tensor = tensor.detach()
        identity = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), num_rows, place, _version(tensor))
        if (known := self._known.get(identity)) is not None:
            return known
        memory = self._place(ROW_BYTES if place is None else ROW_BYTES + NBYTES, ROW_BYTES)
        with torch.inference_mode(False), torch.no_grad():
            row = memory[:ROW_BYTES].view(torch.int64)
            stand_in = memory[: tensor.element_size()].view(tensor.dtype)[0].expand(tensor.shape)
        if place is not None:
            assert num_rows is not None
            self.sketched[memory.data_ptr()] = place
            if self._keys is None:
                shape = (num_rows,)
                self._keys = call_apart(lambda: _filled(shape, PADDING, torch.int64, self._device))
        if self._defers:
            readable = _readable(tensor)
            if readable.data_ptr() == tensor.data_ptr():  # tensor stays referenced, so its address stays unique
                self._known[identity] = stand_in
            self._defer(_Deferred(readable, row, None, num_rows, _version(readable), place))
        elif num_rows is not None:
            waiting = [_Deferred(_readable(tensor), row, None, num_rows, 0, place)]
            self._summarize(waiting)
            self._sketch(waiting)
        else:
            tap.summarize(tensor, row)
        self._rows.add(memory.data_ptr())
        learn_plain(stand_in)
        return stand_in

    def _defer(self, waiting: _Deferred) -> None:
        """Add a tensor to the batch, and launch the batch once it is large enough."""
        self._deferred.append(waiting)
        if sum(each.tensor.nbytes for each in self._deferred) >= _LAUNCH_BYTES:
            self._launch()
            if sum(each.tensor.nbytes for each in self._launched) >= _WAITING_BYTES:
                self._join()

    def finish(self) -> None:
        """Launch the batched taps and make the model's stream wait for them; called at the end of a call."""
        self._launch()
        self._join()

    def _launch(self) -> None:
        """Launch the batched taps in the side stream."""
        waiting, self._deferred = self._deferred, []
        if not waiting:
            return
        if any(_version(each.tensor) != each.version for each in waiting):
            self.problems.append(
                "a value was written to in place after its hook: its statistics may be of the later value"
            )
        current = cuda.current_stream(self._device)
        self._side = self._side or _fork_of(self._device)
        self._side.wait_stream(current)
        self._launched += waiting
        with cuda.stream(self._side):
            self._summarize([each for each in waiting if each.row is not None])
            self._sketch(waiting)
            targets = [each.target for each in waiting if each.target is not None]
            sources = [each.tensor for each in waiting if each.target is not None]
            if targets:
                with torch.inference_mode(False), torch.no_grad():
                    torch._foreach_copy_(targets, sources)

    def _join(self) -> None:
        """Make the model's stream wait for the launched taps, and release their tensors."""
        if self._launched:
            cuda.current_stream(self._device).wait_stream(self._side)
        self._launched.clear()
        self._known.clear()

    def _summarize(self, waiting: "list[_Deferred]") -> None:
        """Launch the statistics kernel, once per dtype and table of 512 tensors."""
        from tapscope.kernels.triton import tap  # needs Triton

        by_type: dict[torch.dtype, list[_Deferred]] = {}
        for each in sorted(waiting, key=lambda each: each.tensor.nbytes, reverse=True):  # a plan requires this order
            by_type.setdefault(each.tensor.dtype, []).append(each)
        for same_dtype in by_type.values():
            for first in range(0, len(same_dtype), _TABLE_ROWS):
                batch = same_dtype[first : first + _TABLE_ROWS]
                if self._table is None or not self._table.has_room(len(batch)):
                    self._table = _Table(self._device, self._table)
                rows = [each.row for each in batch if each.row is not None]
                plan = tap.plan_of([each.tensor for each in batch], rows)
                tap.summarize_many(plan, *self._table.add(plan, [each.num_rows for each in batch]))

    def _sketch(self, waiting: "Sequence[_Deferred]") -> None:
        """Launch the sketch kernel once per dtype, and then the kernel that merges partial counters."""
        if not any(each.place for each in waiting):
            return
        from tapscope.kernels.triton.sketch import Part  # needs Triton
        from tapscope.kernels.triton.sketch_table import Request, sketch_many

        requests = []
        for each in waiting:
            if each.place is not None and each.row is not None:
                assert self._keys is not None
                keys, out = self._keys[each.place.slot :], each.row.data_ptr() + ROW_BYTES
                requests.append(Request(each.tensor, keys, Part(*each.place.part), out))
        self._sketch_tables += sketch_many(_sketches_of(self._device), requests, self._upload)

    def _upload(self, table: Tensor) -> Tensor:
        """Copy ``table`` to the device, outside of the graph's pool, and wait for the copy."""
        uploaded: Tensor = call_apart(lambda: _complete(self._device, lambda: table.to(self._device)))
        return uploaded

    def set_keys(self, info: StepInfo | None, keys: Tensor | None) -> None:
        """Set the step and row keys of the next replay, see :class:`.DeviceRowKeys`.

        If ``keys`` is None (unknown), the next sketches are empty.
        """
        if self._keys is None:
            return
        self.keys_of = None if keys is None else info
        count = 0 if keys is None else min(len(keys), len(self._keys))
        if count < self._num_keys:
            self._keys[count:].fill_(PADDING)
        if keys is not None:
            self._keys[:count].copy_(keys[:count])
        self._num_keys = count

    def set_rows(self, count: int | None) -> None:
        """Set the number of valid token rows of the next replay; further rows of packed tensors are padding.

        None makes all rows valid.
        """
        if self._table is not None:
            self._table.set_rows(count)

    def find(self, address: int) -> tuple["Chunk", int] | None:
        """Return the chunk that contains a device address, and the offset in the chunk; None if there is none."""
        for chunk in self._chunks:
            offset = address - chunk.address
            if 0 <= offset < chunk.used:
                return chunk, offset
        return None

    def is_row(self, tensor: Tensor) -> bool:
        """Return whether ``tensor`` is a stand-in: its statistics, but not its elements, are in this memory."""
        return tensor.data_ptr() in self._rows

    def host_buffer(self, nbytes: int) -> HostBuffer:
        """Return a buffer for one replay, reused from an earlier replay if possible."""
        while self.buffers:
            buffer = self.buffers.popleft()
            if buffer.host.numel() == nbytes:
                return buffer
        with torch.inference_mode(False):  # the buffer outlives the caller's inference mode
            host = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            snapshot = None
            if nbytes > _DIRECT_BYTES:
                with contextlib.suppress(torch.OutOfMemoryError):
                    snapshot = call_apart(lambda: torch.empty(nbytes, dtype=torch.uint8, device=self._device))
            target, parts, copies = host if snapshot is None else snapshot, [], []
            for chunk, base in self.bases().items():
                parts.append((target[base : base + chunk.used], chunk.memory[: chunk.used]))
                copies.append((target.data_ptr() + base, chunk.address, chunk.used))
        later = [] if snapshot is None else [(host.data_ptr(), snapshot.data_ptr(), nbytes)]
        event = cuda.Event(blocking=True)
        return HostBuffer(host, snapshot, event, parts, packed_copies(copies), packed_copies(later))

    def bases(self) -> "dict[Chunk, int]":
        """Return the offset of each used chunk in the host copy, in bytes."""
        if self._bases is None:
            self._bases, total = {}, 0
            for chunk in self._chunks:
                if chunk.used:
                    self._bases[chunk] = total
                    total += -(-chunk.used // ALIGNMENT) * ALIGNMENT
        return self._bases

    @property
    def chunks(self) -> Sequence["Chunk"]:
        """The allocated chunks."""
        return self._chunks

    def _place(self, nbytes: int, alignment: int = ALIGNMENT) -> Tensor:
        chunk = self._chunks[-1] if self._chunks else None
        if chunk is None or chunk.used + alignment + nbytes > chunk.memory.numel():
            size = min(_LARGEST_CHUNK, _FIRST_CHUNK << 2 * len(self._chunks))
            chunk = Chunk(call_apart(lambda: _zeros((max(size, nbytes + alignment),), torch.uint8, self._device)))
            self._chunks.append(chunk)
        begin = -(-chunk.used // alignment) * alignment
        chunk.used, self._bases = begin + nbytes, None
        with torch.inference_mode(False):
            return chunk.memory[begin : begin + nbytes]


class Chunk:
    """One device allocation, filled from the start."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self.address = memory.data_ptr()
        self.used = 0


class _Table:
    """Device table of tensor descriptors for the statistics kernels, see ``tap.Plan``; tables form a linked list."""

    def __init__(self, device: torch.device, before: "_Table | None") -> None:
        from tapscope.kernels.triton import tap  # needs Triton

        self._before = before
        self._device = device
        self._memory = call_apart(lambda: _zeros((_TABLE_ROWS, tap.COLUMNS), torch.int64, device))
        self._host = torch.zeros(_TABLE_ROWS, tap.COLUMNS, dtype=torch.int64)
        self._counts = self._host[:, tap.COUNT]
        self._row_counts = torch.zeros(_TABLE_ROWS, dtype=torch.int64)  # elements per token row; 0 if not packed
        self._whole = torch.zeros(_TABLE_ROWS, dtype=torch.int64)  # elements of the whole tensor
        self._places: list[Tensor] = []  # places of each captured launch, which must stay alive
        self._used = 0
        self._count: int | None = -1

    def has_room(self, count: int) -> bool:
        """Return whether the table has room for ``count`` more tensors."""
        return self._used + count <= _TABLE_ROWS

    def add(self, plan: Any, num_rows: "Sequence[int | None]") -> tuple[Tensor, Tensor]:
        """Upload a plan; returns its table rows and its places on the device.

        ``num_rows`` has the number of token rows of each tensor, None for a tensor that is not packed.
        """
        first, self._used = self._used, self._used + len(plan.table)
        added = slice(first, self._used)
        self._host[added] = plan.table
        self._whole[added] = self._counts[added]
        tokens = torch.tensor([rows or 0 for rows in num_rows], device="cpu")
        self._row_counts[added] = torch.where(tokens > 0, self._whole[added] // tokens.clamp(min=1), 0)
        self._count = -1
        entries = self._memory[added]

        def upload() -> Tensor:
            entries.copy_(plan.table)
            places: Tensor = plan.places.to(self._device)
            return places

        self._places.append(call_apart(lambda: _complete(self._device, upload)))
        return entries, self._places[-1]

    def set_rows(self, count: int | None) -> None:
        """Set the number of valid rows of every packed tensor for the next launch; None makes all rows valid."""
        if self._before is not None:
            self._before.set_rows(count)
        if count == self._count:
            return
        self._count = count
        rows = self._row_counts
        self._counts[:] = self._whole if count is None else torch.where(rows > 0, rows * count, self._whole)
        used = self._host[: self._used]
        self._memory[: self._used].copy_(used.pin_memory() if self._memory.is_cuda else used, non_blocking=True)


_forks: dict[torch.device, Any] = {}


def _fork_of(device: torch.device) -> Any:
    """Return the side stream for batched taps on ``device``, into which a capture forks."""
    return _forks.get(device) or _forks.setdefault(device, call_apart(lambda: cuda.Stream(device)))


def _version(tensor: Tensor) -> int:
    """Return torch's counter of in-place writes; always 0 for inference tensors, which have no counter."""
    return 0 if tensor.is_inference() else tensor._version


def _readable(tensor: Tensor) -> Tensor:
    """Return ``tensor`` as real elements in a layout that the kernel can read; copies only if necessary."""
    from tapscope.kernels.triton import tap  # needs Triton

    flat = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    if tap.row_gap(flat) is not None:
        return flat
    dense = flat.contiguous()
    return dense.clone() if dense.data_ptr() % 16 else dense


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate a tensor of zeros and wait until it is initialized."""
    return _filled(shape, 0, dtype, device)


def _filled(shape: tuple[int, ...], value: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Allocate a tensor filled with ``value`` and wait until it is initialized."""
    memory = torch.full(shape, value, dtype=dtype, device=device)
    if device.type == "cuda":
        cuda.current_stream(device).synchronize()
    return memory


@functools.cache
def _sketches_of(device: torch.device) -> Any:
    """Return the buffer for partial sketch counters; all graphs share it, because replays run one after another."""
    from tapscope.kernels.triton.sketch import PROGRAM_BYTES, Sketches, most_programs  # needs Triton

    room = _LAUNCH_BYTES // PROGRAM_BYTES + _TABLE_ROWS + most_programs(device)  # a full batch and one large tensor
    return call_apart(lambda: _complete(device, lambda: Sketches(device, _TABLE_ROWS, room)))


def _complete(device: torch.device, make: Callable[[], Any]) -> Any:
    """Call ``make`` with ``device`` as the current device, wait for its work on the stream, and return its result."""
    with contextlib.nullcontext() if device.type == "cpu" else cuda.device(device), torch.inference_mode(False):
        made = make()
        if device.type == "cuda":
            cuda.current_stream(device).synchronize()
    return made


@functools.cache
def _prepare_sketch(device: torch.device, dtype: torch.dtype) -> bool:
    """Compile and load the sketch kernels for ``dtype`` before they are captured; False if the dtype is unsupported."""
    from tapscope.kernels.triton import sketch_table  # needs Triton
    from tapscope.kernels.triton.sketch import TYPES

    if dtype not in TYPES:
        return False
    call_apart(lambda: _complete(device, lambda: sketch_table.launch_variants(device, dtype)))
    return True


def _warm(device: torch.device) -> None:
    """Prepare the statistics kernels on the device before a capture."""
    with cuda.device(device):
        if kernel_for(device, torch.float32) is not None:
            from tapscope.kernels.triton import tap

            tap.prepare(device)
            cuda.current_stream(device).synchronize()
