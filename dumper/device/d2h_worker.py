"""D2HWorker: copies values from a device to host memory and waits for the copies in a background thread."""

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch

from tapscope.dumper.device.async_copy import AsyncCopy, CopyFailed, DeviceDedup
from tapscope.dumper.device.device import CopyHandle, CudaDevice, Device
from tapscope.dumper.device.device_stats import SketchRequest, StatsBlock, StatsRow
from tapscope.dumper.device.graph_fetch import fetch_here
from tapscope.dumper.device.staging_budget import StagingBudget
from tapscope.dumper.records.payload_slot import PayloadSlot, SlotSource
from tapscope.dumper.records.record_lines import PendingLines
from tapscope.dumper.transport.packed_rows import PackedRows
from tapscope.kernels.native import summary

if TYPE_CHECKING:
    from tapscope.dumper.records.inflight_record import InflightRecord
    from tapscope.dumper.records.record_layout import RecordLayout
    from tapscope.dumper.transport.shm_ring import ShmRing

_log = logging.getLogger("tapscope")
TIME_LIMIT_S = 60.0
"""If a device completes no copy for this long, all its pending values count as lost."""
_PREPARE_S = 1.0
_YIELD_S = 0.01
"""Maximum time for which the worker's thread leaves the GIL to the forward's thread."""
_YIELD_BYTES = 16 * 1024 * 1024
"""Pending bytes above which the worker's thread stops yielding."""
_WAKE_RECORDS = 64
_WAKE_BYTES = 8 * 1024 * 1024
"""The sender is woken after this many completed records or bytes, and when no copy is pending."""


class D2HWorker:
    """Starts copies in the forward's thread and waits for them, in order, in its own thread.

    Staging clones on the device use at most ``limit`` bytes. Beyond that, a copy runs in the model's own stream, which
    slows the model down but does not block the host and needs no memory. While little is pending, the worker's thread
    sleeps so that the forward's thread can launch its kernels, because both share the GIL.
    """

    def __init__(
        self,
        device: Device,
        sink: SlotSource,
        limit: int,
        lost: Callable[[], None],
        time_limit_s: float = TIME_LIMIT_S,
    ) -> None:
        """Copy into slots of ``sink``. ``lost`` is called once for every value that did not arrive."""
        self._device = device
        self._lost = lost
        self._sink = sink
        self.staging = StagingBudget(limit)
        self._time_limit_s = time_limit_s
        self._wake: Callable[[], None] | None = getattr(sink, "wake", None)
        self._copies: queue.SimpleQueue[AsyncCopy | None] = queue.SimpleQueue()
        self.lock = threading.Lock()
        """Guards completion of a copy and ownership of its slot. Never held while acquiring a sink's lock."""
        self._is_closing = False
        self._end_yield = threading.Event()
        """Ends :meth:`_yield_to_model` early."""
        self._ready = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ring: ShmRing | None = None
        self._dedup = DeviceDedup()
        self._filling = threading.Lock()
        """Guards the statistics rows whose copy has not started."""
        self._rows: list[AsyncCopy] = []
        self._line_bytes = 0  # payload bytes of start_lines() since it last woke the thread

    # ---- the forward's thread

    def start(
        self,
        tensor: torch.Tensor,
        layout: "RecordLayout",
        slot: PayloadSlot,
        free: Callable[[PayloadSlot], None] | None,
        on_stats: Callable[[bytes], bool] | None = None,
        *,
        can_wait: bool = False,
    ) -> AsyncCopy:
        """Start copying ``tensor`` to ``slot``; returns immediately.

        With ``free``, only statistics are kept, and ``free(slot)`` is called when the copy is done. ``on_stats`` serves
        triggers: it is called in the worker's thread with the statistics and returns whether to keep the bytes. If it
        returns True, it has taken over the slot (with ``free``), or the record that owns the slot is sent with its
        bytes (without). With ``can_wait``, that call may happen after the end of the step.

        Raises the errors of :meth:`Device.start`, and CopyFailed when closed; the caller then still owns the slot.
        """
        self._require_open()
        if self._thread is None:
            self._start_thread()
        self._close_rows()
        copy, nbytes = AsyncCopy(self, layout, slot, free, on_stats), slot.nbytes
        clone = self.staging.begin(nbytes)
        try:
            fetch = fetch_here()
            fetched = None if fetch is None else fetch.handle_of(tensor)
            if fetched is None:
                copy.handle = ticket = self._device.start(tensor, slot, clone=clone > 0)
                self.staging.update(nbytes, clone, ticket.held_bytes, ran_out=ticket.ran_out)
            else:  # the tensor is part of a graph's memory, which is copied as a whole
                copy.handle, fetched.held_bytes = fetched, clone
        except BaseException:
            self.staging.fail(nbytes, clone)
            raise
        is_urgent = on_stats is not None and not can_wait  # a trigger should fire while its step is open
        if is_urgent or self.staging.pending_bytes > _YIELD_BYTES:
            self._end_yield.set()
        self._copies.put(copy)
        return copy

    def summarize(self, tensor: torch.Tensor, layout: "RecordLayout") -> AsyncCopy | None:
        """Start computing the statistics of ``tensor`` on the device; None if the device cannot.

        Raises as :meth:`start`.
        """
        self._require_open()
        fetch = fetch_here()
        if fetch is not None and (fetched := fetch.stats_handle_of(tensor)) is not None:
            return self.fetched(layout, fetched)
        return self._begin_row(layout, lambda: self._device.summarize(tensor))

    def fetched(
        self,
        layout: "RecordLayout",
        handle: CopyHandle,
        read: Callable[[int], tuple[bytes | PackedRows, bytes]] | None = None,
    ) -> AsyncCopy:
        """Queue statistics that a CUDA graph replay computes, behind ``handle``; ``read`` as in :meth:`start_lines`.

        Raises CopyFailed when closed.
        """
        self._require_open()
        if self._thread is None:
            self._start_thread()
        copy = AsyncCopy(self, layout, None, None, None)
        copy.handle, copy.read = handle, read
        self.staging.begin(0)
        self._copies.put(copy)
        return copy

    def sketch(
        self,
        tensor: torch.Tensor,
        layout: "RecordLayout",
        request: SketchRequest,
        taken: Callable[[int], None],
    ) -> AsyncCopy | None:
        """Start computing the statistics and the sketch of ``tensor`` on the device; None if the device cannot.

        ``taken`` is called in the worker's thread with the host address of the counters, [256] float32, which are
        valid until it returns. Raises as :meth:`start`.
        """
        self._require_open()
        return self._begin_row(layout, lambda: self._device.sketch(tensor, request), taken)

    def _begin_row(
        self, layout: "RecordLayout", begin: Callable[[], StatsRow | None], taken: Callable[[int], None] | None = None
    ) -> AsyncCopy | None:
        """Start a statistics row with ``begin`` and return its copy; None if the device cannot compute the row.

        ``taken``: see :meth:`sketch`.
        """
        with self._filling:
            row = begin()
            if row is None:
                return None
            copy = AsyncCopy(self, layout, None, None, None)
            copy.handle = row
            if taken is not None:
                copy.read = partial(read_sketch, taken, row.counters_address)
            self._rows.append(copy)
        if row.is_last:
            self._close_rows()
        return copy

    def start_lines(
        self,
        layout: "RecordLayout",
        begin: Callable[[], CopyHandle],
        slots: "Sequence[PayloadSlot]",
        read: Callable[[int], tuple[bytes | PackedRows, bytes]],
    ) -> AsyncCopy:
        """Call ``begin`` to start one copy that covers many values, and queue it.

        Once the copy has arrived, ``read(address)`` formats the record lines and fills ``slots``. Raises CopyFailed
        when closed, and RuntimeError when the device failed.
        """
        self._require_open()
        if self._thread is None:
            self._start_thread()
        copy = AsyncCopy(self, layout, None, None, None)
        copy.read, copy.slots, copy.handle = read, slots, begin()
        self._line_bytes += sum(slot.nbytes for slot in slots)
        if self._line_bytes > _YIELD_BYTES:
            self._line_bytes = 0
            self._end_yield.set()
        self.staging.begin(0)
        self._copies.put(copy)
        return copy

    def block(self, index: int, stream: int, *, sketches: bool) -> StatsBlock:
        """Return a block for statistics rows that the native writer launches, see :meth:`CudaDevice.block`."""
        assert isinstance(self._device, CudaDevice)
        return self._device.block(index, stream, sketches=sketches)

    def _require_open(self) -> None:
        """Raise CopyFailed when closed."""
        if self._is_closing:
            raise CopyFailed("the capture has ended")

    def _close_rows(self) -> None:
        """Start copying all open statistics rows to the host."""
        if not self._rows:
            return
        if self._thread is None:
            self._start_thread()
        with self._filling:
            rows, self._rows = self._rows, []
            self._device.close_rows()
        for copy in rows:
            self.staging.begin(0)
            self._copies.put(copy)

    def prepare(self) -> None:
        """Start the thread and page-lock the ring before the first value. Call outside the model's forward."""
        self._start_thread()
        self._ready.wait(_PREPARE_S)

    def _start_thread(self) -> None:
        with self._starting:
            if self._thread is None and not self._is_closing:
                self._thread = threading.Thread(target=self._run, name="tapscope-d2h", daemon=True)
                self._thread.start()

    def resize(self, limit: int) -> None:
        """Change the limit of staging memory, in bytes."""
        self.staging.limit = limit

    def hurry(self) -> None:
        """End the worker's yield, because a caller waits for a copy."""
        self._end_yield.set()

    def end_step(self) -> None:
        """Start copying open rows, and free staging memory soon if any is in use; statistics alone can wait."""
        self._close_rows()
        if self.staging.held_bytes:
            self._end_yield.set()

    def take_num_direct(self) -> int:
        """Return the number of large copies made in the model's own stream since the last call."""
        return self.staging.take_num_direct()

    # ---- the sender's thread

    @property
    def is_overdue(self) -> bool:
        """Whether copies are pending and none has completed within the time limit."""
        return self.staging.num_pending > 0 and time.monotonic() - self.staging.oldest_since > self._time_limit_s

    def finish(self, copy: AsyncCopy, record: "InflightRecord | PendingLines") -> None:
        """Complete ``record``, see :meth:`AsyncCopy.finish`; equal payloads of one generation are sent once."""
        with self.lock:
            is_done = copy.is_done
            if not is_done:
                slot, record.slot = record.slot, None
                if slot is not None or copy.slots:
                    copy.is_discarded, copy.free = True, self._sink.cancel
                copy.problem = f"the device did not deliver it within {self._time_limit_s:g} s"
        if copy.problem is not None:
            if (slot := record.slot) is not None:
                record.slot = None
                self._sink.cancel(slot)
            for slot in copy.slots if is_done else ():
                self._sink.cancel(slot)
            for _ in range(getattr(record, "num_lines", 1)):
                self._lost()
            raise CopyFailed(copy.problem)
        record.content = copy.text
        if isinstance(record, PendingLines):
            self._share_payloads(copy, record)
            return
        if record.slot is None:
            return
        payload = self._dedup.payload_of(record, copy.digest) if copy.is_wanted else None
        if payload is None or payload != record.payload:
            slot, record.slot, record.payload = record.slot, None, payload
            self._sink.cancel(slot)

    def _share_payloads(self, copy: AsyncCopy, lines: PendingLines) -> None:
        """Keep only the first of payloads with equal bytes; the other lines refer to its number."""
        kept, shared = [], []
        for index, (line, number, payload) in enumerate(lines.payloads):
            digest = copy.digest[16 * index : 16 * index + 16]
            same = self._dedup.payload_of_line(lines.generation, payload.slot.nbytes, digest, number)
            if same == number:
                kept.append((line, number, payload))
            else:
                shared.append((line, same))
                self._sink.cancel(payload.slot)
        lines.payloads, lines.shared = kept, shared

    def close(self) -> bool:
        """Wait for pending copies and end the thread; returns False if the time limit expired."""
        self._close_rows()
        with self._starting:
            thread, self._is_closing = self._thread, True
        self._end_yield.set()
        self._copies.put(None)
        if thread is not None:
            thread.join(self._time_limit_s)
        return thread is None or not thread.is_alive()

    # ---- the worker's thread

    def _run(self) -> None:
        try:
            self._device.enter()
        except Exception as error:  # noqa: BLE001 - each value will report the reason
            _log.debug("tapscope: %s", error)
        num_records = nbytes = 0
        while True:
            self._pin_ring()
            if not self._ready.is_set():
                self._ready.set()
            if self._copies.empty():
                copy = self._copies.get()
                self._yield_to_model()
            else:
                copy = self._copies.get()
            if copy is None:
                break
            self._complete(copy)
            num_records, nbytes = num_records + 1, nbytes + copy.nbytes
            if self._copies.empty() or num_records >= _WAKE_RECORDS or nbytes >= _WAKE_BYTES:
                num_records = nbytes = 0
                if self._wake is not None:
                    self._wake()
        if self._ring is not None:
            self._device.unpin()

    def _yield_to_model(self) -> None:
        """Sleep until a step with values ends, many bytes are pending, the worker closes, or ``_YIELD_S`` has passed.

        This leaves the GIL to the forward's thread and batches the statistics of several steps.
        """
        if not self._is_closing:
            self._end_yield.wait(_YIELD_S)
        self._end_yield.clear()

    def _pin_ring(self) -> None:
        """Page-lock the ring once it exists; the first values may precede it while the recorder starts."""
        ring = getattr(self._sink, "ring", None)
        if ring is not self._ring and ring is not None:
            self._ring = ring
            self._device.pin(ring)

    def _complete(self, copy: AsyncCopy) -> None:
        ticket, copy.handle = copy.handle, None
        assert ticket is not None
        problem: str | None = None
        try:
            ticket.wait()
            if not copy.is_discarded:
                self._read(copy, ticket.address)
        except Exception as error:  # noqa: BLE001 - one failed copy must not affect the others
            problem = str(error).strip().partition("\n")[0] or type(error).__name__
        held = ticket.held_bytes
        del ticket  # frees its memory before anyone is notified
        with self.lock:
            copy.problem = copy.problem or problem
            copy.is_done = True
            # If the bytes are wanted, on_stats has taken over the slot. A discarded record always frees its slot.
            free = copy.free if copy.is_discarded or not copy.is_wanted else None
        if free is not None:
            for slot in (copy.slot, *copy.slots):
                if slot is not None:
                    free(slot)
        self.staging.done(copy.nbytes, held)

    def _read(self, copy: AsyncCopy, address: int) -> None:
        """Compute statistics and hash of the copied bytes; in the same pass, copy staging memory to the slot."""
        slot, layout = copy.slot, copy.layout
        if copy.read is not None:
            copy.text, copy.digest = copy.read(address)
            return
        if slot is None:
            copy.text, copy.digest = summary.tell(address)
            return
        keeps = copy.free is None or copy.on_stats is not None
        target = slot.address if keeps and address != slot.address else 0
        copy.text, copy.digest = summary.take(address, layout.count, layout.dtype, target)
        if copy.on_stats is not None:
            copy.is_wanted = copy.on_stats(copy.text)


def read_sketch(taken: Callable[[int], None], counters: int, address: int) -> tuple[bytes, bytes]:
    """Pass the address of the counters to ``taken``, then return the statistics row at ``address``."""
    taken(counters)
    return summary.tell(address)
