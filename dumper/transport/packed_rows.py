"""Packed rows: the records of one replay of a CUDA graph as the memory that its taps wrote; the recorder reads it.

The lines of one graph's replays differ in numbers, step and what is in that memory alone. What they have in common, a
:class:`LineTable`, is sent once, and each replay as one block of memory. It holds rows of statistics, each struct
Summary of kernels/native/summary.h in the byte order of both hosts, counters of sketches, and values, whose statistics
the recorder computes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tapscope.core import dtypes
from tapscope.core.errors import RecorderError, RunCorruptError
from tapscope.run_format.record import COUNTERS, FORWARD, tensor_name
from tapscope.run_format.writer import PackedPayloads, Payload

ROW_BYTES = 120
"""Of statistics."""
_SKETCH_BYTES = 4 * COUNTERS
MAX_TABLES = 64
"""That the recorder remembers of each rank."""


class BlockValue(NamedTuple):
    """Bytes of a block that are the payload of a line."""

    line: int
    site: str
    model: str
    dtype: str
    shape: Sequence[int]
    offset: int
    is_sketch: bool
    """Whether they are the counters of a sketch over the step's token rows."""


@dataclass(slots=True, eq=False)
class LineTable:
    """What the record lines of one graph have in common.

    A line is ``{"type":"record","seq":``, its number, its head, the step, its tail, and what the block holds of it.
    """

    heads: tuple[bytes, ...]
    tails: tuple[bytes, ...]
    rows: tuple[int, ...]
    """Offset of each line's statistics in a block; -1 without."""
    values: tuple[BlockValue, ...]
    """In the order of their lines, at most one of each."""
    nbytes: int
    """Of a block."""
    sketches: tuple[BlockValue, ...] = ()
    """Those of ``values`` that are sketches."""

    def __post_init__(self) -> None:
        self.sketches = tuple([each for each in self.values if each.is_sketch])

    def to_json(self) -> dict[str, Any]:
        """As a message carries it."""
        heads, tails = ([each.decode() for each in parts] for parts in (self.heads, self.tails))
        return {"heads": heads, "tails": tails, "rows": self.rows, "values": self.values, "nbytes": self.nbytes}

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> "LineTable":
        """The reverse; raises RecorderError."""
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
    """The records of one replay, whose block travels as a payload."""

    table: LineTable
    step: str
    number: int
    """Of the first record."""
    has_sketches: bool = True
    """False where the step turned out to have other rows than those that were sketched."""


class SentTables:
    """Which tables the recorder has."""

    def __init__(self) -> None:
        self._numbers: dict[LineTable, int] = {}  # in the order of use
        self._count = 0
        self._fresh: dict[int, LineTable] = {}
        self._old: list[int] = []

    def number_of(self, table: LineTable) -> int:
        """Its number, for one message; the table that was not in use for longest makes room for a new one."""
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
        """Fields of the message with these numbers: the tables that it brings, and those not needed after it."""
        fields = {"tables": {number: table.to_json() for number, table in self._fresh.items()}, "forget": self._old}
        self._fresh, self._old = {}, []
        return {name: value for name, value in fields.items() if value}


def can_unpack() -> bool:
    """Whether the C++ library that writes the lines is here."""
    from tapscope.kernels.native import library  # loads NumPy

    return library.functions() is not None


class Unpacked(NamedTuple):
    """The contents of a message, as :meth:`tapscope.run_format.writer.RankWriter.batch` takes it."""

    lines: list[bytes]
    payloads: Sequence[Payload]
    shared: Sequence[tuple[int, int]]
    packed: Sequence[PackedPayloads] = ()


class ReceivedTables:
    """The tables that a rank has sent."""

    def __init__(self) -> None:
        self._tables: dict[int, LineTable] = {}

    def unpack(self, fields: Mapping[str, Any], lines: Sequence[bytes], payloads: Sequence[Payload]) -> Unpacked:
        """Lines and payloads of a message with its blocks replaced by what they hold. Raises RecorderError.

        ``fields`` have ``tables`` and ``forget``, see :class:`SentTables`, and ``blocks``: for each [lines before it
        but for those of blocks, number of its table, step, first number, index of its payload, whether the sketches
        are valid]. Lines of other payloads count those of blocks.
        """
        for name, table in fields.get("tables", {}).items():
            self._tables[int(name)] = LineTable.from_json(table)
        taken = {block[4] for block in fields["blocks"]}
        found: list[bytes] = []
        kept = [each for index, each in enumerate(payloads) if index not in taken]
        shared: list[tuple[int, int]] = []
        packed: list[PackedPayloads] = []
        done = 0
        for before, number, step, first, payload, has_sketches in fields["blocks"]:
            if number not in self._tables:
                raise RecorderError(f"a block of records names table {number}, which was not sent")
            found.extend(lines[done:before])
            about = PackedRows(self._tables[number], str(step), int(first), bool(has_sketches))
            block = _unpack(about, payloads[payload][-1], len(found), -1 - len(kept))
            found.extend(block.lines)
            kept.extend(block.payloads)
            shared.extend(block.shared)
            packed.extend(block.packed)
            done = before
        found.extend(lines[done:])
        for number in fields.get("forget", ()):
            self._tables.pop(number, None)
        return Unpacked(found, kept, shared, packed)


def _unpack(about: PackedRows, block: Any, first: int, number: int) -> Unpacked:
    """What a block of memory says; ``first`` is the index of its first line, ``number`` that of its first payload, from
    which it counts down: those that the rank gives are not negative."""
    import numpy as np

    from tapscope.kernels.native import library, take

    table, data = about.table, memoryview(block).cast("B")
    functions = library.functions()
    if len(data) < table.nbytes or functions is None:
        raise RecorderError(f"cannot read a block of {len(data)} bytes as one of {table.nbytes}")
    address = np.frombuffer(data, np.uint8).ctypes.data
    ends = [b""] * len(table.heads)
    payloads: list[Payload] = []
    shared: list[tuple[int, int]] = []
    known: dict[tuple[bytes, int], int] = {}
    sketched = table.sketches if about.has_sketches else ()
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
        name = tensor_name(value.site, int(about.step), 0, 0, FORWARD, value.model)
        payloads.append((first + value.line, own, name, value.dtype, value.shape, content))
    sketches = _sketches(sketched, data, first, about.step, ends)
    rows = np.array(table.rows, np.int64).tobytes()
    composed = functions.compose_rows(address, table.heads, table.tails, rows, about.step, about.number, tuple(ends))
    lines = composed.split(b"\n")
    if len(lines) != len(table.heads):
        raise RecorderError("a record's line contains a line break")
    return Unpacked(lines, payloads, shared, sketches)


def _sketches(
    values: Sequence[BlockValue], data: memoryview, first: int, step: str, ends: list[bytes]
) -> list[PackedPayloads]:
    """The counters of sketches in a block, equal ones once, as payloads of lines that begin at ``first``.

    What the lines say of them is added to ``ends``.
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
    """Bytes of a value."""
    count = 1
    for length in value.shape:
        if length < 0:
            raise ValueError(f"a length of {length}")
        count *= length
    if value.is_sketch and (value.dtype, count) != ("float32", COUNTERS):
        raise ValueError("a sketch has 256 counters of float32")
    return _SKETCH_BYTES if value.is_sketch else count * dtypes.itemsize(value.dtype)
