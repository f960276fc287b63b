"""Recordline: the record lines that nearly all lines of a run are, parsed and checked in one step.

There are records by the hundred thousand, and to parse a line and then to look at each of its members takes several
times as long as this. Whatever is unusual about a line, or wrong, is left to :func:`tapscope.record.from_json`, which
also says what it is.
"""

from sys import intern
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from tapscope.dtypes import NAMES
from tapscope.member import MAX_AXES, MAX_COUNT
from tapscope.record import FORWARD, Entry, Key, Record
from tapscope.stats import Stats

_Count = Annotated[int, Meta(ge=0, le=MAX_COUNT - 1)]
_DTYPES = {name: name for name in NAMES}


class _Line(Struct):
    """The members that are read here, as docs/format.md has them."""

    type: Literal["record"]
    seq: _Count
    site: str
    step: _Count
    dtype: str
    shape: Annotated[tuple[_Count, ...], Meta(max_length=MAX_AXES)] = ()
    occurrence: _Count = 0
    micro: _Count = 0
    pass_: str = msgspec.field(default=FORWARD, name="pass")
    model: str = ""
    dims: str | None = None
    hash: str | None = None
    bag: str | None = None
    stats: Stats | None = None
    entry: Entry | None = None
    rows: UnsetType = UNSET
    slice: UnsetType = UNSET
    cap: UnsetType = UNSET
    tags: UnsetType = UNSET
    value: UnsetType = UNSET


_decode = msgspec.json.Decoder(_Line).decode
_make = tuple.__new__  # what a NamedTuple's own does, in half the time


class RecordLines:
    """Reads the record lines of one rank; equal shapes of theirs are one object."""

    __slots__ = ("_rank", "_shapes")

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}

    def parse(self, line: bytes) -> Record | None:
        """The record of a line; None for any other line, and for one that wants a closer look."""
        if not line.isascii():  # bytes that are no text are not noticed in members that are passed over
            return None
        try:
            found = _decode(line)
            int(found.hash or "0", 16), int(found.bag or "0", 16)  # a ValueError for what is no hex number
        except (ValueError, RecursionError):
            return None
        dtype, stats, entry = _DTYPES.get(found.dtype), found.stats, found.entry
        if dtype is None or _is_odd(found):
            return None
        site, step, model = intern(found.site), found.step, found.model
        key = _make(Key, (site, step, self._rank, found.occurrence, found.micro, found.pass_, model))
        if entry is not None:
            entry = _make(Entry, (intern(entry.file), entry.offset, entry.nbytes))
        shape = self._shapes.setdefault(found.shape, found.shape)
        dims = None if found.dims is None else intern(found.dims)
        return Record(key, found.seq, dtype, shape, dims, None, stats, found.hash, found.bag, entry)


def _is_odd(found: _Line) -> bool:
    """Whether a member is not what it must be, or may not be."""
    stats, entry = found.stats, found.entry
    return (
        not found.site.isascii()
        or (entry is not None and not 0 <= entry.nbytes < MAX_COUNT)
        or (
            stats is not None
            and min(stats.count, stats.nan, stats.posinf, stats.neginf, stats.zeros, stats.subnormals) < 0
        )
    )
