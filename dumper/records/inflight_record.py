"""InflightRecord: a record in flight to the recorder, and the sink interface."""

from collections.abc import Callable
from typing import Protocol

from tapscope.dumper.records.firing import Firing, json_text
from tapscope.dumper.records.payload_slot import PayloadSlot, SlotSource
from tapscope.dumper.records.record_layout import RecordLayout
from tapscope.dumper.records.site_port import SitePort
from tapscope.dumper.steps.deferred_line import DeferredLine
from tapscope.run_format.record import FORWARD, tensor_name


class PendingCopy(Protocol):
    """Asynchronous device-to-host copy of the statistics or bytes of a record."""

    @property
    def is_ready(self) -> bool:
        """Whether the copy has completed or failed."""
        ...

    def finish(self, record: "InflightRecord") -> None:
        """Complete ``record`` with the copied data; raises if the copy failed.

        Called in the sender's thread, in record order.
        """
        ...

    def discard(self, slot: PayloadSlot, free: Callable[[PayloadSlot], None]) -> None:
        """Discard the record: call ``free`` on its slot once no copy writes to it any more."""
        ...


class InflightRecord:
    """A record in flight; the sender's thread formats its line, which takes this work off the forward's thread."""

    __slots__ = (
        "content",
        "firing",
        "generation",
        "layout",
        "payload",
        "pending_copy",
        "port",
        "seq",
        "slot",
        "stored",
    )

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
        """JSON fields of the line from ``value`` to ``stats``."""
        self.generation = generation
        """Number of the scope within which payloads are shared, see :class:`.DedupCache`."""
        self.payload = payload
        """Number of the payload with the record's bytes, either the one in ``slot`` or an equal one sent before."""
        self.slot = slot
        """Bytes to send; None if there are none or equal bytes were sent before."""
        self.stored: RecordLayout = layout
        """Layout of the stored bytes: of the tensor, or of the sketch that is stored instead."""
        self.pending_copy: PendingCopy | None = None
        """Pending device copy; the record is sent once it is ready."""

    @property
    def nbytes(self) -> int:
        """Size in bytes of the payload in ``slot``; 0 without one."""
        return self.slot.nbytes if self.slot is not None else 0

    @property
    def is_ready(self) -> bool:
        """Whether the record can be sent."""
        return self.pending_copy is None or self.pending_copy.is_ready

    def discard(self, free: Callable[[PayloadSlot], None]) -> None:
        """Drop the record: call ``free`` on its slot once no copy writes to it any more. Thread-safe."""
        if self.slot is None:
            return
        if self.pending_copy is None:
            free(self.slot)
        else:
            self.pending_copy.discard(self.slot, free)

    def line(self) -> bytes:
        """Format the ``record`` line of run-format.md without its entry, much faster than :func:`.record.encode`."""
        port, layout = self.port, self.layout.members
        step, occurrence, micro, pass_, tags = self.firing
        text = f'{{"type":"record","seq":{self.seq},"site":{port.site_text},"step":{step.info.step}'
        if occurrence or micro or tags or pass_ is not FORWARD:
            text += self.firing.members()
            layout += f',"tags":{json_text(tags)}' if tags else ""
        return b"%b,%b}" % (f"{text}{port.model_text}{layout}".encode(), self.content)

    def tensor_name(self) -> str:
        """Return the name of the payload in its segment."""
        step, occurrence, micro, pass_, _ = self.firing
        return tensor_name(self.port.site, step.info.step, occurrence, micro, pass_, self.port.model)


class Sink(SlotSource, Protocol):
    """Destination of records: the send queue, or a sink in front of it such as the flight recorder."""

    def put(self, record: InflightRecord) -> bool:
        """Queue a record and count it as sent in its step; return False if it was dropped and its slot freed."""
        ...

    def append(self, line: DeferredLine | bytes) -> None:
        """Queue a line that is not a record."""
        ...
