"""Copy: one value on its way from a device, as the rest of its record."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from tapscope.dumper.device.device import CopyHandle
from tapscope.dumper.records.payload_slot import PayloadSlot

if TYPE_CHECKING:
    from tapscope.dumper.device.d2h_worker import D2HWorker
    from tapscope.dumper.records.inflight_record import InflightRecord
    from tapscope.dumper.records.site_port import RecordLayout


class CopyFailed(Exception):
    """A value did not come from the device; the text says why. Never leaves the dumper."""


class DeviceDedup:
    """Payloads of one generation that came from a device: only here is known which are equal. One thread uses it."""

    def __init__(self) -> None:
        self._generation = -1
        self._payloads: dict[tuple[bytes, int], int] = {}

    def payload_of(self, record: "InflightRecord", digest: bytes) -> int:
        """Number of the payload that holds the record's bytes: its own, if they are new."""
        if record.generation != self._generation:
            self._generation = record.generation
            self._payloads.clear()
        assert record.payload is not None
        return self._payloads.setdefault((digest, record.nbytes), record.payload)


class AsyncCopy:
    """One value on its way; a :class:`tapscope.dumper.records.inflight_record.PendingCopy`."""

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
        "slot",
        "text",
    )

    def __init__(
        self,
        worker: "D2HWorker",
        layout: "RecordLayout",
        slot: PayloadSlot | None,
        free: Callable[[PayloadSlot], None] | None,
        ask: Callable[[bytes], bool] | None,
    ) -> None:
        self._worker = worker
        self.layout = layout
        self.slot = slot
        """Where the bytes go; None for a row, of which the device has computed the statistics."""
        self.free = free
        """Who gets the slot back when it is done; None while a record holds it."""
        self.on_stats = ask
        """Asked in the drain's thread with the text: whether the bytes are wanted after all."""
        self.is_wanted = slot is not None and free is None and ask is None
        """Whether the bytes are kept, not only their statistics."""
        self.is_discarded = False
        self.handle: CopyHandle | None = None
        self.text = b""
        self.digest = b""
        self.problem: str | None = None
        """Why it did not come."""
        self.is_done = False

    @property
    def nbytes(self) -> int:
        """Bytes that come from the device, but for rows."""
        return 0 if self.slot is None else self.slot.nbytes

    @property
    def is_ready(self) -> bool:
        """Whether :meth:`finish` need not wait."""
        return self.is_done or self._worker.is_overdue

    def finish(self, record: "InflightRecord") -> None:
        """Fill the record in; raises NotArrived. In the pipeline's thread, in the order of the records."""
        self._worker.finish(self, record)

    def discard(self, slot: PayloadSlot, free: Callable[[PayloadSlot], None]) -> None:
        """The record will not be sent: ``free`` the slot as soon as nothing writes there any more."""
        with self._worker.lock:
            if not self.is_done:
                self.is_discarded, self.free = True, free
                return
        free(slot)
