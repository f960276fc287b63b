"""Fast parser of record lines: parses and validates in one pass.

Nearly all lines of a run are record lines, often hundreds of thousands; parsing a line and then checking each field
takes several times as long. Unusual and invalid lines are left to :func:`.record.from_json`, which also reports errors.
"""

from operator import attrgetter
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from tapscope.core.dtypes import NAMES
from tapscope.run_format.record import FORWARD
from tapscope.run_format.record_columns import Kind, digests_of, joined_digests, joined_numbers, numbers_of
from tapscope.run_format.records import Records
from tapscope.run_format.validation import MAX_AXES, MAX_COUNT

_Count = Annotated[int, Meta(ge=0, le=MAX_COUNT - 1)]
_Offset = Annotated[int, Meta(ge=-MAX_COUNT, le=MAX_COUNT - 1)]


class _Stats(Struct, gc=False):
    count: _Count
    nan: _Count
    posinf: _Count
    neginf: _Count
    zeros: _Count
    subnormals: _Count
    min: float
    max: float
    absmax: float
    sum: float
    sumsq: float


class _Entry(NamedTuple):
    file: str
    offset: _Offset
    nbytes: _Count


class _Line(Struct, tag_field="type", tag="record", gc=False):
    """Fields of a record line that this parser supports, see docs/reference/run-format.md."""

    seq: _Count
    site: str
    step: _Count
    dtype: Literal[*NAMES]  # type: ignore[valid-type]  # not literals to a type checker
    shape: Annotated[tuple[_Count, ...], Meta(max_length=MAX_AXES)] = ()
    occurrence: _Count = 0
    micro: _Count = 0
    pass_: str = msgspec.field(default=FORWARD, name="pass")
    model: str = ""
    dims: str | None = None
    hash: str | None = None
    bag: str | None = None
    stats: _Stats | None = None
    entry: _Entry | None = None
    rows: UnsetType = UNSET
    slice: UnsetType = UNSET
    cap: UnsetType = UNSET
    tags: UnsetType = UNSET
    value: UnsetType = UNSET
    sketch: UnsetType = UNSET


class _Site(Struct, tag_field="type", tag="site"):
    """A line in a block that is not a record and is parsed elsewhere, like the following classes."""


class _Step(Struct, tag_field="type", tag="step"):
    pass


class _Metric(Struct, tag_field="type", tag="metric"):
    pass


class _Event(Struct, tag_field="type", tag="event"):
    pass


class _Exact(_Line, tag_field="type", tag="record", forbid_unknown_fields=True, gc=False):
    """A record line without unknown fields."""


class SiteLine(Struct, tag_field="type", tag="site", gc=False):
    """Fields of a ``site`` line."""

    site: str
    cls: str = msgspec.field(name="class")
    params: dict[str, Annotated[tuple[_Count, ...], Meta(max_length=MAX_AXES)]]
    parent: str | None = None
    dims: str | None = None
    no_inputs: bool = False


_decode, _decode_exact = (msgspec.json.Decoder(kind).decode for kind in (_Line, _Exact))
_decode_lines = msgspec.json.Decoder(_Line | _Site | _Step | _Metric | _Event).decode_lines
_decode_site = msgspec.json.Decoder(SiteLine).decode
_about = attrgetter(*Kind._fields[1:8])


class RecordLines:
    """Parser of the record lines of one rank; appends to a :class:`.Records`."""

    __slots__ = ("_decode", "_into", "_rank")

    def __init__(self, rank: int, into: Records, *, exact: bool = False) -> None:
        """Append parsed records to ``into``; with ``exact``, :meth:`read` rejects lines with unknown fields."""
        self._rank = rank
        self._into = into
        self._decode = _decode_exact if exact else _decode

    def into(self, records: Records) -> None:
        """Append all further records to ``records``."""
        self._into = records

    def read_block(self, block: bytes, num_lines: int) -> list[int] | None:
        """Parse the records in a block of ``num_lines`` complete lines.

        Returns the indices of the other lines, from 0. Returns None, with nothing appended, if the lines must be parsed
        one by one.
        """
        if not block.isascii():  # msgspec does not detect invalid UTF-8 in skipped fields
            return None
        try:
            lines = _decode_lines(block)
        except _UNREADABLE:
            return None
        if len(lines) != num_lines:  # some lines are empty
            return None
        own = [line for line in lines if type(line) is _Line]
        others = []
        if len(own) < len(lines):
            others = [number for number, line in enumerate(lines) if type(line) is not _Line]
        return others if self._take(own) else None

    def _take(self, lines: list[_Line]) -> bool:
        """Append the records of ``lines``; return False, with nothing appended, if a digest is not canonical."""
        digests = joined_digests([line.hash for line in lines], [line.bag for line in lines])
        if digests is None:
            return False
        rank, entries = self._rank, [line.entry or _NO_ENTRY for line in lines]
        kinds = [
            (rank, *_about(line), entry[0], line.hash is not None, line.bag is not None, line.stats is not None)
            for line, entry in zip(lines, entries, strict=True)
        ]
        counts, sums = joined_numbers([line.stats for line in lines])
        self._into.add_many(
            kinds,
            [line.site for line in lines],
            [line.step for line in lines],
            [line.seq for line in lines],
            [entry[1] for entry in entries],
            [entry[2] for entry in entries],
            digests,
            counts,
            sums,
        )
        return True

    def read(self, line: bytes) -> bool:
        """Parse one line and append its record; return False if it is not a record that this parser supports."""
        if not line.isascii():  # msgspec does not detect invalid UTF-8 in skipped fields
            return False
        try:
            decoded = self._decode(line)
        except _UNREADABLE:
            return False
        hash_, bag, stats = decoded.hash, decoded.bag, decoded.stats
        digests = digests_of(hash_, bag)
        if digests is None or not decoded.site.isascii():
            return False
        file, offset, nbytes = decoded.entry or _NO_ENTRY
        kind = (self._rank, *_about(decoded), file, hash_ is not None, bag is not None, stats is not None)
        counts, sums = numbers_of(stats)
        self._into.add(kind, decoded.site, decoded.step, decoded.seq, offset, nbytes, digests, counts, sums)
        return True


def read_site(line: bytes) -> SiteLine | None:
    """Parse a ``site`` line; None for other lines and for unusual ones, which are left to the general parser."""
    if not line.isascii():
        return None
    try:
        return _decode_site(line)
    except _UNREADABLE:
        return None


_UNREADABLE = msgspec.MsgspecError, ValueError, RecursionError  # MsgspecError is a ValueError only since 0.20
_NO_ENTRY = None, 0, 0
