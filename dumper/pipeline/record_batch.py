"""RecordBatch: assemble the records of one message to the recorder."""

from dataclasses import dataclass, field
from typing import Any

from tapscope.core.wire import Message
from tapscope.dumper.records.inflight_record import InflightRecord
from tapscope.dumper.records.payload_slot import PayloadSlot
from tapscope.dumper.records.record_lines import RecordLines
from tapscope.dumper.steps.deferred_line import DeferredLine
from tapscope.dumper.transport.packed_rows import PackedRows, SentTables
from tapscope.run_format.ledger import encode_line, event_line
from tapscope.run_format.record import FORWARD, tensor_name

LINE_COST = 512
"""Approximate memory in bytes that an unacknowledged line is charged for."""


@dataclass(slots=True)
class RecordBatch:
    """Lines and payloads of one message. Slots must not change until the recorder acknowledges the message."""

    lines: list[bytes] = field(default_factory=list)
    """Encoded lines; an item may contain several lines."""
    num_lines: int = 0
    """Number of lines, including those of packed rows."""
    blocks: list[tuple[int, PackedRows, int]] = field(default_factory=list)
    """(number of ordinary lines before the block, packed rows, index of the block in ``payloads``)"""
    num_packed: int = 0
    """Number of lines of packed rows."""
    payloads: list[list[Any]] = field(default_factory=list)
    """[line, payload number, tensor name, dtype, shape, offset in the ring or -1, nbytes] for each slot."""
    shared: list[list[int]] = field(default_factory=list)
    """[line, number of the payload with equal bytes]."""
    slots: list[PayloadSlot] = field(default_factory=list)
    """Memory to free when the batch is acknowledged."""
    frames: list[Any] = field(default_factory=list)
    """Bytes of the payloads outside the ring, in payload order."""
    num_records: int = 0

    def add(self, item: InflightRecord) -> None:
        """Add a record; one that cannot be encoded becomes a ``failed`` event."""
        line = self.num_lines
        self.num_records += 1
        try:
            if item.pending_copy is not None:
                item.pending_copy.finish(item)
            self.add_line(item.line())
        except Exception as error:  # noqa: BLE001 - a value that cannot be encoded must not end the capture
            fields = {"where": item.port.site, "reason": f"{type(error).__name__}: {error}"}
            event = event_line("failed", late=True, step=item.firing.step.info.step, **fields)
            self.add_line(encode_line(event))
            if item.slot is not None:
                self.slots.append(item.slot)
            return
        if item.slot is not None:
            stored = item.stored
            self._add_slot(line, item.payload, item.tensor_name(), stored.dtype, stored.shape, item.slot)
        elif item.payload is not None:
            self.shared.append([line, item.payload])

    def add_line(self, line: DeferredLine | bytes) -> None:
        """Add one or more encoded lines; a deferred line that cannot be encoded becomes a ``failed`` event."""
        try:
            text = bytes(line)
        except Exception as error:  # noqa: BLE001 - a line that cannot be encoded must not end the capture
            text = encode_line(event_line("failed", where="step", reason=f"{type(error).__name__}: {error}"))
        self.lines.append(text)
        self.num_lines += text.count(b"\n") + 1

    def add_lines(self, item: RecordLines) -> None:
        """Add already formatted records, or packed rows, with their payloads."""
        first = self.num_lines
        for line, number, (port, layout, slot) in item.payloads:
            name = tensor_name(port.site, item.step.info.step, 0, 0, FORWARD, port.model)
            self._add_slot(first + line, number, name, layout.dtype, layout.shape, slot)
        self.shared.extend([first + line, number] for line, number in item.shared)
        if isinstance(item.text, PackedRows):
            assert item.block is not None
            self.blocks.append((first - self.num_packed, item.text, len(self.payloads)))
            self._add_slot(first, None, "", "uint8", [item.block.nbytes], item.block)
            self.num_packed += item.num_lines
        else:
            self.lines.append(item.text)
        self.num_lines += item.num_lines
        self.num_records += item.num_lines

    def _add_slot(
        self, line: int, number: int | None, name: str, dtype: str, shape: list[int], slot: PayloadSlot
    ) -> None:
        self.payloads.append([line, number, name, dtype, shape, slot.offset, slot.nbytes])
        self.slots.append(slot)
        if slot.buffer is not None:
            self.frames.append(slot.buffer.data)

    @property
    def may_share(self) -> bool:
        """Whether the batch has payloads that records of the same generation may share, or references to some.

        Records of another generation must then go into the next message. Payloads in blocks are never shared.
        """
        return len(self.payloads) > len(self.blocks) or bool(self.shared)

    def message(self, sharing: int, tables: SentTables, **fields: Any) -> Message:
        """Build the ``batch`` message.

        ``sharing`` is the generation within which payloads are shared; ``tables`` tracks the tables of the recorder.
        """
        content = {"payloads": self.payloads, "shared": self.shared, "sharing_step": sharing, **fields}
        if self.blocks:
            content["blocks"] = [
                [before, tables.number_of(rows.table), rows.step, rows.number, payload, rows.has_sketches]
                for before, rows, payload in self.blocks
            ]
            content |= tables.take_changes()
        return Message("batch", content, [b"\n".join(self.lines), *self.frames])
