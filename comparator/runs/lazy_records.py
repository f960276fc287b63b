"""Lazy records: hashes and statistics computed on first use, for sources that store values only.

Most comparisons need few of them. Tensors of different dtypes are measured whatever their hashes, and tensors that
differ almost always differ in their last bytes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from tapscope.core.errors import RunCorruptError
from tapscope.kernels.native import summarize_array
from tapscope.kernels.native.reference import Summary
from tapscope.kernels.native.summary import digest_of, plan_of
from tapscope.run_format.payload import TAIL
from tapscope.run_format.record import Record
from tapscope.run_format.record_columns import Kind
from tapscope.run_format.records import Records
from tapscope.run_format.run import Run
from tapscope.run_format.stats import Stats

Array = np.ndarray[Any, Any]
_NUM_PROBES = 3


class LazyHash:
    """The hash of a record's bytes, computed on demand; equal to another hash or :class:`LazyHash` exactly if the bytes
    are."""

    __slots__ = ("_hash", "_run", "_summary", "_tail", "record")

    def __init__(self, run: Run, record: Record) -> None:
        """Defer hashing of ``record``, which has a payload and no hash."""
        self._run, self.record = run, record
        self._tail: bytes | None = None
        self._hash = ""
        self._summary: Summary | None = None

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if not isinstance(other, LazyHash):
            return self.text == other if isinstance(other, str) else NotImplemented
        if self._key != other._key:
            return False
        return self.record.nbytes <= TAIL or self.text == other.text

    def __hash__(self) -> int:
        return hash(self._key)

    def __str__(self) -> str:
        return self.text

    @property
    def _key(self) -> tuple[int, bytes]:
        """Payload size and last bytes; equal for equal payloads."""
        return self.record.nbytes, self.tail or b""

    @property
    def tail(self) -> bytes | None:
        """The last :data:`TAIL` bytes of the payload, or all of a shorter one; None if the payload cannot be read."""
        if self._tail is None:
            try:
                self._tail = self._run.payloads.tail(self.record)
                if self._tail is None:
                    array = self._run.array(self.record)
                    self._tail = array.flat[max(array.size - TAIL // array.itemsize, 0) :].tobytes()
            except RunCorruptError:
                return None
        return self._tail

    @property
    def text(self) -> str:
        """The hash as 32 hex digits; empty if the payload cannot be read."""
        if not self._hash:
            try:
                array = self.array()
            except RunCorruptError:
                return ""
            self._hash = digest_of(array.ctypes.data, array.nbytes).hex()
        return self._hash

    @property
    def summary(self) -> Summary | None:
        """Statistics and multiset hash; None if the payload cannot be read."""
        if self._summary is None:
            try:
                self._summary = summarize_array(self.array())
            except RunCorruptError:
                return None
            self._hash = self._summary.hash
        return self._summary

    def array(self) -> Array:
        """Return the values as a C-contiguous array. Raises RunCorruptError."""
        return np.ascontiguousarray(self._run.array(self.record))


class LazyRecord(Record):
    """A record whose ``hash`` member is a :class:`LazyHash`."""

    __slots__ = ()

    @property
    def hash(self) -> Any:
        """The recorded hash, or one computed from the payload on comparison; None if the payload cannot be read."""
        digest: Any = self[7]
        return None if isinstance(digest, LazyHash) and digest.tail is None else digest

    @property
    def bag(self) -> str | None:
        """The multiset hash, recorded or computed; None if the payload cannot be read."""
        if (bag := self[8]) is not None:
            return bag
        summary = self[7].summary if isinstance(self[7], LazyHash) else None
        return None if summary is None else summary.bag

    @property
    def stats(self) -> Stats | None:
        """The statistics, recorded or computed; None if the payload cannot be read."""
        if self[6] is not None:
            return self[6]
        summary = self[7].summary if isinstance(self[7], LazyHash) else None
        return None if summary is None else summary.stats


class LazyRecords(Records):
    """The records of a run; a record with a payload but no hash becomes a :class:`LazyRecord`."""

    def __init__(self, run: Run, records: Records, hashes: dict[tuple[int, int], LazyHash] | None = None) -> None:
        """Wrap ``records``; ``hashes`` maps (rank, seq) to hashes shared by selections of the same records."""
        self.__dict__.update(vars(records))
        self._run, self._lazy = run, {} if hashes is None else hashes

    def _record(self, at: int) -> Record:
        record = super()._record(at)
        if record.hash is not None or record.entry is None:
            return record
        place = record.key.rank, record.seq
        lazy = self._lazy.get(place)
        if lazy is None:
            lazy = self._lazy[place] = LazyHash(self._run, record)
        return LazyRecord(*record[:7], lazy, *record[8:])  # type: ignore[arg-type]

    def hashes_at(self, places: Sequence[int]) -> Any:
        """Return the hashes of the given records, see :attr:`LazyRecord.hash`."""
        return [self._record(place).hash for place in places]

    def bags_at(self, places: Sequence[int]) -> list[str | None]:
        """Return the multiset hashes of the given records, see :attr:`LazyRecord.bag`."""
        return [self._record(place).bag for place in places]

    def hashes(self) -> Any:
        """Return (hashes, multiset hashes) of all records."""
        every = list(self)
        return [record.hash for record in every], [record.bag for record in every]

    def take(self, places: Array) -> "LazyRecords":
        """Return the records at the given indices, in that order."""
        return LazyRecords(self._run, super().take(places), self._lazy)


def lazy_records(run: Run, records: Records) -> Records:
    """Return the records, with lazily computed digests for every record that has a payload but no hash."""
    return LazyRecords(run, records) if len(records.which(_is_bare)) else records


def _is_bare(kind: Kind) -> bool:
    return kind.file is not None and not kind.has_hash


def have_other_elements(left: Sequence[Record], right: Sequence[Record]) -> bool:
    """Return whether two tensors of one dtype, each made up of the given records, certainly hold different elements.

    A cheap test before computing multiset hashes: compares how often a few bit patterns occur on both sides. Always
    False where multiset hashes were recorded. Raises RunCorruptError.
    """
    hashes = [record[7] for record in (*left, *right)]
    if not all(isinstance(each, LazyHash) for each in hashes) or any(record[8] for record in (*left, *right)):
        return False
    plan = plan_of(left[0].dtype or "")
    if plan is None:
        return False
    sides = [
        [record[7].array().reshape(-1).view(f"u{plan[2]}") for record in side]  # type: ignore[union-attr]
        for side in (left, right)
    ]
    first = sides[0][0]
    for at in {len(first) * (2 * n + 1) // (2 * _NUM_PROBES) for n in range(_NUM_PROBES)} if len(first) else ():
        counts = [sum(int(np.count_nonzero(part == first[at])) for part in side) for side in sides]
        if counts[0] != counts[1]:
            return True
    return False
