"""SendQueue: queue of records for the recorder, bounded in bytes, from the forward's thread to the sender's thread."""

import threading
from collections.abc import Callable, Iterable

from tapscope.core.wire import Message
from tapscope.dumper.pipeline.outbox import Item, Outbox
from tapscope.dumper.pipeline.record_batch import LINE_COST, RecordBatch
from tapscope.dumper.records.buffer_pool import BufferPool
from tapscope.dumper.records.inflight_record import InflightRecord
from tapscope.dumper.records.payload_slot import PayloadSlot
from tapscope.dumper.records.record_lines import PendingLines, RecordLines
from tapscope.dumper.steps.deferred_line import DeferredLine
from tapscope.dumper.transport.shm_ring import ShmRing

_DEVICE_PATIENCE_S = 120.0  # only a safety limit: the device worker gives up an unresponsive device earlier


class SendQueue:
    """Allocator of payload memory (shared-memory ring, else a pool) and queue of the items to send.

    All reserved or queued bytes count until they are acknowledged. Above ``limit`` bytes, back-pressure applies: the
    forward's thread waits up to ``block_timeout_s`` (None: not at all), once per stall, and then drops the value. A
    value larger than ``limit`` is admitted only when nothing else is in flight, and blocks later values until it is
    acknowledged. Memory is thus bounded by ``limit`` or the largest value, whichever is greater.
    """

    def __init__(self, limit: int, block_timeout_s: float | None, ring: ShmRing | None) -> None:
        self.limit = limit
        self.pool = BufferPool(limit - ring.nbytes if ring else limit)
        self.dead: str | None = None
        """Why items can no longer be sent; None while they can."""
        self._block_timeout_s = block_timeout_s
        self.ring = ring
        self.takes_blocks = False
        """Whether the recorder supports packed rows."""
        self._ring_address = ring.address if ring else 0
        self._mutex = threading.RLock()
        self.lock = threading.Condition(self._mutex)
        """Guards all state; notified on every change. Owners of slots may share it."""
        self._outbox = Outbox()
        self.in_flight_bytes = 0
        """Number of bytes reserved, queued or sent, and not yet acknowledged."""
        self.num_abandoned = 0
        """Number of records counted as sent but unacknowledged at :meth:`abandon`, plus those released later."""
        self._num_records = 0  # records queued or sent, and not yet acknowledged
        self._num_sent = 0  # batches sent and not yet acknowledged
        self._stalled = False
        self._is_asleep = False  # the sender polls its socket instead of waiting in take()
        self.nudge: Callable[[], None] = lambda: None
        """Callback that wakes the sender; takes no lock, so that a signal handler may call it."""

    def use_ring(self, ring: ShmRing) -> None:
        """Use ``ring``, which the recorder has mapped, for payloads from now on."""
        with self.lock:
            self._ring_address = ring.address
            self.ring = ring
        self.pool.resize(self.limit - ring.nbytes)

    # ---- the forward's thread

    def reserve(self, nbytes: int) -> PayloadSlot | None:
        """Reserve memory for a payload, waiting for space if configured; return None if the queue is full or dead."""
        with self._mutex:
            if not self._admits(nbytes):
                return None
            self.in_flight_bytes += nbytes
            offset = self.ring.reserve(nbytes) if self.ring else None
            if offset is not None:
                return PayloadSlot(self._ring_address + offset, nbytes, offset, None)
        buffer = self.pool.acquire(nbytes)
        return PayloadSlot(buffer.ctypes.data, nbytes, -1, buffer)

    def reserve_all(self, sizes: Iterable[int]) -> list[PayloadSlot] | None:
        """Reserve memory for several payloads; return None, with nothing reserved, if there is not enough."""
        slots: list[PayloadSlot] = []
        for nbytes in sizes:
            slot = self.reserve(nbytes)
            if slot is None:
                for each in slots:
                    self.cancel(each)
                return None
            slots.append(slot)
        return slots

    def has_room(self, nbytes: int) -> bool:
        """Return whether ``nbytes`` more bytes would be admitted now."""
        return self.in_flight_bytes + nbytes <= self.limit or not self.in_flight_bytes

    def has_room_for(self, num_lines: int) -> bool:
        """Return whether ``num_lines`` more records without payloads would be admitted now."""
        return self.has_room(num_lines * LINE_COST)

    def cancel(self, slot: PayloadSlot) -> None:
        """Free a reserved slot that is not used."""
        with self._mutex:
            self._release(slot)

    def put(self, record: InflightRecord) -> bool:
        """Queue a record; return False if it was dropped and its slot freed.

        A record with a slot was already admitted by :meth:`reserve` and does not wait again, because its own slot
        may be what fills the queue.
        """
        slot = record.slot
        with self._mutex:
            full = slot is None and self.in_flight_bytes + LINE_COST > self.limit
            if self.dead or (full and not self._admits(LINE_COST)):
                record.discard(self.cancel)
                return False
            self._queue(record, 1, 0 if slot is None else slot.nbytes)
            record.firing.step.current_counts.sent += 1
        return True

    def put_lines(self, lines: RecordLines | PendingLines) -> bool:
        """Queue formatted records; return False if they were dropped, as in :meth:`put`."""
        with self._mutex:
            if self.dead or not (lines.nbytes or self._admits(lines.num_lines * LINE_COST)):
                lines.discard(self.cancel)
                return False
            self._queue(lines, lines.num_lines, lines.nbytes)
            lines.step.current_counts.sent += lines.num_lines
        return True

    def put_released(self, items: Iterable[InflightRecord | DeferredLine | bytes]) -> None:
        """Queue items that another owner (the flight recorder) releases, without a limit.

        Their slots remain charged to that owner until they are acknowledged.
        """
        with self.lock:
            for item in items:
                if not isinstance(item, InflightRecord):
                    self.append(item)
                elif not self.dead:
                    self._queue(item, 1, item.nbytes)
                else:
                    item.discard(self.cancel)
                    self.num_abandoned += 1
            self.flush()

    def wait_until(self, condition: Callable[[], bool]) -> bool:
        """Wait for ``condition`` with the timeout of a full queue; return whether it became true.

        The caller must hold :attr:`lock`. With a timeout, also returns True once the queue is dead.
        """
        if self._block_timeout_s is None:
            return condition()
        self.flush()
        return self.lock.wait_for(lambda: self.dead is not None or condition(), self._block_timeout_s)

    def append(self, item: DeferredLine | bytes | Message) -> None:
        """Queue a non-record line or a message; always accepted while the recorder lives, because these are small."""
        with self._mutex:
            if not self.dead:
                self._outbox.put(item)

    def flush(self) -> None:
        """Send all queued items, even if they do not fill a batch."""
        with self.lock:
            self._outbox.flush()
            self._wake_sender()

    def flush_soon(self) -> None:
        """Send all queued items soon, at the end of a step; short steps are combined into one batch."""
        with self.lock:
            if self._outbox.flush_soon():
                self._wake_sender()

    def drained(self, timeout_s: float) -> bool:
        """Flush and wait until everything is acknowledged; return False on timeout or if the queue is dead."""
        with self.lock:
            self.flush()
            self.lock.wait_for(lambda: self.dead is not None or not self.is_awaiting_device, _DEVICE_PATIENCE_S)
            self.lock.wait_for(lambda: self.dead is not None or self.is_empty, timeout_s)
            return self.dead is None and self.is_empty

    def wake(self) -> None:
        """Wake the sender to check for a full batch, because copies from a device have completed."""
        with self.lock:
            self._wake_sender()

    @property
    def is_awaiting_device(self) -> bool:
        """Whether a queued value is still being copied from a device."""
        with self.lock:
            return self._outbox.is_awaiting_device

    @property
    def is_empty(self) -> bool:
        """Whether no item waits to be sent or acknowledged."""
        return not self._outbox and not self._num_sent

    def _queue(self, item: InflightRecord | RecordLines | PendingLines, number: int, nbytes: int) -> None:
        """Queue an item of ``number`` records with ``nbytes`` of payload; wake the sender if a batch is full."""
        self.in_flight_bytes += number * LINE_COST
        self._num_records += number
        if self._outbox.put(item, number, nbytes):  # completes a full batch
            self._wake_sender()

    def _wake_sender(self) -> None:
        """Notify the sender that there may be items to send; the lock must be held."""
        self.lock.notify_all()
        if self._is_asleep:
            self.nudge()

    def _admits(self, nbytes: int) -> bool:
        if self.dead:
            return False
        return self.has_room(nbytes) or self._wait_for_room(nbytes)

    def _wait_for_room(self, nbytes: int) -> bool:
        if self._block_timeout_s is None or self._stalled:
            return False
        self.flush()
        self.lock.wait_for(lambda: self.dead is not None or self.has_room(nbytes), self._block_timeout_s)
        # After a timeout, do not wait again until the recorder responds: one timeout per stall, not one per value.
        self._stalled = not self.has_room(nbytes)
        return self.dead is None and not self._stalled

    # ---- the sender's thread

    def take(self, idle_s: float) -> list[Item]:
        """Wait up to ``idle_s`` seconds for a batch, and take it; it counts as sent from now on.

        Returns an empty list if no batch is ready.
        """
        with self.lock:
            if not self._ready() and not (idle_s and self.lock.wait_for(self._ready, idle_s)):
                return []
            self._num_sent += 1
            return self._outbox.take()

    def sleep(self, most_s: float) -> float:
        """Note that the sender will poll its socket instead of waiting in :meth:`take`, so that it needs a nudge.

        Returns the maximum time in seconds to poll; 0 if a batch is ready now.
        """
        with self.lock:
            pause_s = self._outbox.pause_s()
            self._is_asleep = not self._ready()
            return min(pause_s or most_s, most_s) if self._is_asleep else 0.0

    def awake(self) -> None:
        """Note that the sender no longer polls, and needs no nudge."""
        with self.lock:
            self._is_asleep = False

    def sent(self, num_batches: int) -> None:
        """Note that the items of :meth:`take` were sent as ``num_batches`` batches, each acknowledged separately."""
        with self.lock:
            self._num_sent += num_batches - 1
            self.lock.notify_all()

    def acknowledged(self, batch: RecordBatch) -> None:
        """Free the memory of a batch that the recorder has acknowledged."""
        with self.lock:
            for slot in batch.slots:
                self._release(slot)
            self.in_flight_bytes -= batch.num_records * LINE_COST
            self._num_records -= batch.num_records
            self._num_sent -= 1
            self._stalled = False
            self.lock.notify_all()

    def abandon(self, reason: str) -> bool:
        """Discard all items and reject new ones, for ``reason``; return False if the queue was already dead."""
        with self.lock:
            if self.dead:
                return False
            self.dead = reason
            self._outbox.clear()
            self.num_abandoned, self._num_records, self._num_sent = self._num_records, 0, 0
            self.lock.notify_all()
            return True

    def _ready(self) -> bool:
        return self.dead is None and self._outbox.is_ready

    def _release(self, slot: PayloadSlot) -> None:
        if slot.owner is not None:
            slot.owner.free(slot)
            return
        self.in_flight_bytes -= slot.nbytes
        if slot.buffer is not None:
            self.pool.release(slot.buffer)
        elif self.ring is not None:
            self.ring.free(slot.offset)
