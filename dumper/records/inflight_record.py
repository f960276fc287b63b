"""InflightRecord: a record on its way to the recorder, and the sinks that accept it."""

from collections.abc import Callable
from typing import Protocol

from tapscope.dumper.records.firing import Firing, json_text
from tapscope.dumper.records.payload_slot import PayloadSlot, SlotSource
from tapscope.dumper.records.record_layout import RecordLayout
from tapscope.dumper.records.site_port import SitePort
from tapscope.dumper.steps.deferred_line import DeferredLine
from tapscope.run_format.record import FORWARD, tensor_name


class PendingCopy(Protocol):
    """The part of a record that is still being copied from a device."""

    @property
    def is_ready(self) -> bool:
        """Whether it has arrived or never will, so that nobody waits for it."""
        ...

    def finish(self, record: "InflightRecord") -> None:
        """Complete the record; raises when it did not arrive. In the sender's thread, in the order of the records."""
        ...

    def discard(self, slot: PayloadSlot, free: Callable[[PayloadSlot], None]) -> None:
        """The record is not sent: ``free`` its slot once nothing writes to it any more."""
        ...


class InflightRecord:
    """A record on its way. The sender's thread formats its line, so that the forward's thread need not."""

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
        """Members of the line from ``value`` to ``stats``."""
        self.generation = generation
        """Payloads are shared within one generation."""
        self.payload = payload
        """Number of the payload with the record's bytes: that of the slot, or of an equal one."""
        self.slot = slot
        """The bytes to send; None when there are none or they were sent already."""
        self.stored: RecordLayout = layout
        """The layout of the bytes: that of the tensor, or of the sketch that is kept instead."""
        self.pending_copy: PendingCopy | None = None
        """What is still being copied from a device; the record is sent when it is ready."""

    @property
    def nbytes(self) -> int:
        """Bytes of its own payload."""
        return self.slot.nbytes if self.slot is not None else 0

    @property
    def is_ready(self) -> bool:
        """Whether it can be sent."""
        return self.pending_copy is None or self.pending_copy.is_ready

    def discard(self, free: Callable[[PayloadSlot], None]) -> None:
        """Drop the record: ``free`` its slot once nothing writes to it any more. Any thread."""
        if self.slot is None:
            return
        if self.pending_copy is None:
            free(self.slot)
        else:
            self.pending_copy.discard(self.slot, free)

    def line(self) -> bytes:
        """The ``record`` line of run-format.md without its entry: as :func:`.record.encode`, many times faster."""
        port, layout = self.port, self.layout.members
        step, occurrence, micro, pass_, tags = self.firing
        text = f'{{"type":"record","seq":{self.seq},"site":{port.site_text},"step":{step.info.step}'
        if occurrence or micro or tags or pass_ is not FORWARD:
            text += self.firing.members()
            layout += f',"tags":{json_text(tags)}' if tags else ""
        return b"%b,%b}" % (f"{text}{port.model_text}{layout}".encode(), self.content)

    def tensor_name(self) -> str:
        """The name of its payload in its segment."""
        step, occurrence, micro, pass_, _ = self.firing
        return tensor_name(self.port.site, step.info.step, occurrence, micro, pass_, self.port.model)


class Sink(SlotSource, Protocol):
    """Accepts records: the send queue, or a sink that holds them first."""

    def put(self, record: InflightRecord) -> bool:
        """Queue a record and count it as sent in its step; False when it was dropped and its slot freed."""
        ...

    def append(self, line: DeferredLine | bytes) -> None:
        """Queue a line that is not a record."""
        ...
