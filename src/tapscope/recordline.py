"""Recordline: the record lines that nearly all lines of a run are, parsed and checked in one step.

There are records by the hundred thousand, and to parse a line and then to look at each of its members takes several
times as long as this. Whatever is unusual about a line, or wrong, is left to :func:`tapscope.record.from_json`, which
also says what it is.
"""

from operator import attrgetter
from sys import intern
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from tapscope.dtypes import NAMES
from tapscope.member import MAX_AXES, MAX_COUNT
from tapscope.parts import Kind, digests_of, numbers_of
from tapscope.record import FORWARD
from tapscope.records import Records

_Count = Annotated[int, Meta(ge=0, le=MAX_COUNT - 1)]
_Offset = Annotated[int, Meta(ge=-MAX_COUNT, le=MAX_COUNT - 1)]


class _Stats(Struct):
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


class _Line(Struct):
    """The members that are read here, as docs/format.md has them."""

    type: Literal["record"]
    seq: _Count
    site: str
    step: _Count
    dtype: Literal[*NAMES]  # type: ignore[valid-type]  # which are not literals to a type checker
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


_decode = msgspec.json.Decoder(_Line).decode
_about = attrgetter(*Kind._fields[1:8])


class RecordLines:
    """Reads the record lines of one rank."""

    __slots__ = ("_add", "_rank")

    def __init__(self, rank: int, into: Records) -> None:
        self._rank = rank
        self._add = into.add

    def read(self, line: bytes) -> bool:
        """Whether the line is a record's; not for one that wants a closer look."""
        if not line.isascii():  # bytes that are no text are not noticed in members that are passed over
            return False
        try:
            found = _decode(line)
        except (msgspec.MsgspecError, ValueError, RecursionError):  # before msgspec 0.20 its errors are no ValueErrors
            return False
        hash_, bag, stats = found.hash, found.bag, found.stats
        digests = digests_of(hash_, bag)
        if digests is None or not found.site.isascii():
            return False
        file, offset, nbytes = found.entry or _NO_ENTRY
        kind = (self._rank, *_about(found), file, hash_ is not None, bag is not None, stats is not None)
        counts, sums = numbers_of(stats)
        self._add(kind, intern(found.site), found.step, found.seq, offset, nbytes, digests, counts, sums)
        return True


_NO_ENTRY = None, 0, 0
