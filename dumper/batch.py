"""Batch: what goes to the recorder in one message."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from tapscope.dumper.pen import Lines
from tapscope.dumper.port import Layout, Port
from tapscope.dumper.slot import Slot
from tapscope.dumper.stamp import Stamp, record_line
from tapscope.ledger import encode_line, event_line
from tapscope.record import FORWARD, tensor_name
from tapscope.wire import Message

LINE_COST = 512
"""Bytes that a line is charged for while it is on its way, roughly."""


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


@dataclass(slots=True)
class Batch:
    """Lines and payloads of one message; the slots stay untouched until it is acknowledged."""

    lines: list[bytes] = field(default_factory=list)
    """One text may be many lines."""
    num_lines: int = 0
    payloads: list[list[Any]] = field(default_factory=list)
    """[line, payload number, tensor name, dtype, shape, offset in the ring or -1, nbytes] of every slot."""
    shared: list[list[int]] = field(default_factory=list)
    """[line, number of the payload that holds the same bytes]."""
    slots: list[Slot] = field(default_factory=list)
    frames: list[Any] = field(default_factory=list)
    """The bytes of payloads that are not in the ring, in their order."""
    num_records: int = 0

    def add(self, item: Pending) -> None:
        """Take a record in."""
        line = self.num_lines
        self.num_records += 1
        try:
            if item.arrival is not None:
                item.arrival.finish(item)
            self.add_line(item.line())
        except Exception as error:  # noqa: BLE001 - one value that cannot be encoded must not end the capture
            fields = {"where": item.port.site, "reason": f"{type(error).__name__}: {error}"}
            event = event_line("failed", late=True, step=item.stamp.step.info.step, **fields)
            self.add_line(encode_line(event))
            if item.slot is not None:
                self.slots.append(item.slot)
            return
        if item.slot is not None:
            self._add_payload(line, item.payload, item.stamp.tensor_name(item.port), item.layout, item.slot)
        elif item.payload is not None:
            self.shared.append([line, item.payload])

    def add_line(self, line: bytes) -> None:
        """Take a line in that is no record."""
        self.lines.append(line)
        self.num_lines += 1

    def add_lines(self, item: Lines) -> None:
        """Take records in that are text already."""
        first = self.num_lines
        for line, number, (port, layout, slot) in item.payloads:
            name = tensor_name(port.site, item.step.info.step, 0, 0, FORWARD, port.model)
            self._add_payload(first + line, number, name, layout, slot)
        self.shared.extend([first + line, number] for line, number in item.shared)
        self.lines.append(item.text)
        self.num_lines += item.number
        self.num_records += item.number

    def _add_payload(self, line: int, number: int | None, name: str, layout: Layout, slot: Slot) -> None:
        self.payloads.append([line, number, name, layout.dtype, layout.shape, slot.offset, slot.nbytes])
        self.slots.append(slot)
        if slot.buffer is not None:
            self.frames.append(slot.buffer.data)

    @property
    def has_payloads(self) -> bool:
        """Whether it holds or names any."""
        return bool(self.payloads or self.shared)

    def message(self, sharing: int, **fields: Any) -> Message:
        """The ``batch`` message; ``sharing`` is the generation within which payloads are shared."""
        content = {"payloads": self.payloads, "shared": self.shared, "sharing_step": sharing, **fields}
        return Message("batch", content, [b"\n".join(self.lines), *self.frames])
