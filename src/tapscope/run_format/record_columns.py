"""Parts: convert records to and from the columns of :class:`~tapscope.run_format.records.Records`."""

from collections.abc import Iterable, Sequence
from operator import add, attrgetter
from struct import Struct
from typing import Any, NamedTuple

import numpy as np

from tapscope.run_format.record import Entry, Record
from tapscope.run_format.stats import Stats

HASH, DIGESTS = 16, 24
"""Size in bytes of a hash, and of a hash followed by a bag."""
NO_COUNTS, NO_SUMS = (0,) * 6, (0.0,) * 5
NO_HASH, NO_BAG = "00" * HASH, "00" * (DIGESTS - HASH)
_INT64 = 1 << 63
_counts, _sums = attrgetter(*Stats.__struct_fields__[:6]), attrgetter(*Stats.__struct_fields__[6:])
_numbers, _row = attrgetter(*Stats.__struct_fields__), Struct(f"={len(NO_COUNTS)}q{len(NO_SUMS)}d").pack
_NO_ROW = _row(*NO_COUNTS, *NO_SUMS)


class Kind(NamedTuple):
    """Record fields that many records share; stored once per distinct combination."""

    rank: int
    occurrence: int
    micro: int
    pass_: str
    model: str
    dtype: str | None
    shape: tuple[int, ...]
    dims: str | None
    file: str | None
    """Segment file of the payload; None without a payload."""
    has_hash: bool
    has_bag: bool
    has_stats: bool


class Parts(NamedTuple):
    """A record split into columns; fields that the record lacks (see :class:`Kind`) are zero."""

    kind: Kind
    site: str
    step: int
    seq: int
    offset: int
    """Offset of the payload in its file."""
    nbytes: int
    digests: bytes
    """Hash followed by bag, 24 bytes."""
    counts: tuple[int, ...]
    """The six counts of the statistics, in the field order of :class:`.Stats`."""
    sums: tuple[float, ...]
    """Minimum, maximum, largest magnitude, sum and sum of squares."""


def parts_of(record: Record) -> Parts | None:
    """Split a record into columns; return None if the columns cannot represent the record exactly."""
    key, stats, entry = record.key, record.stats, record.entry
    digests, (counts, sums) = digests_of(record.hash, record.bag), numbers_of(stats)
    file, offset, nbytes = (None, 0, 0) if entry is None else entry
    if digests is None or not (-_INT64 <= offset < _INT64 and _fit(counts, sums)):
        return None
    if any(member is not None for member in (record.rows, *record[10:])):
        return None
    has = record.hash is not None, record.bag is not None, stats is not None
    about = record.dtype, record.shape, record.dims, file
    kind = Kind(key.rank, key.occurrence, key.micro, key.pass_, key.model, *about, *has)
    return Parts(kind, key.site, key.step, record.seq, offset, nbytes, digests, counts, sums)


def bare(record: Record) -> Record:
    """Return a copy of ``record`` reduced to fields that columns can represent.

    Digests become zeros, and an offset outside int64 becomes -1.
    """
    entry = record.entry
    if entry is not None and not -_INT64 <= entry.offset < _INT64:
        entry = Entry(entry.file, -1, entry.nbytes)
    hash_, bag = None if record.hash is None else NO_HASH, None if record.bag is None else NO_BAG
    return Record(record.key, record.seq, record.dtype, record.shape, record.dims, hash=hash_, bag=bag, entry=entry)


def digests_of(hash_: str | None, bag: str | None) -> bytes | None:
    """Convert a hexadecimal hash and bag to bytes, zeros for a missing one.

    Returns None if either is not in canonical form, i.e. lower case and of full length.
    """
    text = (NO_HASH if hash_ is None else hash_) + (NO_BAG if bag is None else bag)
    try:
        digests = bytes.fromhex(text)
    except ValueError:
        return None
    is_ours = digests.hex() == text and len(digests) == DIGESTS and (hash_ is None or len(hash_) == 2 * HASH)
    return digests if is_ours else None


def joined_digests(hashes: Sequence[str | None], bags: Sequence[str | None]) -> bytes | None:
    """Convert the hashes and bags of many records like :func:`digests_of`, and concatenate the results.

    Returns None if any digest is not in canonical form.
    """
    ours = [NO_HASH if one is None else one for one in hashes], [NO_BAG if one is None else one for one in bags]
    if {*map(len, ours[0])} - {len(NO_HASH)} or {*map(len, ours[1])} - {len(NO_BAG)}:
        return None
    return digests_from("".join(map(add, *ours)))


def digests_from(text: str) -> bytes | None:
    """Convert hexadecimal digits to bytes; return None if they are invalid or not in lower case."""
    try:
        digests = bytes.fromhex(text)
    except ValueError:
        return None
    return digests if digests.hex() == text else None


def numbers_of(stats: Any) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """Return the ``counts`` and ``sums`` of :class:`Parts` for the given :class:`.Stats`; zeros for None."""
    return (NO_COUNTS, NO_SUMS) if stats is None else (_counts(stats), _sums(stats))


def joined_numbers(stats: Iterable[Any]) -> tuple[bytes, bytes]:
    """Return the concatenated counts (int64 bytes) and sums (float64 bytes) of many :class:`.Stats`.

    Counts must be below 2**63.
    """
    rows = b"".join([_NO_ROW if one is None else _row(*_numbers(one)) for one in stats])
    table = np.frombuffer(rows, np.int64).reshape(-1, len(NO_COUNTS) + len(NO_SUMS))
    return table[:, : len(NO_COUNTS)].tobytes(), table[:, len(NO_COUNTS) :].tobytes()


def _fit(counts: tuple[int, ...], sums: tuple[float, ...]) -> bool:
    """Return whether all counts fit in int64 and all sums are floats; a minimum may be None, a sum an int."""
    return max(counts) < _INT64 and {*map(type, sums)} == {float}
