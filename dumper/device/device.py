"""Device: copies values from an accelerator to the host without blocking the model.

A value is cloned in the stream that computed it, so that later writes of the model do not affect it. A side stream
waits for the clone (the host never does) and copies it to page-locked host memory. Without room for another clone, the
model's stream waits for the oldest copy of a value of the same size and overwrites its clone. This keeps the bus busy,
whereas copies in the model's own stream would alternate with its kernels. A clone stays referenced until its copy has
arrived, so that the allocator cannot reuse its memory earlier. ``record_stream`` would not bound the memory: the
allocator frees it only when it next checks its events.
"""

import ctypes
import logging
import time
from collections import deque
from contextlib import nullcontext
from typing import Any, Protocol

import torch

from tapscope.dumper.device.capture_mode import THREAD_LOCAL, exchange_capture_mode
from tapscope.dumper.device.device_stats import (
    BLOCK,
    BlockMemory,
    SketchRequest,
    StatsBlock,
    StatsRow,
    kernel_for,
    parts_on,
)
from tapscope.dumper.device.pending_clones import PendingClones, dense_strides
from tapscope.dumper.device.private_memory import copy_apart, is_pooled
from tapscope.dumper.records import snapshot as capture
from tapscope.dumper.records.payload_slot import PayloadSlot
from tapscope.dumper.records.snapshot import UnsupportedTensor
from tapscope.dumper.transport.shm_ring import ShmRing

_log = logging.getLogger("tapscope")
_QUERY_PERIOD_S = 0.05  # querying torch and the driver for memory takes about 0.1 ms
_RETRY_PERIOD_S = 0.005
_PARTS = 16
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every device
_SKETCHED = (torch.float32, torch.float16, torch.bfloat16)  # dtypes supported by kernels/triton/sketch.py


class CopyHandle(Protocol):
    """One pending copy; keeps all memory that the copy needs alive."""

    address: int
    """Host address of the bytes, in the slot or in staging memory."""
    held_bytes: int
    """Device memory of the staging clone in bytes; 0 when the copy runs in the model's own stream."""
    ran_out: bool
    """Whether the device had no memory for the clone."""

    def wait(self) -> None:
        """Sleep until the bytes have arrived; raises RuntimeError when the device failed."""
        ...


class Device(Protocol):
    """Starts copies from one kind of device."""

    def enter(self) -> None:
        """Set up the thread that waits for copies; called first in that thread."""
        ...

    def start(self, tensor: torch.Tensor, slot: PayloadSlot, *, clone: bool) -> CopyHandle:
        """Start copying a dense strided tensor to ``slot`` or to staging memory; returns immediately.

        ``clone`` permits a staging clone on the device. Raises UnsupportedTensor while a CUDA graph is being captured,
        RuntimeError when the device failed.
        """
        ...

    def summarize(self, tensor: torch.Tensor) -> "StatsRow | None":
        """Start computing the statistics of ``tensor`` on the device; None if the device cannot.

        Raises as :meth:`start`. The row arrives after :meth:`close_rows`.
        """
        ...

    def sketch(self, tensor: torch.Tensor, request: SketchRequest) -> "StatsRow | None":
        """Start computing the statistics and the sketch of ``tensor``, see :meth:`summarize`."""
        ...

    def close_rows(self) -> None:
        """Start copying all open rows to the host."""
        ...

    def pin(self, ring: ShmRing) -> None:
        """Page-lock ``ring`` if possible, so that copies go directly into it."""
        ...

    def unpin(self) -> None:
        """Release the ring before its memory is freed; no copy may be pending."""
        ...


class FreeMemoryBudget:
    """Device memory that staging clones may use without affecting the model.

    The budget is a fraction of the memory that this process could reserve beyond its peak. A model that has run before
    thus finds all the memory that it used. A first run finds most of the memory that it will need.
    """

    def __init__(self, index: int) -> None:
        self._index = index
        self._left = 0
        self._queried_at = 0.0

    def admits(self, nbytes: int) -> bool:
        """Return whether the budget has room for ``nbytes``, and deduct them until the device is queried again."""
        age = time.monotonic() - self._queried_at
        if age > _QUERY_PERIOD_S or (nbytes > self._left and age > _RETRY_PERIOD_S):
            self._queried_at, self._left = time.monotonic(), self._measure() // _PARTS
        if nbytes > self._left:
            return False
        self._left -= nbytes
        return True

    def _measure(self) -> int:
        stats = torch.cuda.memory_stats_as_nested_dict(self._index)
        if not stats:
            return 0
        reserved = stats["reserved_bytes"]["all"]
        free, total = torch.cuda.mem_get_info(self._index)
        allowed = int(torch.cuda.get_per_process_memory_fraction(self._index) * total)
        return int(max(min(free + reserved["current"], allowed) - reserved["peak"], 0))


class CudaDevice:
    """All CUDA devices of this process."""

    def __init__(self) -> None:
        self._sides: dict[int, torch.cuda.Stream] = {}
        self._pinned: torch.Tensor | None = None  # the ring, once page-locked
        self._index = torch.cuda.current_device() if torch.cuda.is_available() else 0
        self._budgets: dict[int, FreeMemoryBudget] = {}
        self._clones = PendingClones()
        self._learned: set[bool] = set()  # is_inference() of the tensors already registered with learn_plain()
        self._unsupported: set[tuple[torch.dtype, bool]] = set()  # (dtype, with sketch) that the device cannot compute
        self._blocks: dict[tuple[int, int, bool], StatsBlock] = {}  # (device, stream, with sketches) -> open block
        self._spare: dict[tuple[int, int, bool], deque[BlockMemory]] = {}
        self._sketches: dict[tuple[int, int, str], Any] = {}  # keys as for _parts
        self._parts: dict[tuple[int, int, str], Any] = {}  # (device, stream, use) -> buffer for partial results
        self._typed: dict[torch.dtype, torch.Tensor] = {}  # _pinned reinterpreted as each dtype
        self._native: dict[tuple[int, int, bool], tuple[Any, ...]] = {}  # key of _spare -> arguments of StatsBlock

    def enter(self) -> None:
        """Set the thread's device and capture mode, so that waiting here does not invalidate captures elsewhere."""
        torch.cuda.set_device(self._index)
        if exchange_capture_mode(THREAD_LOCAL) is None:
            _log.debug("tapscope: the capture mode of CUDA graphs cannot be set")

    def start(self, tensor: torch.Tensor, slot: PayloadSlot, *, clone: bool) -> "CudaCopyHandle":
        """See :meth:`Device.start`."""
        self._index = tensor.get_device()
        if self._index != torch.cuda.current_device():
            with torch.cuda.device(self._index):
                return self._start(tensor, slot, clone)
        return self._start(tensor, slot, clone)

    def _start(self, tensor: torch.Tensor, slot: PayloadSlot, clone: bool) -> "CudaCopyHandle":
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedTensor("a CUDA graph is being captured: its tensors hold no values yet")
        index = tensor.get_device()
        current = torch.cuda.current_stream(index)
        if (kind := tensor.is_inference()) not in self._learned:
            self._learned.add(kind)
            capture.learn_plain(tensor)
        host = self._host(slot, tensor)
        if clone:
            budget = self._budgets.get(index) or self._budgets.setdefault(index, FreeMemoryBudget(index))
            clone = budget.admits(tensor.nbytes)
        snapshot, ran_out = _snapshot(tensor) if clone else (None, False)
        if snapshot is None and not is_pooled():
            snapshot = self._clones.overwrite(current, tensor)
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        if snapshot is None:
            host.copy_(tensor, non_blocking=True)
            event.record(current)
            return CudaCopyHandle(index, event, host, None, ran_out)
        event.record(current)
        side = self._sides.get(index) or self._side(index)
        side.wait_event(event)
        torch.cuda.set_stream(side)
        try:
            host.copy_(snapshot, non_blocking=True)
        finally:
            torch.cuda.set_stream(current)
        event.record(side)
        self._clones.add(current, snapshot, event)
        return CudaCopyHandle(index, event, host, snapshot, ran_out)

    def summarize(self, tensor: torch.Tensor) -> StatsRow | None:
        """See :meth:`Device.summarize`."""
        return self._begin_row(tensor, None)

    def sketch(self, tensor: torch.Tensor, request: SketchRequest) -> StatsRow | None:
        """See :meth:`Device.sketch`."""
        if tensor.dtype not in _SKETCHED or is_pooled():
            return None
        return self._begin_row(tensor, request)

    def _begin_row(self, tensor: torch.Tensor, request: SketchRequest | None) -> StatsRow | None:
        kernel, about = kernel_for(tensor.device, tensor.dtype), (tensor.dtype, request is not None)
        if kernel is None or about in self._unsupported:
            return None
        self._index = tensor.get_device()
        if torch.cuda.is_current_stream_capturing():
            raise UnsupportedTensor("a CUDA graph is being captured: its tensors hold no values yet")
        if (kind := tensor.is_inference()) not in self._learned:
            self._learned.add(kind)
            capture.learn_plain(tensor)
        stream = torch.cuda.current_stream(self._index)
        with nullcontext() if self._index == torch.cuda.current_device() else torch.cuda.device(self._index):
            place = self._index, stream.cuda_stream, request is not None
            block = self._blocks.get(place)
            if block is None or block.num_rows == BLOCK:
                spare = self._spare.setdefault(place, deque())
                sketches = None if request is None else self._sketches_of(tensor.device, (*place[:2], "sketches"))
                parts = self._parts_of(tensor.device, *place[:2], "rows" if request is None else "sketches")
                block = self._blocks[place] = StatsBlock(tensor.device, stream, spare, parts, sketches)
            index = block.num_rows
            row, ticket = block.next_row()
            try:
                dense = tensor.detach()
                if request is not None:
                    block.sketch(dense := dense.contiguous(), request, index)
                kernel(dense, row, block.parts, after_sketch=request is not None)
            except Exception as error:  # noqa: BLE001 - compilers fail in many ways, and values can still be copied
                self._unsupported.add(about)
                what = "statistics" if request is None else "sketches"
                text = "tapscope: the device cannot compute %s of %s, so the values are copied to the host: %s"
                _log.warning(text, what, tensor.dtype, error)
                return None
        return ticket

    def _parts_of(self, device: torch.device, index: int, stream: int, use: str) -> Any:
        """Return the buffer for partial results; blocks that can be open at the same time have different ``use``."""
        place = index, stream, use
        if place not in self._parts:
            self._parts[place] = parts_on(device)
        return self._parts[place]

    def _sketches_of(self, device: torch.device, place: tuple[int, int, str]) -> Any:
        """Return the object that accumulates the sketches of one stream."""
        found = self._sketches.get(place)
        if found is None:
            from tapscope.kernels.triton.sketch import Sketches  # needs Triton

            with torch.inference_mode(False):  # the tensors outlive the inference mode of the first value
                found = self._sketches[place] = Sketches(device, BLOCK)
        return found

    def block(self, index: int, stream: int, *, sketches: bool = False) -> StatsBlock:
        """Return a block for rows that the native writer launches on ``stream``, the current stream of the device.

        ``index`` is the device index.
        """
        about = self._native.get((index, stream, sketches))
        if about is None:
            spare = self._spare.setdefault((index, stream, sketches), deque())
            device, place = torch.device("cuda", index), (index, stream, "native")
            adds, parts = self._sketches_of(device, place) if sketches else None, self._parts_of(device, *place)
            about = self._native[index, stream, sketches] = (
                device, torch.cuda.current_stream(index), spare, parts, adds
            )  # fmt: skip
        return StatsBlock(*about)

    def close_rows(self) -> None:
        """See :meth:`Device.close_rows`."""
        blocks, self._blocks = self._blocks, {}
        for block in blocks.values():
            block.close()

    def _side(self, index: int) -> torch.cuda.Stream:
        return self._sides.setdefault(index, torch.cuda.Stream(index))  # type: ignore[no-untyped-call]

    def _host(self, slot: PayloadSlot, tensor: torch.Tensor) -> torch.Tensor:
        """Return page-locked memory of the tensor's shape: the slot itself, or staging memory that torch caches."""
        pinned = self._pinned
        offset = slot.address - pinned.data_ptr() if pinned is not None else -1
        if pinned is not None and 0 <= offset <= pinned.numel() - slot.nbytes:
            typed = self._typed.get(tensor.dtype)
            if typed is None:
                typed = self._typed[tensor.dtype] = _as_elements(pinned, tensor.dtype)
            return typed.as_strided(tensor.shape, dense_strides(tensor.shape), offset // tensor.element_size())
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)

    def pin(self, ring: ShmRing) -> None:
        """Page-lock the ring. If the driver refuses, each copy goes through page-locked staging memory."""
        self.unpin()
        try:
            memory = torch.frombuffer((ctypes.c_ubyte * ring.nbytes).from_address(ring.address), dtype=torch.uint8)
            torch.cuda.check_error(_runtime().cudaHostRegister(ring.address, ring.nbytes, _PORTABLE))
        except Exception as error:  # noqa: BLE001 - drivers and sandboxes refuse in many ways
            _log.info("tapscope: the ring cannot be page-locked, so every value needs one more copy: %s", error)
        else:
            self._pinned = memory

    def unpin(self) -> None:
        """Undo :meth:`pin`."""
        pinned, self._pinned = self._pinned, None
        self._typed.clear()
        if pinned is not None:
            try:
                torch.cuda.check_error(_runtime().cudaHostUnregister(pinned.data_ptr()))
            except Exception as error:  # noqa: BLE001 - the device failed; nothing more can be done
                _log.debug("tapscope: the ring stays page-locked: %s", error)


class CudaCopyHandle:
    """A copy whose completion is signaled by a CUDA event."""

    __slots__ = ("_event", "_host", "_index", "_snapshot", "address", "held_bytes", "ran_out")

    def __init__(
        self,
        index: int,
        event: torch.cuda.Event,
        host: torch.Tensor,
        snapshot: torch.Tensor | None,
        ran_out: bool,
    ) -> None:
        self._index = index
        self._event = event
        self._host = host
        self._snapshot = snapshot
        self.address = host.data_ptr()
        self.held_bytes = snapshot.nbytes if snapshot is not None else 0
        self.ran_out = ran_out

    def wait(self) -> None:
        """Sleep until the event has completed; a blocking event sleeps in the driver instead of spinning."""
        if not self._event.query():  # type: ignore[no-untyped-call]
            with torch.cuda.device(self._index):
                self._event.synchronize()


def _as_elements(memory: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a tensor of ``dtype`` over ``memory``; not a view, which would inherit the current inference mode."""
    with torch.inference_mode(False):
        typed = torch.empty(0, dtype=dtype, device="cpu")
        typed.set_(memory.untyped_storage(), 0, (memory.numel() // typed.element_size(),), (1,))
        return typed


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _snapshot(tensor: torch.Tensor) -> tuple[torch.Tensor | None, bool]:
    """Return (a dense clone on the device or None, whether memory ran out).

    Raises UnsupportedTensor if an active tensor mode produces a tensor subclass.
    """
    try:
        snapshot = copy_apart(tensor) if is_pooled() else tensor.clone(memory_format=torch.contiguous_format)
    except torch.OutOfMemoryError:
        return None, True
    if type(snapshot) is not torch.Tensor:
        raise UnsupportedTensor(f"a tensor mode is active that makes a {type(snapshot).__name__} of every tensor")
    return snapshot, False
