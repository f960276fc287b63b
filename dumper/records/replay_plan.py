"""ReplayPlan: the records of a CUDA graph's replays, whose lines differ only in numbers, step and statistics."""

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
"""Up to this size a copy takes less time than another thread, which may be the model's, waits for the GIL."""
_move = ctypes.PyDLL(None).memmove  # keeps the GIL
_move.argtypes, _move.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], None


class LearnedRecord(NamedTuple):
    """A record of the replay that a plan is made of."""

    record: InflightRecord
    offset: int
    """Of its statistics or its bytes in the graph's memory; -1 where it says the same at every replay."""
    has_bytes: bool = False
    """Whether the bytes are kept."""

    @property
    def counters(self) -> int:
        """Offset of the counters of its sketch; -1 where the replay has computed none."""
        copy = self.record.pending_copy
        return self.offset + copy.place if isinstance(copy, sketcher.SketchCopy) and copy.place else -1

    @property
    def has_values(self) -> bool:
        """Whether the bytes kept are those of the value."""
        return self.has_bytes and self.counters < 0


class PlannedPayload(NamedTuple):
    """Bytes that are kept of every replay."""

    line: int
    port: SitePort
    layout: RecordLayout
    offset: int
    is_sketch: bool = False
    """Whether they are the counters of its sketch."""


class ReplayPlan:
    """Learned from the records of one replay; later ones become one item of the send queue."""

    __slots__ = ("_heads", "_offsets", "_start", "_table", "_tails", "payloads", "sites", "sketch_lines")

    def __init__(self, learned: Sequence[LearnedRecord]) -> None:
        """``learned`` are the records in order."""
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
        """Size of the memory of a replay that its records are made of; 0 where they are always the same."""
        return self._table.nbytes

    def pack(self, step: str, number: int, slot: PayloadSlot, address: int) -> tuple[PackedRows, bytes]:
        """As :meth:`lines`, for a recorder that makes the records itself: ``slot`` gets a copy of the memory."""
        nbytes = self._table.nbytes
        move = _move if nbytes <= _QUICK_BYTES else ctypes.memmove
        move(slot.address, address + self._start, nbytes)
        return PackedRows(self._table, step, number), b""

    def lines(self, step: str, number: int, slots: Sequence[PayloadSlot], address: int) -> tuple[bytes, bytes]:
        """(record lines, digests of the payloads) of a replay whose memory was copied to ``address``.

        ``number`` is the first line's. The payloads are copied to ``slots``.
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
    """Whether the C++ library that writes the lines is there."""
    return library.functions() is not None


def _block_value(payload: PlannedPayload, start: int) -> BlockValue:
    port, layout = payload.port, payload.layout
    place = payload.offset - start
    return BlockValue(payload.line, port.site, port.model, layout.dtype, layout.shape, place, payload.is_sketch)


def _tail(record: InflightRecord, offset: int) -> bytes:
    text = f"{record.port.model_text}{record.layout.members}".encode()
    return text if offset >= 0 else text + b"," + record.content
