"""ReplayPlan: record all values of a CUDA graph replay in one operation.

The record lines of different replays of a graph differ only in sequence numbers, the step, statistics and bytes.
"""

import ctypes
import struct
from collections.abc import Sequence
from typing import NamedTuple

from tapscope.dumper.records import sketcher
from tapscope.dumper.records.inflight_record import InflightRecord
from tapscope.dumper.records.payload_slot import PayloadSlot
from tapscope.dumper.records.record_layout import RecordLayout
from tapscope.dumper.records.site_port import SitePort
from tapscope.dumper.transport.packed_rows import ROW_BYTES, BlockValue, LineTable, PackedRows
from tapscope.kernels.native import library, summary
from tapscope.run_format.sketch import NBYTES, record_member

_QUICK_BYTES = 256 << 10
"""Maximum size in bytes of a copy that holds the GIL: shorter than other threads' usual wait for the GIL."""
_move = ctypes.PyDLL(None).memmove  # does not release the GIL
_move.argtypes, _move.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], None


class LearnedRecord(NamedTuple):
    """A record of the replay from which a plan is derived."""

    record: InflightRecord
    offset: int
    """Offset of the statistics or bytes in the graph's memory; -1 for a record that is equal in every replay."""
    has_bytes: bool = False
    """Whether the bytes of the value or of its sketch are stored."""

    @property
    def counters(self) -> int:
        """Offset of the sketch counters in the graph's memory; -1 if the replay computes no sketch."""
        copy = self.record.pending_copy
        return self.offset + copy.place if isinstance(copy, sketcher.SketchCopy) and copy.place else -1

    @property
    def has_values(self) -> bool:
        """Whether the stored bytes are the value, not a sketch."""
        return self.has_bytes and self.counters < 0


class PlannedPayload(NamedTuple):
    """Payload that is stored for every replay."""

    line: int
    """Index of its record line."""
    port: SitePort
    layout: RecordLayout
    offset: int
    """Offset of the bytes in the graph's memory."""
    is_sketch: bool = False
    """Whether the bytes are sketch counters, not a value."""


class ReplayPlan:
    """Template of a replay's records, derived from an earlier replay; a replay becomes one item of the send queue."""

    __slots__ = ("_heads", "_offsets", "_start", "_table", "_tails", "payloads", "sites", "sketch_lines")

    def __init__(self, learned: Sequence[LearnedRecord]) -> None:
        """Derive the plan from the records of a replay, in order."""
        self.sites = tuple(each.record.port.site for each in learned)
        self.payloads = tuple(
            PlannedPayload(line, each.record.port, each.record.layout, each.offset)
            if each.has_values
            else PlannedPayload(line, each.record.port, each.record.stored, each.counters, is_sketch=True)
            for line, each in enumerate(learned)
            if each.has_bytes
        )
        self._heads = tuple(f',"site":{each.record.port.site_text},"step":'.encode() for each in learned)
        self._tails = tuple(_tail(each.record, each.offset) for each in learned)
        self.sketch_lines = frozenset(payload.line for payload in self.payloads if payload.is_sketch)
        offsets = [-1 if each.has_values else each.offset for each in learned]
        self._offsets = struct.pack(f"{len(learned)}q", *offsets)
        ends = [offset + ROW_BYTES for offset in offsets if offset >= 0]
        ends += [payload.offset + payload.layout.nbytes for payload in self.payloads]
        starts = [offset for offset in (*offsets, *(payload.offset for payload in self.payloads)) if offset >= 0]
        self._start = start = min(starts, default=0)
        self._table = LineTable(
            self._heads,
            self._tails,
            tuple(-1 if offset < 0 else offset - start for offset in offsets),
            tuple(_block_value(payload, start) for payload in self.payloads),
            max(ends, default=0) - start,
        )

    @property
    def block_bytes(self) -> int:
        """Size in bytes of the memory block that the records of a replay depend on; 0 if all records are constant."""
        return self._table.nbytes

    def pack(self, step: str, number: int, slot: PayloadSlot, address: int) -> tuple[PackedRows, bytes]:
        """Copy the memory of a replay at ``address`` to ``slot``, for a recorder that formats the lines itself.

        Returns (packed rows, empty digests), in the form of :meth:`lines`; ``number`` is the first sequence number.
        """
        nbytes = self._table.nbytes
        move = _move if nbytes <= _QUICK_BYTES else ctypes.memmove
        move(slot.address, address + self._start, nbytes)
        return PackedRows(self._table, step, number), b""

    def lines(self, step: str, number: int, slots: Sequence[PayloadSlot], address: int) -> tuple[bytes, bytes]:
        """Format the records of a replay whose memory was copied to ``address``, and copy the payloads to ``slots``.

        Returns (record lines, concatenated digests of the payloads). ``number`` is the first sequence number.
        """
        functions = library.functions()
        assert functions is not None
        tails, digests = self._tails, b""
        if slots:
            complete = list(tails)
            for (line, _, layout, offset, is_sketch), slot in zip(self.payloads, slots, strict=True):
                if is_sketch:
                    counters = sketcher.counters_at(address + offset)
                    sketcher.write(counters, slot)
                    complete[line] += record_member(True, counters)
                    digests += summary.digest_of(address + offset, NBYTES)
                    continue
                text, digest = summary.take(address + offset, layout.count, layout.dtype, slot.address)
                complete[line] += b"," + text
                digests += digest
            tails = tuple(complete)
        return functions.compose_rows(address, self._heads, tails, self._offsets, step, number), digests


def is_available() -> bool:
    """Return whether the native library that formats the lines is available."""
    return library.functions() is not None


def _block_value(payload: PlannedPayload, start: int) -> BlockValue:
    port, layout = payload.port, payload.layout
    place = payload.offset - start
    return BlockValue(payload.line, port.site, port.model, layout.dtype, layout.shape, place, payload.is_sketch)


def _tail(record: InflightRecord, offset: int) -> bytes:
    text = f"{record.port.model_text}{record.layout.members}".encode()
    return text if offset >= 0 else text + b"," + record.content
