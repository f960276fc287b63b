"""Backlog: what waits for the recorder, bounded in bytes. The forward thread fills it, the pipeline's empties it."""

import threading
from collections.abc import Callable, Iterable

from tapscope.core.wire import Message
from tapscope.dumper.pipeline.outbox import Item, Outbox
from tapscope.dumper.pipeline.record_batch import LINE_COST, RecordBatch
from tapscope.dumper.records.buffer_pool import BufferPool
from tapscope.dumper.records.inflight_record import InflightRecord
from tapscope.dumper.records.payload_slot import PayloadSlot
from tapscope.dumper.records.record_lines import RecordLines
from tapscope.dumper.steps.deferred_line import DeferredLine
from tapscope.dumper.transport.shm_ring import ShmRing

_DEVICE_PATIENCE_S = 120.0  # a bound only: a device that does not answer is given up earlier, by its drain


class SendQueue:
    """Memory for payloads (a ring, or a pool where it has no room) and a queue of what is to be sent.

    Everything that was reserved or put counts until it is acknowledged; beyond ``limit`` bytes the forward thread waits
    at most ``block_timeout_s`` (None: not at all), once a stall, and then loses the value. A value larger than
    ``limit`` is let in when nothing else is on its way, and nothing after it until it is acknowledged: memory is
    bounded by ``limit`` or by the largest value, whichever is more.
    """

    def __init__(self, limit: int, block_timeout_s: float | None, ring: ShmRing | None) -> None:
        self.limit = limit
        self.pool = BufferPool(limit - ring.nbytes if ring else limit)
        self.dead: str | None = None
        """Why nothing can be sent any more, or None."""
        self._block_timeout_s = block_timeout_s
        self.ring = ring
        self._ring_address = ring.address if ring else 0
        self._mutex = threading.RLock()
        self.lock = threading.Condition(self._mutex)
        """Guards all of this; notified when anything changes. What lends slots may share it."""
        self._outbox = Outbox()
        self.in_flight_bytes = 0
        """Reserved or queued or sent, and not yet acknowledged."""
        self.num_abandoned = 0
        """Records that count as sent and were not acknowledged when :meth:`abandon` was called, or came later."""
        self._num_records = 0  # queued or sent, and not yet acknowledged
        self._num_sent = 0  # batches that are not yet acknowledged
        self._stalled = False
        self._is_asleep = False  # the pipeline waits elsewhere than in take()
        self.nudge: Callable[[], None] = lambda: None
        """Has the pipeline look around soon; takes no lock, for a signal handler."""

    def use_ring(self, ring: ShmRing) -> None:
        """The recorder has mapped this ring: payloads go there from now on."""
        with self.lock:
            self._ring_address = ring.address
            self.ring = ring
        self.pool.lower(self.limit - ring.nbytes)

    # ---- the forward thread

    def reserve(self, nbytes: int) -> PayloadSlot | None:
        """Memory for a payload; None when it had to be given up."""
        with self._mutex:
            if not self._admits(nbytes):
                return None
            self.in_flight_bytes += nbytes
            offset = self.ring.reserve(nbytes) if self.ring else None
            if offset is not None:
                return PayloadSlot(self._ring_address + offset, nbytes, offset, None)
        buffer = self.pool.acquire(nbytes)
        return PayloadSlot(buffer.ctypes.data, nbytes, -1, buffer)

    def has_room(self, nbytes: int) -> bool:
        """Whether so much more would be let in now."""
        return self.in_flight_bytes + nbytes <= self.limit or not self.in_flight_bytes

    def has_room_for(self, num_lines: int) -> bool:
        """Whether so many more records without payloads would be let in now."""
        return self.has_room(num_lines * LINE_COST)

    def cancel(self, slot: PayloadSlot) -> None:
        """The payload is not needed after all."""
        with self._mutex:
            self._release(slot)

    def put(self, record: InflightRecord) -> bool:
        """Queue a record; False when it had to be dropped (its slot is then free again).

        Whoever has a slot was let in already, and waits for no room again: it may be the slot that fills everything.
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

    def put_lines(self, lines: RecordLines) -> bool:
        """Queue records that are text already; False when they had to be dropped, as in :meth:`put`."""
        with self._mutex:
            if self.dead or not (lines.payloads or self._admits(lines.num_lines * LINE_COST)):
                for _, _, payload in lines.payloads:
                    self._release(payload.slot)
                return False
            self._queue(lines, lines.num_lines, lines.nbytes)
            lines.step.current_counts.sent += lines.num_lines
        return True

    def put_released(self, items: Iterable[InflightRecord | DeferredLine | bytes]) -> None:
        """Queue what was held elsewhere, whatever the bound: its slots count for their lender until acknowledged."""
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
        """Wait for the recorder as a full backlog does; the lock must be held. False when it did not come true."""
        if self._block_timeout_s is None:
            return condition()
        self.flush()
        return self.lock.wait_for(lambda: self.dead is not None or condition(), self._block_timeout_s)

    def append(self, item: DeferredLine | bytes | Message) -> None:
        """Queue a line that is no record, or a message; small, so never refused while the recorder lives."""
        with self._mutex:
            if not self.dead:
                self._outbox.put(item)

    def flush(self) -> None:
        """Let go what there is, full batch or not."""
        with self.lock:
            self._outbox.flush()
            self._call_pipeline()

    def flush_soon(self) -> None:
        """A step has ended: let go what there is, short steps together."""
        with self.lock:
            if self._outbox.flush_soon():
                self._call_pipeline()

    def drained(self, timeout_s: float) -> bool:
        """Flush and wait until everything is acknowledged; False when that did not happen in time."""
        with self.lock:
            self.flush()
            self.lock.wait_for(lambda: self.dead is not None or not self.is_awaiting_device, _DEVICE_PATIENCE_S)
            self.lock.wait_for(lambda: self.dead is not None or self.is_empty, timeout_s)
            return self.dead is None and self.is_empty

    def wake(self) -> None:
        """Values have come from a device: see whether there is enough to send now."""
        with self.lock:
            self._call_pipeline()

    @property
    def is_awaiting_device(self) -> bool:
        """Whether a value that waits to be sent is still on its way from a device."""
        with self.lock:
            return self._outbox.is_awaiting_device

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits to be sent or acknowledged."""
        return not self._outbox and not self._num_sent

    def _queue(self, item: InflightRecord | RecordLines, number: int, nbytes: int) -> None:
        """Queue records, with the payloads that travel with them."""
        self.in_flight_bytes += number * LINE_COST
        self._num_records += number
        if self._outbox.put(item, number, nbytes):  # who makes a batch full wakes the pipeline: at work it looks itself
            self._call_pipeline()

    def _call_pipeline(self) -> None:
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
        # Who has waited in vain waits no more until the recorder moves: one stall costs one timeout, not one a value.
        self._stalled = not self.has_room(nbytes)
        return self.dead is None and not self._stalled

    # ---- the pipeline's thread

    def take(self, idle_s: float) -> list[Item]:
        """Wait at most ``idle_s`` for enough to send, then take at most one batch; it counts as sent from now on."""
        with self.lock:
            if not self._ready() and not (idle_s and self.lock.wait_for(self._ready, idle_s)):
                return []
            self._num_sent += 1
            return self._outbox.take()

    def sleep(self, most_s: float) -> float:
        """The pipeline waits elsewhere than in :meth:`take`, until :attr:`nudge` or :meth:`awake`.

        Gives for how many seconds at most; 0 for not now.
        """
        with self.lock:
            pause_s = self._outbox.pause_s()
            self._is_asleep = not self._ready()
            return min(pause_s or most_s, most_s) if self._is_asleep else 0.0

    def awake(self) -> None:
        """The pipeline needs no nudge any more."""
        with self.lock:
            self._is_asleep = False

    def sent(self, num_batches: int) -> None:
        """What :meth:`take` gave became this many batches, each of which is acknowledged on its own."""
        with self.lock:
            self._num_sent += num_batches - 1
            self.lock.notify_all()

    def acknowledged(self, batch: RecordBatch) -> None:
        """The recorder has it: its memory is free again."""
        with self.lock:
            for slot in batch.slots:
                self._release(slot)
            self.in_flight_bytes -= batch.num_records * LINE_COST
            self._num_records -= batch.num_records
            self._num_sent -= 1
            self._stalled = False
            self.lock.notify_all()

    def abandon(self, reason: str) -> bool:
        """Nothing more can be sent; False when that was known already."""
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
