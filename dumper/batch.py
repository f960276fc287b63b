"""Batch: what goes to the recorder in one message."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tapscope.dumper.slot import Slot
from tapscope.wire import Message

LINE_COST = 512
"""Bytes that a line is charged for while it is on its way, roughly."""


@dataclass(slots=True)
class Pending:
    """A record on its way."""

    line: bytes
    """Without its entry."""
    generation: int
    """Payloads are shared within one."""
    payload: int | None = None
    """Number of the payload that holds the record's bytes: the slot's, or that of an equal one."""
    slot: Slot | None = None
    """The bytes to send; None when there are none or they have been sent."""
    head: tuple[str, str, list[int]] = ("", "", [])
    """Tensor name, dtype and shape of the payload."""
    finish: "Callable[[Pending], None] | None" = None
    """Called in the pipeline's thread before the record is sent: fills in what only the device knew."""


@dataclass(slots=True)
class Batch:
    """Lines and payloads of one message; the slots stay untouched until it is acknowledged."""

    lines: list[bytes] = field(default_factory=list)
    payloads: list[list[Any]] = field(default_factory=list)
    """[line, payload number, tensor name, dtype, shape, offset in the ring or -1, nbytes] of every slot."""
    shared: list[list[int]] = field(default_factory=list)
    """[line, number of the payload that holds the same bytes]."""
    slots: list[Slot] = field(default_factory=list)
    num_records: int = 0

    def add(self, item: Pending) -> None:
        """Take a record in."""
        line = len(self.lines)
        self.lines.append(item.line)
        self.num_records += 1
        slot = item.slot
        if slot is not None:
            self.payloads.append([line, item.payload, *item.head, slot.offset, slot.nbytes])
            self.slots.append(slot)
        elif item.payload is not None:
            self.shared.append([line, item.payload])

    @property
    def cost(self) -> int:
        """Bytes its records were charged for."""
        return self.num_records * LINE_COST + sum(slot.nbytes for slot in self.slots)

    def message(self, number: int, sharing: int, **fields: Any) -> Message:
        """The ``batch`` message; ``sharing`` is the generation within which payloads are shared."""
        content = {"n": number, "payloads": self.payloads, "shared": self.shared, "sharing_step": sharing, **fields}
        frames = [slot.buffer.data for slot in self.slots if slot.buffer is not None]
        return Message("batch", content, [b"\n".join(self.lines), *frames])
