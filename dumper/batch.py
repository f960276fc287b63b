"""Batch: what goes to the recorder in one message."""

from dataclasses import dataclass, field
from typing import Any

import torch

from tapscope import record
from tapscope.ledger import encode_line, event_line
from tapscope.record import Record
from tapscope.wire import Message

_LINE_COST = 512


@dataclass(slots=True)
class Pending:
    """A record on its way."""

    record: Record
    buffer: torch.Tensor | None = None
    """The bytes to send, from the pool; None when there are none or they have been sent."""
    payload: int | None = None
    """Number of the payload that holds the record's bytes: the buffer's, or that of an equal one of the same step."""

    @property
    def cost(self) -> int:
        """Bytes it is charged for while it is on its way: the payload and, roughly, its line."""
        return _LINE_COST + (self.buffer.numel() if self.buffer is not None else 0)


@dataclass(slots=True)
class Batch:
    """Lines and payloads of one message; the buffers stay untouched until it is acknowledged."""

    lines: list[bytes] = field(default_factory=list)
    payloads: list[list[Any]] = field(default_factory=list)
    """[line, payload number, tensor name, dtype, shape] of every buffer."""
    shared: list[list[Any]] = field(default_factory=list)
    """[line, number of the payload that holds the same bytes]."""
    buffers: list[torch.Tensor] = field(default_factory=list)
    cost: int = 0

    def add(self, item: Pending) -> None:
        """Take a record in; one that cannot be encoded becomes an event that says so."""
        self.cost += item.cost
        rec = item.record
        try:
            encoded = record.encode(rec)
        except Exception as error:  # noqa: BLE001 - one value that cannot be encoded must not end the capture
            fields = {"where": rec.key.site, "reason": f"{type(error).__name__}: {error}", "step": rec.key.step}
            self.lines.append(encode_line(event_line("failed", late=True, **fields)))
            return
        line = len(self.lines)
        self.lines.append(encoded)
        if item.buffer is not None:
            self.payloads.append([line, item.payload, rec.key.tensor_name, rec.dtype, list(rec.shape)])
            self.buffers.append(item.buffer)
        elif item.payload is not None:
            self.shared.append([line, item.payload])

    def message(self, number: int, sharing: int, **fields: Any) -> Message:
        """The ``batch`` message; ``sharing`` is the step within which payloads are shared."""
        content = {"n": number, "payloads": self.payloads, "shared": self.shared, "sharing_step": sharing, **fields}
        return Message("batch", content, [b"\n".join(self.lines), *(buffer.numpy().data for buffer in self.buffers)])
