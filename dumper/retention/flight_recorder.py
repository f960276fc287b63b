"""FlightRecorder: the last steps, in memory, that reach disk only when somebody asks."""

from collections import deque
from typing import NamedTuple

from tapscope.dumper.pipeline.send_queue import SendQueue
from tapscope.dumper.records.buffer_pool import BufferPool
from tapscope.dumper.records.inflight_record import InflightRecord
from tapscope.dumper.records.payload_slot import PayloadSlot
from tapscope.dumper.retention.buffered_step import LINE_COST, RECORD_COST, BufferedStep
from tapscope.dumper.steps.deferred_line import DeferredLine
from tapscope.run_format.ledger import encode_line, event_line


class ReleaseResult(NamedTuple):
    """What a release has sent on its way."""

    steps: list[int]
    num_values: int = 0
    nbytes: int = 0
    num_dropped: int = 0
    """Values of these steps that there had been no room for."""


class FlightRecorder:
    """A sink that holds the last ``num_steps`` steps, the open one among them, in at most ``limit`` bytes.

    The oldest whole steps go first; a step that is larger than ``limit`` alone loses what comes when it is full. A
    release hands steps over to the backlog with the memory they lie in, so that it neither copies nor waits; that
    memory counts here until the recorder process has acknowledged it. What shares the bytes of a record is held and
    released with it, because a step is released whole and in order. Any thread may release: the lock is the backlog's.
    """

    def __init__(self, queue: SendQueue, num_steps: int, limit: int) -> None:
        self._queue = queue
        self._lock = queue.lock
        self._pool = BufferPool(limit)
        self._steps: deque[BufferedStep] = deque()  # the last is the current one
        self._pass_until = -1
        self._stalled = False
        self.pass_through = False
        """Whether steps that begin now go on at once: somebody has asked for a capture of the next ones."""
        self.num_steps = num_steps
        self.limit = limit
        self.used = 0
        """Bytes held, and bytes released that are not yet acknowledged; at most ``limit``, but for a step's lines."""
        self._lent = 0  # of these, released ones
        self.discarded = BufferedStep(0)
        """Sums over the steps that nobody asked for; ``number`` is how many."""

    # ---- the sink

    def reserve(self, nbytes: int) -> PayloadSlot | None:
        """Memory for a payload; None when it had to be given up."""
        with self._lock:
            steps = self._steps
            if not steps or steps[-1].passes_through:
                return self._queue.reserve(nbytes)
            if (self._queue.dead or self.used + nbytes > self.limit) and not self._admits(nbytes):
                if not self.is_holding:  # admitting has waited, and somebody released
                    return self._queue.reserve(nbytes)
                steps[-1].num_dropped += 1
                return None
            self.used += nbytes
            buffer = self._pool.acquire(nbytes)
        return PayloadSlot(buffer.ctypes.data, nbytes, -1, buffer, self)

    def cancel(self, slot: PayloadSlot) -> None:
        """The payload is not needed after all."""
        if slot.owner is None:
            self._queue.cancel(slot)
        else:
            self._release_slot(slot)

    def put(self, record: InflightRecord) -> bool:
        """Hold a record; False when it had to be dropped (its slot is then free again)."""
        with self._lock:
            slot, cost = record.slot, RECORD_COST + len(record.content)
            if slot is not None and slot.owner is None:  # reserved while the step before flowed
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
        self._lent += record.nbytes
        self._queue.put_released([record])
        return True

    def append(self, line: DeferredLine | bytes) -> None:
        """Hold a line that is no record with its step; there are few of them, so it is never refused."""
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
        """Whether what comes now is held."""
        return bool(self._steps) and not self._steps[-1].passes_through

    def begin(self, number: int) -> None:
        """A step begins: what comes from here on is its, and the oldest step may go."""
        with self._lock:
            self._steps.append(BufferedStep(number, passes_through=self.pass_through or number <= self._pass_until))
            self._trim()

    def resize(self, num_steps: int, limit: int) -> None:
        """Other bounds, from now on."""
        with self._lock:
            self.num_steps, self.limit = num_steps, limit
            self._pool.resize(limit)
            self._trim()

    def take_discarded(self) -> BufferedStep:
        """Give up all that is held, and say what was given up since the last time."""
        with self._lock:
            while self._steps:
                self._drop_oldest()
            forgotten, self.discarded = self.discarded, BufferedStep(0)
            self._pass_until = -1
            return forgotten

    # ---- releases

    def window(self, past: int) -> tuple[int, int]:
        """First and last of the newest ``past`` steps, the current one among them."""
        with self._lock:
            newest = [step.number for step in self._steps][-past:]
            return (newest[0], newest[-1]) if newest else (0, -1)

    def release(self, first: int, last: int, reason: str) -> ReleaseResult:
        """Send the steps ``first`` to ``last`` on their way, oldest first, each at most once.

        One that is still open, or not yet begun, goes on as it comes until the next one begins.
        """
        with self._lock:
            chosen = [step for step in self._steps if first <= step.number <= last and not step.passes_through]
            self._pass_until = max(self._pass_until, last)
            found = ReleaseResult(
                [step.number for step in chosen],
                sum(step.num_values for step in chosen),
                sum(step.nbytes for step in chosen),
                sum(step.num_dropped for step in chosen),
            )
            if chosen:
                fields = {"steps": found.steps, "num_values": found.num_values, "nbytes": found.nbytes}
                self._queue.append(encode_line(event_line("released", **fields, reason=reason)))
            for step in chosen:
                self._hand_over(step)
            return found

    def _hand_over(self, step: BufferedStep) -> None:
        self.used -= step.cost - step.nbytes
        self._lent += step.nbytes
        self._queue.put_released(step.release())

    def free(self, slot: PayloadSlot) -> None:
        """The recorder process has the bytes of a slot that was released."""
        with self._lock:
            self._lent -= slot.nbytes
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
        # Whole steps on their way to disk fill the memory: wait for them as a full backlog does, once a stall.
        if not self._lent or self._stalled:
            return False
        self._stalled = not self._queue.wait_until(lambda: self._make_room(nbytes) or not self._lent)
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
