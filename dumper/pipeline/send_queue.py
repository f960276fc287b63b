"""SendQueue: records for the recorder, bounded in bytes. Filled by the forward's thread, drained by the sender's."""

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

_DEVICE_PATIENCE_S = 120.0  # a bound only: a device that does not respond is given up earlier, by its worker


class SendQueue:
    """Memory for payloads (the shared-memory ring, else a pool) and a queue of what is to be sent.

    Everything reserved or queued counts until it is acknowledged. Beyond ``limit`` bytes the forward's thread waits at
    most ``block_timeout_s`` (None: not at all), once per stall, and then drops the value. A value larger than ``limit``
    is admitted when nothing else is in flight, and nothing after it until it is acknowledged: memory is bounded by
    ``limit`` or by the largest value, whichever is greater.
    """

    def __init__(self, limit: int, block_timeout_s: float | None, ring: ShmRing | None) -> None:
        self.limit = limit
        self.pool = BufferPool(limit - ring.nbytes if ring else limit)
        self.dead: str | None = None
        """Why nothing can be sent any more, or None."""
        self._block_timeout_s = block_timeout_s
        self.ring = ring
        self.takes_blocks = False
        """Whether the recorder makes records of packed rows."""
        self._ring_address = ring.address if ring else 0
        self._mutex = threading.RLock()
        self.lock = threading.Condition(self._mutex)
        """Guards all state; notified when anything changes. Owners of slots may share it."""
        self._outbox = Outbox()
        self.in_flight_bytes = 0
        """Reserved, queued or sent, and not yet acknowledged."""
        self.num_abandoned = 0
        """Records that count as sent and were not acknowledged when :meth:`abandon` was called, or came later."""
        self._num_records = 0  # queued or sent, and not yet acknowledged
        self._num_sent = 0  # batches that are not yet acknowledged
        self._stalled = False
        self._is_asleep = False  # the sender waits elsewhere than in take()
        self.nudge: Callable[[], None] = lambda: None
        """Wakes the sender up; takes no lock, so that a signal handler may call it."""

    def use_ring(self, ring: ShmRing) -> None:
        """The recorder has mapped this ring: use it for payloads from now on."""
        with self.lock:
            self._ring_address = ring.address
            self.ring = ring
        self.pool.lower(self.limit - ring.nbytes)

    # ---- the forward's thread

    def reserve(self, nbytes: int) -> PayloadSlot | None:
        """Memory for a payload; None when there is none."""
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
        """Memory for each of several payloads; None, and none is reserved, when there is not enough."""
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
        """Whether ``nbytes`` more would be admitted now."""
        return self.in_flight_bytes + nbytes <= self.limit or not self.in_flight_bytes

    def has_room_for(self, num_lines: int) -> bool:
        """Whether that many more records without payloads would be admitted now."""
        return self.has_room(num_lines * LINE_COST)

    def cancel(self, slot: PayloadSlot) -> None:
        """The payload is not needed."""
        with self._mutex:
            self._release(slot)

    def put(self, record: InflightRecord) -> bool:
        """Queue a record; False when it was dropped and its slot freed.

        A record with a slot was admitted already and does not wait for room again: its own slot may be what fills the
        queue.
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
        """Queue formatted records; False when they were dropped, as in :meth:`put`."""
        with self._mutex:
            if self.dead or not (lines.nbytes or self._admits(lines.num_lines * LINE_COST)):
                lines.discard(self.cancel)
                return False
            self._queue(lines, lines.num_lines, lines.nbytes)
            lines.step.current_counts.sent += lines.num_lines
        return True

    def put_released(self, items: Iterable[InflightRecord | DeferredLine | bytes]) -> None:
        """Queue what was held elsewhere, without a bound: its slots count for their owner until acknowledged."""
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
        """Wait for the recorder as a full queue does; the lock must be held.

        False when the condition did not become true.
        """
        if self._block_timeout_s is None:
            return condition()
        self.flush()
        return self.lock.wait_for(lambda: self.dead is not None or condition(), self._block_timeout_s)

    def append(self, item: DeferredLine | bytes | Message) -> None:
        """Queue a line that is not a record, or a message; small, so never refused while the recorder lives."""
        with self._mutex:
            if not self.dead:
                self._outbox.put(item)

    def flush(self) -> None:
        """Send what there is, full batch or not."""
        with self.lock:
            self._outbox.flush()
            self._wake_sender()

    def flush_soon(self) -> None:
        """A step has ended: send what there is, combining short steps."""
        with self.lock:
            if self._outbox.flush_soon():
                self._wake_sender()

    def drained(self, timeout_s: float) -> bool:
        """Flush and wait until everything is acknowledged; False when that took too long."""
        with self.lock:
            self.flush()
            self.lock.wait_for(lambda: self.dead is not None or not self.is_awaiting_device, _DEVICE_PATIENCE_S)
            self.lock.wait_for(lambda: self.dead is not None or self.is_empty, timeout_s)
            return self.dead is None and self.is_empty

    def wake(self) -> None:
        """Values have arrived from a device: check whether there is enough to send."""
        with self.lock:
            self._wake_sender()

    @property
    def is_awaiting_device(self) -> bool:
        """Whether a queued value is still being copied from a device."""
        with self.lock:
            return self._outbox.is_awaiting_device

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to be sent or acknowledged."""
        return not self._outbox and not self._num_sent

    def _queue(self, item: InflightRecord | RecordLines | PendingLines, number: int, nbytes: int) -> None:
        """Queue records, with the payloads that travel with them."""
        self.in_flight_bytes += number * LINE_COST
        self._num_records += number
        if self._outbox.put(item, number, nbytes):  # a full batch; a sender that is awake checks by itself
            self._wake_sender()

    def _wake_sender(self) -> None:
        """There may be something to send; the lock must be held."""
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
        # After a wait in vain, do not wait until the recorder responds: one timeout per stall, not one per value.
        self._stalled = not self.has_room(nbytes)
        return self.dead is None and not self._stalled

    # ---- the sender's thread

    def take(self, idle_s: float) -> list[Item]:
        """Wait at most ``idle_s`` for enough to send, then take at most one batch; it counts as sent from now on."""
        with self.lock:
            if not self._ready() and not (idle_s and self.lock.wait_for(self._ready, idle_s)):
                return []
            self._num_sent += 1
            return self._outbox.take()

    def sleep(self, most_s: float) -> float:
        """The sender will wait elsewhere than in :meth:`take`, until :attr:`nudge` or :meth:`awake`.

        Returns for how many seconds at most; 0 when there is something to send now.
        """
        with self.lock:
            pause_s = self._outbox.pause_s()
            self._is_asleep = not self._ready()
            return min(pause_s or most_s, most_s) if self._is_asleep else 0.0

    def awake(self) -> None:
        """The sender no longer waits elsewhere."""
        with self.lock:
            self._is_asleep = False

    def sent(self, num_batches: int) -> None:
        """Note that the items of :meth:`take` were sent as this many batches, each acknowledged on its own."""
        with self.lock:
            self._num_sent += num_batches - 1
            self.lock.notify_all()

    def acknowledged(self, batch: RecordBatch) -> None:
        """The recorder has the batch: free its memory."""
        with self.lock:
            for slot in batch.slots:
                self._release(slot)
            self.in_flight_bytes -= batch.num_records * LINE_COST
            self._num_records -= batch.num_records
            self._num_sent -= 1
            self._stalled = False
            self.lock.notify_all()

    def abandon(self, reason: str) -> bool:
        """Nothing more can be sent; False when that was already known."""
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
