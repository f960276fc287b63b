"""Drain: values on their way from a device to host memory, and the thread that waits for them."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from tapscope.dumper.device.async_copy import AsyncCopy, CopyFailed, DeviceDedup
from tapscope.dumper.device.device import Device
from tapscope.dumper.device.graph_memory import fetch_here
from tapscope.dumper.device.staging_budget import StagingBudget
from tapscope.dumper.records.payload_slot import PayloadSlot, Sink
from tapscope.kernels.native import summary

if TYPE_CHECKING:
    from tapscope.dumper.records.inflight_record import InflightRecord
    from tapscope.dumper.records.site_port import RecordLayout
    from tapscope.dumper.transport.shm_ring import ShmRing

_log = logging.getLogger("tapscope")
TIME_LIMIT_S = 60.0
"""A device that completes no copy for so long is given up, and every value that waits for it."""
_PREPARE_S = 1.0
_NAP_S = 0.01
_NAP_BYTES = 16 * 1024 * 1024
_CHEER_RECORDS = 64
_CHEER_BYTES = 8 * 1024 * 1024


class D2HWorker:
    """Starts copies in the forward's thread, and waits for them, in order, in one of its own.

    Clones on the device take at most ``limit`` bytes; beyond, a copy is made in the model's own stream, which slows the
    model down but neither waits nor takes memory. The thread lets a step launch before it wakes, where memory allows:
    the two share the interpreter's lock.
    """

    def __init__(
        self,
        device: Device,
        sink: Sink,
        limit: int,
        lost: Callable[[], None],
        time_limit_s: float = TIME_LIMIT_S,
    ) -> None:
        """``lost`` is called for every value that did not come."""
        self._device = device
        self._lost = lost
        self._backlog = sink
        self.staging = StagingBudget(limit)
        self._time_limit_s = time_limit_s
        self._wake: Callable[[], None] | None = getattr(sink, "wake", None)
        self._copies: queue.SimpleQueue[AsyncCopy | None] = queue.SimpleQueue()
        self.lock = threading.Lock()
        """Guards whether a copy is done and who gets its slot. Never held while a lock of a sink is taken."""
        self._skip_nap = self._is_closing = False
        self._ready = threading.Event()
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._ring: ShmRing | None = None
        self._dedup = DeviceDedup()
        self._filling = threading.Lock()
        """Guards the rows that are not on their way yet."""
        self._rows: list[AsyncCopy] = []

    # ---- the forward's thread

    def start(
        self,
        tensor: torch.Tensor,
        layout: "RecordLayout",
        slot: PayloadSlot,
        free: Callable[[PayloadSlot], None] | None,
        ask: Callable[[bytes], bool] | None = None,
    ) -> AsyncCopy:
        """Begin to copy; with ``free`` only statistics are wanted, and the slot goes back when it is done.

        ``ask`` is for triggers: it is called in the drain's thread with the statistics, and says whether the bytes are
        wanted after all. With ``free`` that means that it has taken the slot over; without, that the record, which must
        hold the slot, is sent with them.

        Raises what :meth:`Device.start` does, and NotArrived when closed; the slot is then still the caller's.
        """
        if self._is_closing:
            raise CopyFailed("the capture has ended")
        if self._thread is None:
            self._start_thread()
        self._close_rows()
        copy, nbytes = AsyncCopy(self, layout, slot, free, ask), slot.nbytes
        clone = self.staging.begin(nbytes)
        try:
            fetch = fetch_here()
            fetched = None if fetch is None else fetch.handle_of(tensor)
            if fetched is None:
                copy.handle = ticket = self._device.start(tensor, slot, clone=clone > 0)
                self.staging.update(nbytes, clone, ticket.held_bytes, ran_out=ticket.ran_out)
            else:  # a part of the snapshot of a graph's memory
                copy.handle, fetched.held_bytes = fetched, clone
        except BaseException:
            self.staging.fail(nbytes, clone)
            raise
        if ask is not None:  # a trigger should fire while its step is open
            self._skip_nap = True
        self._copies.put(copy)
        return copy

    def summarize(self, tensor: torch.Tensor, layout: "RecordLayout") -> AsyncCopy | None:
        """Begin to compute statistics on the device; None where it cannot. Raises as :meth:`start`."""
        if self._is_closing:
            raise CopyFailed("the capture has ended")
        fetch = fetch_here()
        if fetch is not None and (fetched := fetch.stats_handle_of(tensor)) is not None:
            if self._thread is None:
                self._start_thread()
            copy = AsyncCopy(self, layout, None, None, None)
            copy.handle = fetched
            self.staging.begin(0)
            self._copies.put(copy)
            return copy
        with self._filling:
            row = self._device.summarize(tensor)
            if row is None:
                return None
            copy = AsyncCopy(self, layout, None, None, None)
            copy.handle = row
            self._rows.append(copy)
        if row.is_last:
            self._close_rows()
        return copy

    def _close_rows(self) -> None:
        """What was summarised so far may come."""
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
        """Let the ring be page-locked before the first value comes; to be called outside the model's forward."""
        self._start_thread()
        self._ready.wait(_PREPARE_S)

    def _start_thread(self) -> None:
        with self._starting:
            if self._thread is None and not self._is_closing:
                self._thread = threading.Thread(target=self._run, name="tapscope-drain", daemon=True)
                self._thread.start()

    def resize(self, limit: int) -> None:
        """Another bound of the clones, from now on."""
        self.staging.limit = limit

    def end_nap(self) -> None:
        """A step ended: the processor has time now."""
        self._close_rows()
        self._skip_nap = True

    def take_num_direct(self) -> int:
        """Copies of more than a few bytes made in the model's own stream since the last time."""
        return self.staging.take_num_direct()

    # ---- the pipeline's thread

    @property
    def is_overdue(self) -> bool:
        """Whether the device has completed nothing for the time limit although something waits."""
        return self.staging.num_pending > 0 and time.monotonic() - self.staging.oldest_since > self._time_limit_s

    def finish(self, copy: AsyncCopy, record: "InflightRecord") -> None:
        """As :meth:`AsyncCopy.finish`; equal bytes of one generation are sent once."""
        with self.lock:
            if not copy.is_done:
                slot, record.slot = record.slot, None
                if slot is not None:
                    copy.is_discarded, copy.free = True, self._backlog.cancel
                copy.problem = f"the device did not hand it over within {self._time_limit_s:g} s"
        if copy.problem is not None:
            if (slot := record.slot) is not None:
                record.slot = None
                self._backlog.cancel(slot)
            self._lost()
            raise CopyFailed(copy.problem)
        record.content = copy.text
        if record.slot is None:
            return
        payload = self._dedup.payload_of(record, copy.digest) if copy.is_wanted else None
        if payload is None or payload != record.payload:
            slot, record.slot, record.payload = record.slot, None, payload
            self._backlog.cancel(slot)

    def close(self) -> bool:
        """Wait for what is under way and end the thread; False when that did not happen in time."""
        self._close_rows()
        with self._starting:
            thread, self._is_closing = self._thread, True
        self._copies.put(None)
        if thread is not None:
            thread.join(self._time_limit_s)
        return thread is None or not thread.is_alive()

    # ---- its own thread

    def _run(self) -> None:
        try:
            self._device.enter()
        except Exception as error:  # noqa: BLE001 - what follows will say why, value by value
            _log.debug("tapscope: %s", error)
        num_records = nbytes = 0
        while True:
            self._pin_ring()
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
            if self._copies.empty() or num_records >= _CHEER_RECORDS or nbytes >= _CHEER_BYTES:
                num_records = nbytes = 0
                if self._wake is not None:
                    self._wake()
        if self._ring is not None:
            self._device.unpin()

    def _yield_to_model(self) -> None:
        """Let the forward's thread launch: a step that ends, the end of the capture or many bytes end the nap."""
        deadline = time.monotonic() + _NAP_S
        while not (self._skip_nap or self._is_closing) and time.monotonic() < deadline:
            if self.staging.pending_bytes > _NAP_BYTES:
                break
            time.sleep(_NAP_S / 20)
        self._skip_nap = False

    def _pin_ring(self) -> None:
        """The ring may come later than the first values: the recorder is then still on its way up."""
        ring = getattr(self._backlog, "ring", None)
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
        except Exception as error:  # noqa: BLE001 - it must not end the capture of the others
            problem = str(error).strip().partition("\n")[0] or type(error).__name__
        held = ticket.held_bytes
        del ticket  # its memory is free before anybody is told
        with self.lock:
            copy.problem = copy.problem or problem
            copy.is_done = True
            # Wanted after all: who was asked has the slot now. But whoever gave the record up must free it.
            free = copy.free if copy.is_discarded or not copy.is_wanted else None
        if free is not None and copy.slot is not None:
            free(copy.slot)
        self.staging.done(copy.nbytes, held)

    def _read(self, copy: AsyncCopy, address: int) -> None:
        """Statistics and hash of what came; bytes that came elsewhere go to the slot in the same pass."""
        slot, layout = copy.slot, copy.layout
        if slot is None:
            copy.text, copy.digest = summary.tell(address)
            return
        keeps = copy.free is None or copy.on_stats is not None
        target = slot.address if keeps and address != slot.address else 0
        copy.text, copy.digest = summary.take(address, layout.count, layout.dtype, target)
        if copy.on_stats is not None:
            copy.is_wanted = copy.on_stats(copy.text)
