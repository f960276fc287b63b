"""Batch: what goes to the recorder in one message, and the bytes a step has sent already."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tapscope import record
from tapscope.dumper.capture import Snapshot, measure_snapshot
from tapscope.ledger import encode_line, event_line
from tapscope.record import Record
from tapscope.wire import Message

_LINE_COST = 512


@dataclass(slots=True)
class Pending:
    """A record on its way; statistics of a snapshot are taken in the pipeline's thread."""

    record: Record
    snapshot: Snapshot | None
    count: int
    """Elements of the snapshot."""

    @property
    def cost(self) -> int:
        """Bytes it is charged for while it is on its way: the payload and, roughly, its line."""
        return _LINE_COST + (self.snapshot.nbytes if self.snapshot else 0)


@dataclass(slots=True)
class Batch:
    """Lines and payloads of one message; the buffers stay untouched until it is acknowledged."""

    lines: list[bytes] = field(default_factory=list)
    payloads: list[list[Any]] = field(default_factory=list)
    """[line, payload number, tensor name, dtype, shape] of every buffer that is sent."""
    shared: list[list[Any]] = field(default_factory=list)
    """[line, number of the payload that holds the same bytes]."""
    sent: list[torch.Tensor] = field(default_factory=list)
    unsent: list[torch.Tensor] = field(default_factory=list)
    cost: int = 0

    @property
    def buffers(self) -> list[torch.Tensor]:
        """Every buffer to give back."""
        return [*self.sent, *self.unsent]

    def message(self, number: int, sharing: int, **fields: Any) -> Message:
        """The ``batch`` message."""
        content = {"n": number, "payloads": self.payloads, "shared": self.shared, "sharing_step": sharing, **fields}
        return Message("batch", content, [b"\n".join(self.lines), *(buffer.numpy().data for buffer in self.sent)])


class Sharing:
    """Equal bytes are sent once a step: a layer's input is the output of the one before."""

    def __init__(self) -> None:
        self.step = -1
        self._numbers: dict[tuple[str, int], int] = {}
        self._next = 0

    def enter(self, step: int) -> None:
        """Records of another step begin; nothing is shared across steps."""
        self.step = step
        self._numbers.clear()

    def add(self, item: Pending, batch: Batch) -> None:
        """Put a record of this step into the batch, with its bytes unless they have been sent."""
        batch.cost += item.cost
        try:
            self._add(item, batch)
        except Exception as error:  # noqa: BLE001 - one value that cannot be encoded must not end the capture
            where, reason = item.record.key.site, f"{type(error).__name__}: {error}"
            fields = {"where": where, "reason": reason, "step": item.record.key.step, "late": True}
            batch.lines.append(encode_line(event_line("failed", **fields)))
            if item.snapshot is not None:
                batch.unsent.append(item.snapshot.buffer)

    def _add(self, item: Pending, batch: Batch) -> None:
        taken = item.snapshot
        if taken is None:
            batch.lines.append(record.encode(item.record))
            return
        stats, digest = measure_snapshot(taken, item.count)
        encoded = record.encode(replace(item.record, stats=stats, hash=digest))
        line, same = len(batch.lines), (digest, taken.nbytes)
        batch.lines.append(encoded)
        if same in self._numbers:
            batch.shared.append([line, self._numbers[same]])
            batch.unsent.append(taken.buffer)
            return
        self._numbers[same] = number = self._next
        self._next += 1
        batch.payloads.append([line, number, item.record.key.tensor_name, taken.dtype, list(taken.shape)])
        batch.sent.append(taken.buffer)
