"""Pending: a record on its way."""

from collections.abc import Callable
from typing import Protocol

from tapscope.dumper.records.firing import Stamp, record_line
from tapscope.dumper.records.payload_slot import Slot
from tapscope.dumper.records.site_port import Layout, Port


class Arrival(Protocol):
    """The rest of a record, which is still on its way from a device."""

    @property
    def is_here(self) -> bool:
        """Whether it has come, or never will: nobody then waits for it."""
        ...

    def finish(self, pending: "Pending") -> None:
        """Fill the record in; raises with the reason when it did not come. In the pipeline's thread, in order."""
        ...

    def give_up(self, slot: Slot, free: Callable[[Slot], None]) -> None:
        """The record is not sent after all: ``free`` its slot once nothing writes there any more."""
        ...


class Pending:
    """A record on its way. Its line is written in the pipeline's thread: the forward thread has no time for text."""

    __slots__ = ("arrival", "content", "generation", "layout", "payload", "port", "seq", "slot", "stamp")

    def __init__(
        self,
        port: Port,
        stamp: Stamp,
        seq: int,
        layout: Layout,
        content: bytes,
        generation: int,
        payload: int | None = None,
        slot: Slot | None = None,
    ) -> None:
        self.port = port
        self.stamp = stamp
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
        self.arrival: Arrival | None = None
        """What has yet to come of it, from a device; it is sent when that is here."""

    @property
    def nbytes(self) -> int:
        """Of the payload that travels with it."""
        return self.slot.nbytes if self.slot is not None else 0

    @property
    def is_here(self) -> bool:
        """Whether it can be sent."""
        return self.arrival is None or self.arrival.is_here

    def give_up(self, free: Callable[[Slot], None]) -> None:
        """It is not sent after all: ``free`` its slot once nothing writes there any more; from any thread."""
        if self.slot is None:
            return
        if self.arrival is None:
            free(self.slot)
        else:
            self.arrival.give_up(self.slot, free)

    def line(self) -> bytes:
        """The ``record`` line without its entry."""
        return record_line(self.seq, self.port, self.stamp, self.layout.text, self.content)
