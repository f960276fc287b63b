"""RecordQueue: numbers the records of a run and queues them in order, together with their site lines."""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tapscope.dumper.device.graph_fetch import fetch_here
from tapscope.dumper.pipeline.send_queue import SendQueue
from tapscope.dumper.records.dedup_cache import DedupCache
from tapscope.dumper.records.firing import Firing
from tapscope.dumper.records.inflight_record import InflightRecord
from tapscope.dumper.records.payload_slot import PayloadSlot
from tapscope.dumper.records.record_layout import RecordLayout
from tapscope.dumper.records.site_port import SitePort
from tapscope.dumper.records.snapshot import TensorSnapshot
from tapscope.dumper.retention.retention_policy import RetentionPolicy
from tapscope.dumper.retention.step_counters import StepCounters
from tapscope.kernels.native import library
from tapscope.run_format.ledger import encode_line


class Numbers:
    """Thread-safe iterator over the integers from 0; Python fallback of the C++ class."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._next = 0

    def __iter__(self) -> "Numbers":
        return self

    def __next__(self) -> int:
        return self.take(1)

    def take(self, count: int) -> int:
        """Reserve ``count`` consecutive numbers; returns the first."""
        with self._lock:
            first = self._next
            self._next += count
            return first


class RecordQueue:
    """The last stage of a record before the sink: numbering, site line, ordering, budgets, and counting of drops."""

    def __init__(self, queue: SendQueue, retention: RetentionPolicy, counters: StepCounters, dedup: DedupCache) -> None:
        self._queue = queue
        self._retention = retention
        self._counters = counters
        self._dedup = dedup
        self._announced_sites: set[str] = set()
        self._counter = _counter()
        self.numbers: Iterator[int] = self._counter
        """Iterator over the numbers of future records."""
        self.lock = threading.RLock()
        """Held while records are queued, so that they arrive in order."""
        self.flush_native: Callable[[], None] = lambda: None
        """Queues the native writer's buffered records, which precede the next record. Called under :attr:`lock`."""

    def restart(self) -> None:
        """Start a new run: number records from 0 and announce sites again."""
        self.numbers = self._counter = _counter()
        self._announced_sites.clear()

    def next_numbers(self, count: int) -> int:
        """Reserve ``count`` consecutive record numbers; returns the first."""
        return int(self._counter.take(count))

    def next_number(self) -> int:
        """Reserve the number of a record that is queued later."""
        return next(self.numbers)

    @contextmanager
    def reusing(self, number: int) -> Iterator[None]:
        """Context manager: assign the reserved ``number`` to the next record."""
        after, self.numbers = self.numbers, itertools.chain((number,), self.numbers)
        try:
            yield
        finally:
            self.numbers = after

    def announce(self, port: SitePort) -> None:
        """Queue the ``site`` line of ``port``, once per site and run."""
        port.announced = True
        if port.site not in self._announced_sites:
            self._announced_sites.add(port.site)
            self._queue.append(encode_line(port.site_line()))

    def put_snapshot(
        self, port: SitePort, firing: Firing, layout: RecordLayout, snapshot: TensorSnapshot | None
    ) -> None:
        """Queue the record of a tensor snapshot; None means that there was no memory for the bytes: count a drop."""
        if snapshot is None:
            self._counters.count(firing.step, dropped=1)
            return
        dedup = self._dedup
        stats, digest, payload, slot = snapshot
        record = InflightRecord(port, firing, next(self.numbers), layout, stats, dedup.generation, payload, slot)
        if self.put(record) and slot is not None and payload is not None:
            dedup.add_payload(digest, slot.nbytes, payload)

    def new_record(
        self, port: SitePort, firing: Firing, layout: RecordLayout, content: bytes, slot: PayloadSlot | None = None
    ) -> InflightRecord:
        """Create a record with the next number, to be queued by :meth:`put`.

        The bytes in ``slot``, if given, become a new payload of the record, without deduplication.
        """
        number, dedup = self.next_number(), self._dedup
        payload = None if slot is None else dedup.next_number()
        return InflightRecord(port, firing, number, layout, content, dedup.generation, payload, slot)

    def put(self, record: InflightRecord) -> bool:
        """Queue a record after the native writer's buffered ones; returns False if the record was dropped."""
        if (fetch := fetch_here()) is not None:
            fetch.learn(record)
        with self.lock:
            self.flush_native()
            accepted = self._counters.sink.put(record)
        if not accepted:
            self._counters.count(record.firing.step, dropped=1)
        elif self._retention.is_limited:
            self._retention.charge(record)
        return accepted


def _counter() -> Any:
    """Return a counter: the C++ implementation if available, otherwise :class:`Numbers`."""
    functions = library.functions()
    return Numbers() if functions is None else functions.numbers()
