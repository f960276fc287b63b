"""Outbox: queue of the items to send to the recorder."""

import time
from collections import deque

from tapscope.core.wire import Message
from tapscope.dumper.records.inflight_record import InflightRecord
from tapscope.dumper.records.record_lines import PendingLines, RecordLines
from tapscope.dumper.steps.deferred_line import DeferredLine

Item = InflightRecord | RecordLines | PendingLines | DeferredLine | bytes | Message
BATCH_BYTES = 8 * 1024 * 1024
BATCH_RECORDS = 4096
_PACE_S = 0.05  # minimum interval between partial batches: even a small message has a fixed cost
_MAY_BE_LATE = (InflightRecord, DeferredLine, PendingLines)


class Outbox:
    """A FIFO queue that releases an item only once its copy from the device is complete.

    Not thread-safe: the owner must hold a lock.
    """

    def __init__(self) -> None:
        self._items: deque[Item] = deque()
        self._num_records = 0
        self._nbytes = 0
        self._is_flushed = False
        self._is_soon = False  # flush_soon() was called
        self._next = 0.0  # earliest time at which flush_soon() takes effect again

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: Item, num_records: int = 0, nbytes: int = 0) -> bool:
        """Queue an item with its number of records and payload bytes; return whether it completes a full batch."""
        records, before = self._num_records, self._nbytes
        self._items.append(item)
        self._num_records += num_records
        self._nbytes += nbytes
        return records < BATCH_RECORDS <= self._num_records or before < BATCH_BYTES <= self._nbytes

    def flush(self) -> None:
        """Release all queued items for sending, even if they do not fill a batch."""
        self._is_flushed = True

    def flush_soon(self) -> bool:
        """Release all queued items like :meth:`flush`, but at most 20 times per second.

        Returns whether they are released immediately.
        """
        self._is_soon = True
        return not self.pause_s()

    def pause_s(self) -> float:
        """Return the time in seconds until :meth:`flush_soon` releases the items; 0 if it need not wait."""
        pause_s = max(self._next - time.monotonic(), 0.0)
        self._is_flushed = self._is_flushed or (self._is_soon and not pause_s)
        return pause_s

    def clear(self) -> None:
        """Discard all items."""
        self._items.clear()
        self._num_records = self._nbytes = 0

    @property
    def is_ready(self) -> bool:
        """Whether a batch can be sent now: it is full or flushed, and the first item is complete."""
        enough = self._num_records >= BATCH_RECORDS or self._nbytes >= BATCH_BYTES
        return (enough or self._is_flushed) and self._head_is_here()

    @property
    def is_awaiting_device(self) -> bool:
        """Whether a queued value is still being copied from a device."""
        return any(isinstance(item, _MAY_BE_LATE) and not item.is_ready for item in self._items)

    def take(self) -> list[Item]:
        """Remove and return at most one batch of items, up to the first item that is not ready."""
        items: list[Item] = []
        number = nbytes = 0
        while self._head_is_here() and len(items) < BATCH_RECORDS > number and nbytes < BATCH_BYTES:
            item = self._items.popleft()
            items.append(item)
            if isinstance(item, InflightRecord):
                number += 1
                nbytes += item.nbytes
            elif isinstance(item, (RecordLines, PendingLines)):
                number += item.num_lines
                nbytes += item.nbytes
        self._num_records -= number
        self._nbytes -= nbytes
        self._is_flushed, self._is_soon = self._is_flushed and bool(self._items), self._is_soon and bool(self._items)
        self._next = time.monotonic() + _PACE_S
        return items

    def _head_is_here(self) -> bool:
        if not self._items:
            return False
        head = self._items[0]
        return not isinstance(head, _MAY_BE_LATE) or head.is_ready
