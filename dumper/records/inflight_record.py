"""Pending: a record on its way."""

from collections.abc import Callable
from typing import Protocol

from tapscope.dumper.records.firing import Firing, record_line
from tapscope.dumper.records.payload_slot import PayloadSlot
from tapscope.dumper.records.site_port import RecordLayout, SitePort


class PendingCopy(Protocol):
    """The rest of a record, which is still on its way from a device."""

    @property
    def is_ready(self) -> bool:
        """Whether it has come, or never will: nobody then waits for it."""
        ...

    def finish(self, record: "InflightRecord") -> None:
        """Fill the record in; raises with the reason when it did not come. In the pipeline's thread, in order."""
        ...

    def discard(self, slot: PayloadSlot, free: Callable[[PayloadSlot], None]) -> None:
        """The record is not sent after all: ``free`` its slot once nothing writes there any more."""
        ...


class InflightRecord:
    """A record on its way. Its line is written in the pipeline's thread: the forward thread has no time for text."""

    __slots__ = ("content", "firing", "generation", "layout", "payload", "pending_copy", "port", "seq", "slot")

    def __init__(
        self,
        port: SitePort,
        firing: Firing,
        seq: int,
        layout: RecordLayout,
        content: bytes,
        generation: int,
        payload: int | None = None,
        slot: PayloadSlot | None = None,
    ) -> None:
        self.port = port
        self.firing = firing
        self.seq = seq
        self.layout = layout
        self.content = content
        """The line's members from ``value`` to ``stats``."""
        self.generation = generation
        """Payloads are shared within one."""
        self.payload = payload
        """Number of the payload that holds the record's bytes: the slot's, or that of an equal one."""
        self.slot = slot
        """The bytes to send; None when there are none or they have been sent."""
        self.pending_copy: PendingCopy | None = None
        """What has yet to come of it, from a device; it is sent when that is here."""

    @property
    def nbytes(self) -> int:
        """Of the payload that travels with it."""
        return self.slot.nbytes if self.slot is not None else 0

    @property
    def is_ready(self) -> bool:
        """Whether it can be sent."""
        return self.pending_copy is None or self.pending_copy.is_ready

    def discard(self, free: Callable[[PayloadSlot], None]) -> None:
        """It is not sent after all: ``free`` its slot once nothing writes there any more; from any thread."""
        if self.slot is None:
            return
        if self.pending_copy is None:
            free(self.slot)
        else:
            self.pending_copy.discard(self.slot, free)

    def line(self) -> bytes:
        """The ``record`` line without its entry."""
        return record_line(self.seq, self.port, self.firing, self.layout.members, self.content)
