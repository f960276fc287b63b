"""AsyncCopy: one pending device-to-host copy of a value or of its statistics."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tapscope.dumper.device.device import CopyHandle
from tapscope.dumper.records.inflight_record import InflightRecord
from tapscope.dumper.records.payload_slot import PayloadSlot
from tapscope.dumper.records.record_layout import RecordLayout
from tapscope.dumper.records.record_lines import PendingLines
from tapscope.dumper.transport.packed_rows import PackedRows


class CopyFailed(Exception):
    """Raised when a value did not arrive from the device; the message is the reason. Internal to the dumper."""


class CopyOwner(Protocol):
    """The worker that performs a copy."""

    lock: Any
    """Guards completion of a copy and ownership of its slot."""

    @property
    def is_overdue(self) -> bool:
        """Whether the device has exceeded the time limit for completing a pending copy."""
        ...

    def finish(self, copy: "AsyncCopy", record: "InflightRecord | PendingLines") -> None:
        """Complete ``record`` with the result of ``copy``; raises CopyFailed."""
        ...


class DeviceDedup:
    """Deduplicates device payloads of equal bytes within one generation. Not thread-safe; used by one thread."""

    def __init__(self) -> None:
        self._generation = -1
        self._payloads: dict[tuple[bytes, int], int] = {}

    def payload_of(self, record: InflightRecord, digest: bytes) -> int:
        """Return the number of the payload that stores the record's bytes; its own number if the bytes are new."""
        if record.generation != self._generation:
            self._generation = record.generation
            self._payloads.clear()
        assert record.payload is not None
        return self._payloads.setdefault((digest, record.nbytes), record.payload)

    def payload_of_line(self, generation: int, nbytes: int, digest: bytes, number: int) -> int:
        """Return the payload number as :meth:`payload_of` does, for a payload of preformatted record lines."""
        if generation != self._generation:
            self._generation = generation
            self._payloads.clear()
        return self._payloads.setdefault((digest, nbytes), number)


class AsyncCopy:
    """One pending device-to-host copy; implements :class:`tapscope.dumper.records.inflight_record.PendingCopy`."""

    __slots__ = (
        "_worker",
        "digest",
        "free",
        "handle",
        "is_discarded",
        "is_done",
        "is_wanted",
        "layout",
        "on_stats",
        "problem",
        "read",
        "slot",
        "slots",
        "text",
    )

    def __init__(
        self,
        worker: CopyOwner,
        layout: RecordLayout,
        slot: PayloadSlot | None,
        free: Callable[[PayloadSlot], None] | None,
        on_stats: Callable[[bytes], bool] | None,
    ) -> None:
        self._worker = worker
        self.layout = layout
        self.slot = slot
        """Destination of the bytes; None for statistics computed on the device."""
        self.free = free
        """Called to free the slot when the copy is done; None while a record owns the slot."""
        self.on_stats = on_stats
        """Called in the worker's thread with the statistics; returns whether to keep the bytes."""
        self.is_wanted = slot is not None and free is None and on_stats is None
        """Whether the bytes are kept, in addition to their statistics."""
        self.is_discarded = False
        self.handle: CopyHandle | None = None
        self.text: bytes | PackedRows = b""
        self.digest = b""
        self.problem: str | None = None
        """Reason why the value did not arrive; None while pending and on success."""
        self.is_done = False
        self.read: Callable[[int], tuple[bytes | PackedRows, bytes]] | None = None
        """Converts the copied memory at a host address to (text, digests); None for a single value."""
        self.slots: Sequence[PayloadSlot] = ()
        """Slots that :attr:`read` fills."""

    @property
    def nbytes(self) -> int:
        """Number of payload bytes copied; 0 for statistics rows."""
        return 0 if self.slot is None else self.slot.nbytes

    @property
    def is_ready(self) -> bool:
        """Whether :meth:`finish` returns without waiting."""
        return self.is_done or self._worker.is_overdue

    def finish(self, record: "InflightRecord | PendingLines") -> None:
        """Wait for the copy and complete ``record``; raises CopyFailed.

        Called in the sender's thread, in the order of the records.
        """
        self._worker.finish(self, record)

    def discard_slots(self, free: Callable[[PayloadSlot], None]) -> None:
        """Discard the lines of this copy and ``free`` their slots once the copy no longer writes to them."""
        with self._worker.lock:
            if not self.is_done:
                self.is_discarded, self.free = True, free
                return
        for slot in self.slots:
            free(slot)

    def discard(self, slot: PayloadSlot, free: Callable[[PayloadSlot], None]) -> None:
        """Discard the record of this copy and ``free`` its slot once the copy no longer writes to it."""
        with self._worker.lock:
            if not self.is_done:
                self.is_discarded, self.free = True, free
                return
        free(slot)
