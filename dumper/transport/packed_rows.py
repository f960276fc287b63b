"""Packed rows: send the records of one CUDA graph replay as the raw memory block that its taps wrote.

The record lines of different replays of a graph differ only in sequence numbers, the step and the contents of the
block. The constant parts form a :class:`LineTable`, which is sent once; each replay sends only its block. A block
contains rows of statistics (struct Summary of kernels/native/summary.h, in the common byte order of both hosts), sketch
counters, and values. The recorder formats the lines and computes the statistics of the values.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tapscope.core import dtypes
from tapscope.core.errors import RecorderError, RunCorruptError
from tapscope.run_format.record import COUNTERS, FORWARD, tensor_name
from tapscope.run_format.writer import PackedPayloads, Payload

ROW_BYTES = 120
"""Size of one row of statistics in bytes."""
_SKETCH_BYTES = 4 * COUNTERS
MAX_TABLES = 64
"""Maximum number of tables per rank that the recorder keeps."""


class BlockValue(NamedTuple):
    """Location of the payload of a record line within a block."""

    line: int
    site: str
    model: str
    dtype: str
    shape: Sequence[int]
    offset: int
    is_sketch: bool
    """Whether the payload is a sketch indexed by the step's token rows, instead of values."""


@dataclass(slots=True, eq=False)
class LineTable:
    """The parts of the record lines of a graph that are equal for all replays.

    A line is the concatenation of ``{"type":"record","seq":``, its sequence number, its head, the step, its tail, and
    the fields computed from the block.
    """

    heads: tuple[bytes, ...]
    tails: tuple[bytes, ...]
    rows: tuple[int, ...]
    """Offset of each line's statistics in a block; -1 for a line without statistics."""
    values: tuple[BlockValue, ...]
    """Payloads in line order, at most one per line."""
    nbytes: int
    """Size of a block in bytes."""
    sketches: tuple[BlockValue, ...] = ()
    """The elements of ``values`` that are sketches."""

    def __post_init__(self) -> None:
        self.sketches = tuple([each for each in self.values if each.is_sketch])

    def to_json(self) -> dict[str, Any]:
        """Return the table as message fields."""
        heads, tails = ([each.decode() for each in parts] for parts in (self.heads, self.tails))
        return {"heads": heads, "tails": tails, "rows": self.rows, "values": self.values, "nbytes": self.nbytes}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "LineTable":
        """Parse and validate message fields, the inverse of :meth:`to_json`; raises RecorderError."""
        try:
            heads, tails = (tuple([str(each).encode() for each in fields[name]]) for name in ("heads", "tails"))
            rows, nbytes = tuple([int(each) for each in fields["rows"]]), int(fields["nbytes"])
            values = tuple([BlockValue(*each) for each in fields["values"]])
            fits = all(0 <= each.offset <= nbytes - _size(each) and 0 <= each.line < len(heads) for each in values)
        except (KeyError, TypeError, ValueError, AttributeError, RunCorruptError) as error:
            raise RecorderError(f"not a table of record lines: {error!r}") from None
        fits = fits and all(each == -1 or (0 <= each <= nbytes - ROW_BYTES and each % 8 == 0) for each in rows)
        if not fits or not 0 < len(heads) == len(tails) == len(rows) or len({v.line for v in values}) < len(values):
            raise RecorderError("a table of record lines does not fit its blocks")
        return cls(heads, tails, rows, values, nbytes)


@dataclass(slots=True)
class PackedRows:
    """Metadata of the records of one replay; the block itself is sent as a payload."""

    table: LineTable
    step: str
    number: int
    """Sequence number of the first record."""
    has_sketches: bool = True
    """False if the sketches are invalid, because the step had other rows than those assumed during the replay."""


class SentTables:
    """Sender's view of the tables that the recorder has, as an LRU cache of :data:`MAX_TABLES` entries."""

    def __init__(self) -> None:
        self._numbers: dict[LineTable, int] = {}  # least recently used first
        self._count = 0
        self._fresh: dict[int, LineTable] = {}
        self._old: list[int] = []

    def number_of(self, table: LineTable) -> int:
        """Return the number of ``table`` for the current message; a new table may evict the least recently used one."""
        number = self._numbers.pop(table, None)
        if number is None:
            number = self._count
            self._count += 1
            self._fresh[number] = table
            if len(self._numbers) == MAX_TABLES:
                self._old.append(self._numbers.pop(next(iter(self._numbers))))
        self._numbers[table] = number
        return number

    def take_changes(self) -> dict[str, Any]:
        """Return the message fields that update the recorder: ``tables`` to add, then numbers to ``forget``."""
        fields = {"tables": {number: table.to_json() for number, table in self._fresh.items()}, "forget": self._old}
        self._fresh, self._old = {}, []
        return {name: value for name, value in fields.items() if value}


def can_unpack() -> bool:
    """Return whether the native library that formats the lines is available."""
    from tapscope.kernels.native import library  # loads NumPy

    return library.functions() is not None


class Unpacked(NamedTuple):
    """Contents of a batch message as arguments of :meth:`tapscope.run_format.writer.RankWriter.batch`."""

    lines: list[bytes]
    payloads: Sequence[Payload]
    shared: Sequence[tuple[int, int]]
    packed: Sequence[PackedPayloads] = ()


class ReceivedTables:
    """Tables that a rank has sent to the recorder."""

    def __init__(self) -> None:
        self._tables: dict[int, LineTable] = {}

    def unpack(self, fields: Mapping[str, Any], lines: Sequence[bytes], payloads: Sequence[Payload]) -> Unpacked:
        """Expand the blocks of a message into record lines and payloads. Raises RecorderError.

        ``fields`` has ``tables`` and ``forget`` (see :class:`SentTables`) and ``blocks``. A block is [number of
        ordinary lines before it, table number, step, first sequence number, index of its payload, whether the sketches
        are valid]. The line indices of other payloads include the lines of blocks.
        """
        for name, table in fields.get("tables", {}).items():
            self._tables[int(name)] = LineTable.from_json(table)
        block_indices = {block[4] for block in fields["blocks"]}
        all_lines: list[bytes] = []
        all_payloads = [each for index, each in enumerate(payloads) if index not in block_indices]
        shared: list[tuple[int, int]] = []
        packed: list[PackedPayloads] = []
        done = 0
        for before, number, step, first, payload, has_sketches in fields["blocks"]:
            if number not in self._tables:
                raise RecorderError(f"a block of records names table {number}, which was not sent")
            all_lines.extend(lines[done:before])
            rows = PackedRows(self._tables[number], str(step), int(first), bool(has_sketches))
            block = _unpack(rows, payloads[payload][-1], len(all_lines), -1 - len(all_payloads))
            all_lines.extend(block.lines)
            all_payloads.extend(block.payloads)
            shared.extend(block.shared)
            packed.extend(block.packed)
            done = before
        all_lines.extend(lines[done:])
        for number in fields.get("forget", ()):
            self._tables.pop(number, None)
        return Unpacked(all_lines, all_payloads, shared, packed)


def _unpack(packed: PackedRows, block: Any, first: int, number: int) -> Unpacked:
    """Expand one block into lines and payloads.

    ``first`` is the index of its first line. Payload numbers count down from ``number``, which is negative, because
    numbers assigned by the rank are not.
    """
    import numpy as np

    from tapscope.kernels.native import library, take

    table, data = packed.table, memoryview(block).cast("B")
    functions = library.functions()
    if len(data) < table.nbytes or functions is None:
        raise RecorderError(f"cannot read a block of {len(data)} bytes as one of {table.nbytes}")
    address = np.frombuffer(data, np.uint8).ctypes.data
    ends = [b""] * len(table.heads)
    payloads: list[Payload] = []
    shared: list[tuple[int, int]] = []
    known: dict[tuple[bytes, int], int] = {}
    sketched = table.sketches if packed.has_sketches else ()
    for value in table.values:
        if value.is_sketch:
            continue
        size, place = _size(value), address + value.offset
        content = data[value.offset : value.offset + size]
        text, digest = take(place, size // dtypes.itemsize(value.dtype), value.dtype)
        ends[value.line] = b"," + text
        own = number - len(payloads)
        if (same := known.setdefault((digest, size), own)) != own:
            shared.append((first + value.line, same))
            continue
        name = tensor_name(value.site, int(packed.step), 0, 0, FORWARD, value.model)
        payloads.append((first + value.line, own, name, value.dtype, value.shape, content))
    sketches = _sketches(sketched, data, first, packed.step, ends)
    rows = np.array(table.rows, np.int64).tobytes()
    composed = functions.compose_rows(address, table.heads, table.tails, rows, packed.step, packed.number, tuple(ends))
    lines = composed.split(b"\n")
    if len(lines) != len(table.heads):
        raise RecorderError("a record's line contains a line break")
    return Unpacked(lines, payloads, shared, sketches)


def _sketches(
    values: Sequence[BlockValue], data: memoryview, first: int, step: str, ends: list[bytes]
) -> list[PackedPayloads]:
    """Return the sketches of a block as packed payloads, without duplicates, and set their fields in ``ends``.

    ``first`` is the index of the first line of the block.
    """
    from tapscope.run_format.sketch import members_of  # loads NumPy

    contents = [data[value.offset : value.offset + _SKETCH_BYTES] for value in values]
    members = members_of(contents)
    for value, member in zip(values, members, strict=True):
        ends[value.line] = member
    kept: Sequence[int] = range(len(values))
    shared = []
    if len(set(members)) < len(members):
        numbers: dict[bytes, int] = {}
        kept, counters = [], list(map(bytes, contents))
        for index, value in enumerate(values):
            number = numbers.setdefault(counters[index], len(kept))
            if number < len(kept):
                shared.append((first + value.line, number))
            else:
                kept.append(index)
        contents = [contents[index] for index in kept]
        values = [values[index] for index in kept]
    lines = [first + value.line for value in values]
    names = [tensor_name(value.site, int(step), 0, 0, FORWARD, value.model) for value in values]
    return [PackedPayloads(lines, names, "float32", (COUNTERS,), b"".join(contents), shared)] if values else []


def _size(value: BlockValue) -> int:
    """Return the size of a value in bytes; raises ValueError for an invalid shape."""
    count = 1
    for length in value.shape:
        if length < 0:
            raise ValueError(f"a length of {length}")
        count *= length
    if value.is_sketch and (value.dtype, count) != ("float32", COUNTERS):
        raise ValueError("a sketch has 256 counters of float32")
    return _SKETCH_BYTES if value.is_sketch else count * dtypes.itemsize(value.dtype)
