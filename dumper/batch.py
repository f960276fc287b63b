"""Batch: what goes to the recorder in one message, and the bytes a step has sent already."""

import logging
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from tapscope import record
from tapscope.dumper.capture import Snapshot, measure_snapshot
from tapscope.record import Record
from tapscope.wire import Message

_log = logging.getLogger("tapscope")
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
    """[line, tensor name, dtype, shape] of every buffer that is sent."""
    shared: list[list[Any]] = field(default_factory=list)
    """[line, tensor name of the payload that holds the same bytes]."""
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
        self._names: dict[tuple[str, int], str] = {}

    def enter(self, step: int) -> None:
        """Records of another step begin; nothing is shared across steps."""
        self.step = step
        self._names.clear()

    def add(self, item: Pending, batch: Batch) -> None:
        """Put a record of this step into the batch, with its bytes unless they have been sent."""
        batch.cost += item.cost
        taken = item.snapshot
        if taken is None:
            batch.lines.append(record.encode(item.record))
            return
        try:
            stats, digest = measure_snapshot(taken, item.count)
        except Exception as error:  # noqa: BLE001 - one value that cannot be measured must not end the capture
            _log.warning("tapscope: %s was not kept: %s: %s", item.record.key.site, type(error).__name__, error)
            batch.unsent.append(taken.buffer)
            return
        line, same, name = len(batch.lines), (digest, taken.nbytes), item.record.key.tensor_name
        batch.lines.append(record.encode(replace(item.record, stats=stats, hash=digest)))
        if same in self._names:
            batch.shared.append([line, self._names[same]])
            batch.unsent.append(taken.buffer)
        else:
            self._names[same] = name
            batch.payloads.append([line, name, taken.dtype, list(taken.shape)])
            batch.sent.append(taken.buffer)
