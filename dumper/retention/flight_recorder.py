"""FlightRecorder: keeps the last steps in memory and writes them only on request."""

from collections import deque
from dataclasses import dataclass, field

from tapscope.dumper.pipeline.send_queue import SendQueue
from tapscope.dumper.records.buffer_pool import BufferPool
from tapscope.dumper.records.inflight_record import InflightRecord
from tapscope.dumper.records.payload_slot import PayloadSlot
from tapscope.dumper.steps.deferred_line import DeferredLine
from tapscope.run_format.ledger import encode_line, event_line

RECORD_COST = 512
"""Approximate memory overhead of a held record in bytes, in addition to its payload and text."""
LINE_COST = 64
"""Approximate memory overhead in bytes of a held line that is not a record."""


@dataclass(slots=True)
class BufferedStep:
    """Records and lines from the beginning of one step to the beginning of the next."""

    number: int
    items: list[InflightRecord | DeferredLine | bytes] = field(default_factory=list)
    cost: int = 0
    """Memory charged to the step in bytes: payloads, lines and their object overhead."""
    num_values: int = 0
    nbytes: int = 0
    """Payload bytes."""
    num_dropped: int = 0
    """Number of values dropped because memory was full."""
    passes_through: bool = False
    """Whether the step was released: it holds no items, and further items are sent immediately."""

    def hold(self, item: InflightRecord | DeferredLine | bytes, cost: int) -> None:
        """Append a record or line; ``cost`` is its size in bytes without the payload."""
        self.items.append(item)
        self.cost += cost
        if isinstance(item, InflightRecord):
            self.cost += item.nbytes
            self.nbytes += item.nbytes
            self.num_values += 1

    def add_counts(self, other: "BufferedStep") -> None:
        """Add the counts of a discarded step; ``number`` counts the discarded steps."""
        self.number += 1
        self.num_values += other.num_values
        self.nbytes += other.nbytes
        self.num_dropped += other.num_dropped

    def release(self) -> list[InflightRecord | DeferredLine | bytes]:
        """Return the held items and switch to passing further items through."""
        items, self.items = self.items, []
        self.cost = self.num_values = self.nbytes = self.num_dropped = 0
        self.passes_through = True
        return items


@dataclass(frozen=True, slots=True)
class ReleaseResult:
    """Steps that a release has sent, with their total counts."""

    steps: list[int]
    num_values: int = 0
    nbytes: int = 0
    num_dropped: int = 0
    """Number of values of these steps that were dropped because memory was full."""


class FlightRecorder:
    """A sink that holds the last ``num_steps`` steps, including the open one, in at most ``limit`` bytes.

    The oldest steps are discarded first. A step that alone exceeds ``limit`` drops further values once memory is full.
    A release moves steps to the send queue together with their memory, without copying or waiting; that memory counts
    here until the recorder has acknowledged it. Records that share payloads are always held and released together,
    because steps are released whole and in order. Any thread may release: the lock is that of the send queue.
    """

    def __init__(self, queue: SendQueue, num_steps: int, limit: int) -> None:
        self._queue = queue
        self._lock = queue.lock
        self._pool = BufferPool(limit)
        self._steps: deque[BufferedStep] = deque()  # the last item is the current step
        self._pass_until = -1
        self._stalled = False
        self.pass_through = False
        """Whether new steps are sent immediately, because a capture of the next steps was requested."""
        self.num_steps = num_steps
        self.limit = limit
        self.used = 0
        """Bytes held, or released and not yet acknowledged; at most ``limit``, except for the lines of a step."""
        self._unacknowledged = 0  # the part of ``used`` that is released and not yet acknowledged
        self.discarded = BufferedStep(0)
        """Totals of the discarded steps; ``number`` is their count."""

    # ---- the sink

    def reserve(self, nbytes: int) -> PayloadSlot | None:
        """Allocate memory for a payload; None if memory is full, and the payload is dropped."""
        with self._lock:
            steps = self._steps
            if not steps or steps[-1].passes_through:
                return self._queue.reserve(nbytes)
            if (self._queue.dead or self.used + nbytes > self.limit) and not self._admits(nbytes):
                if not self.is_holding:  # a release happened while _admits() waited
                    return self._queue.reserve(nbytes)
                steps[-1].num_dropped += 1
                return None
            self.used += nbytes
            buffer = self._pool.acquire(nbytes)
        return PayloadSlot(buffer.ctypes.data, nbytes, -1, buffer, self)

    def cancel(self, slot: PayloadSlot) -> None:
        """Free a slot whose payload is not needed."""
        if slot.owner is None:
            self._queue.cancel(slot)
        else:
            self._release_slot(slot)

    def put(self, record: InflightRecord) -> bool:
        """Hold a record, or send it if the step passes through; False if the record was dropped and its slot freed."""
        with self._lock:
            slot, cost = record.slot, RECORD_COST + len(record.content)
            if slot is not None and slot.owner is None:  # reserved from the send queue, before this step began
                return self._queue.put(record)
            admitted = not self.is_holding or self._admits(cost)
            if not self.is_holding:
                return self._pass_on(record)
            step = self._steps[-1]
            if not admitted:
                step.num_dropped += 1
                record.discard(self._release_slot)
                return False
            self.used += cost
            step.hold(record, cost)
            record.firing.step.current_counts.sent += 1
        return True

    def _pass_on(self, record: InflightRecord) -> bool:
        if record.slot is None:
            return self._queue.put(record)
        record.firing.step.current_counts.sent += 1
        self._unacknowledged += record.nbytes
        self._queue.put_released([record])
        return True

    def append(self, line: DeferredLine | bytes) -> None:
        """Hold a line that is not a record; never dropped, because such lines are few."""
        with self._lock:
            if not self.is_holding:
                self._queue.append(line)
                return
            step = self._steps[-1]
            cost = LINE_COST + len(line)
            self._make_room(cost)
            self.used += cost
            step.hold(line, cost)

    # ---- steps

    @property
    def is_holding(self) -> bool:
        """Whether new records are held in memory."""
        return bool(self._steps) and not self._steps[-1].passes_through

    def begin(self, number: int) -> None:
        """Begin a step, to which further items belong; may discard the oldest steps."""
        with self._lock:
            self._steps.append(BufferedStep(number, passes_through=self.pass_through or number <= self._pass_until))
            self._trim()

    def resize(self, num_steps: int, limit: int) -> None:
        """Change the limits, and discard the oldest steps that exceed them."""
        with self._lock:
            self.num_steps, self.limit = num_steps, limit
            self._pool.resize(limit)
            self._trim()

    def take_discarded(self) -> BufferedStep:
        """Discard all held steps; returns the totals of the steps discarded since the last call."""
        with self._lock:
            while self._steps:
                self._drop_oldest()
            totals, self.discarded = self.discarded, BufferedStep(0)
            self._pass_until = -1
            return totals

    # ---- releases

    def window(self, past: int) -> tuple[int, int]:
        """Return (first, last) number of the newest ``past`` steps, including the current one; (0, -1) if none."""
        with self._lock:
            newest = [step.number for step in self._steps][-past:]
            return (newest[0], newest[-1]) if newest else (0, -1)

    def release(self, first: int, last: int, reason: str) -> ReleaseResult:
        """Send the steps ``first`` to ``last``, oldest first, each at most once.

        For a step in this range that is open or has not begun, further items are sent immediately.
        """
        with self._lock:
            chosen = [step for step in self._steps if first <= step.number <= last and not step.passes_through]
            self._pass_until = max(self._pass_until, last)
            result = ReleaseResult(
                [step.number for step in chosen],
                sum(step.num_values for step in chosen),
                sum(step.nbytes for step in chosen),
                sum(step.num_dropped for step in chosen),
            )
            if chosen:
                fields = {"steps": result.steps, "num_values": result.num_values, "nbytes": result.nbytes}
                self._queue.append(encode_line(event_line("released", **fields, reason=reason)))
            for step in chosen:
                self._hand_over(step)
            return result

    def _hand_over(self, step: BufferedStep) -> None:
        self.used -= step.cost - step.nbytes
        self._unacknowledged += step.nbytes
        self._queue.put_released(step.release())

    def free(self, slot: PayloadSlot) -> None:
        """Free a released slot, now that the recorder has acknowledged its bytes."""
        with self._lock:
            self._unacknowledged -= slot.nbytes
            self._stalled = False
            self._release_slot(slot)

    def _release_slot(self, slot: PayloadSlot) -> None:
        assert slot.buffer is not None
        with self._lock:
            self.used -= slot.nbytes
            self._pool.release(slot.buffer)

    # ---- room

    def _admits(self, nbytes: int) -> bool:
        if self._queue.dead:
            return False
        if self._make_room(nbytes):
            return True
        # Memory is full of released steps: wait for acknowledgments as a full send queue does, once per stall.
        if not self._unacknowledged or self._stalled:
            return False
        self._stalled = not self._queue.wait_until(lambda: self._make_room(nbytes) or not self._unacknowledged)
        return self._make_room(nbytes)

    def _make_room(self, nbytes: int) -> bool:
        while self.used + nbytes > self.limit and len(self._steps) > 1:
            self._drop_oldest()
        return self.used + nbytes <= self.limit

    def _trim(self) -> None:
        while len(self._steps) > self.num_steps:
            self._drop_oldest()
        self._make_room(0)

    def _drop_oldest(self) -> None:
        step = self._steps.popleft()
        if step.passes_through:
            return
        self.used -= step.cost - step.nbytes
        for item in step.items:
            if isinstance(item, InflightRecord):
                item.discard(self._release_slot)
        self.discarded.add_counts(step)
