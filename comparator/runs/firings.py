"""Firings of all recorded series of a run, created on access because there may be a million."""

from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, Literal, NamedTuple, overload

import numpy as np
from msgspec import Struct

from tapscope.run_format.record import Record
from tapscope.run_format.record_columns import Kind
from tapscope.run_format.records import Records

Array = np.ndarray[Any, Any]
_MAX_CACHED_FIRINGS = 4096
"""Maximum number of cached firings; more than one batch of pairs uses."""


class Firing(Struct, frozen=True, gc=False):
    """One firing of a site, on all ranks."""

    step: int
    call: tuple[int, int]
    """(microbatch, occurrence) within the step."""
    records: tuple[Record, ...]
    """One record per rank, in rank order."""
    split_axes: frozenset[str] = frozenset()
    """Mesh axes over which ranks hold different rows by design, so that each rank is a separate firing: see
    :mod:`.split`."""
    is_stacked: bool = False
    """Whether each rank holds a value of its own; the values are stacked and compared rank by rank."""
    is_replicated: bool = False
    """Whether ranks are expected to hold equal values although no dims say so, because the other run's ranks do."""


class Spans(NamedTuple):
    """Locations of the payloads of the records of several series."""

    file: Array
    """[records] index of the file; equal for records in one file."""
    offset: Array
    """[records] int64: offset of the first byte; negative for records without a payload."""
    nbytes: Array
    """[records] int64: size of the payload."""


class FiringTable:
    """The firings of each series, stored as indices into the records of a run."""

    def __init__(self, records: Records) -> None:
        groups: dict[tuple[str, str], int] = {}
        group = records.of_kinds(lambda kind: groups.setdefault((kind.model, kind.pass_), len(groups)))
        _, series = records.site_codes()
        if len(groups) > 1:
            _, first, code = np.unique(series * len(groups) + group, return_index=True, return_inverse=True)
            series = np.argsort(np.argsort(first))[code]  # numbered by first record, like sites
        place = series, records.step, *records.of_kinds(lambda kind: (kind.micro, kind.occurrence)).T
        order = np.lexsort((records.of_kinds(lambda kind: kind.rank), *place[::-1]))
        new = np.array([column[order][1:] != column[order][:-1] for column in place])
        self.records = records
        self._order = array("q", order.tobytes())
        self._first = _bounds(np.any(new, 0))
        """Firing -> index of its first record in :attr:`_order`."""
        self._series = array("q", np.searchsorted(self._first, np.frombuffer(_bounds(new[0]), np.int64)).tobytes())
        """Series -> index of its first firing."""
        self._kept: dict[int, Firing] = {}

    def series(self) -> "Iterator[tuple[int, Firings]]":
        """Yield (index of the first record, firings) of each series."""
        for at in range(len(self._series) - 1):
            place = self._order[self._first[self._series[at]]]
            yield place, Firings(self, at, self.records.kind_at(place))

    @cached_property
    def shape_keys(self) -> "array[int]":
        """One key per series; series with equal keys differ only in values and sites.

        -1 for a series with several records in a firing, or with irregular records.
        """
        forms = self.records.forms[np.asarray(self._order)]
        any_odd = bool((forms < 0).any())
        known: dict[bytes, int] = {}
        keys = array("q")
        for series in range(len(self._series) - 1):
            first, end = self.bounds(series)
            here = forms[self._first[first] : self._first[end]]
            is_odd = len(here) != end - first or (any_odd and bool((here < 0).any()))
            keys.append(-1 if is_odd else known.setdefault(here.tobytes(), len(known)))
        return keys

    @cached_property
    def is_stored(self) -> bytes:
        """One byte per series: 1 if all records of the series have a payload, else 0."""
        has = self.records.of_kinds(lambda kind: kind.file is not None)[np.asarray(self._order)]
        return np.logical_and.reduceat(has, np.asarray(self._first)[np.asarray(self._series)[:-1]]).tobytes()

    @cached_property
    def has_digests(self) -> dict[str, bool]:
        """Whether all records have a hash (``hashes``) and a multiset hash (``bags``) stored in columns."""
        used = [self.records.kinds[code] for code in np.unique(self.records.kind).tolist()]
        regular = not self.records.irregular_places
        return {
            "hashes": regular and all(kind.has_hash for kind in used),
            "bags": regular and all(kind.has_bag for kind in used),
        }

    def spans(self, series: Sequence[int]) -> Spans:
        """Return the payload locations of several series with equally many records, series by series."""
        first = np.asarray(self._first)[np.asarray(self._series)[list(series)]]
        at = first[:, np.newaxis] + np.arange(self.num_records(series[0]))
        places = np.asarray(self._order)[at].reshape(-1)
        records, files = self.records, dict[str | None, int]()
        file = np.array([files.setdefault(kind.file, len(files)) for kind in records.kinds])[records.kind[places]]
        return Spans(file, records.offset[places], records.nbytes[places])

    def bounds(self, series: int) -> tuple[int, int]:
        """Return (first firing, last firing + 1) of a series."""
        return self._series[series], self._series[series + 1]

    def num_records(self, series: int) -> int:
        """Return the number of records in all firings of a series."""
        return self._first[self._series[series + 1]] - self._first[self._series[series]]

    def places(self, series: int) -> "array[int]":
        """Return the indices of the records of a series, one firing after the other."""
        first, end = self.bounds(series)
        return self._order[self._first[first] : self._first[end]]

    def firing(self, at: int) -> Firing:
        """Return the firing at this index; recently used firings are cached."""
        firing = self._kept.get(at)
        if firing is None:
            if len(self._kept) >= _MAX_CACHED_FIRINGS:
                self._kept.clear()
            firing = self._kept[at] = self._firing(at)
        return firing

    def _firing(self, at: int) -> Firing:
        places = self._order[self._first[at] : self._first[at + 1]]
        records = tuple([self.records[place] for place in places])
        key = records[0].key
        return Firing(key.step, (key.micro, key.occurrence), records)


class Firings(Sequence[Firing]):
    """The firings of one recorded series, ordered by step, microbatch and occurrence."""

    __slots__ = ("at", "kind", "table")

    def __init__(self, table: FiringTable, at: int, kind: Kind) -> None:
        """Create a view of series ``at`` of ``table``; ``kind`` is the kind of its first record."""
        self.table, self.at, self.kind = table, at, kind

    @property
    def num_records(self) -> int:
        """Number of records in all firings."""
        return self.table.num_records(self.at)

    @property
    def hashes(self) -> list[str | None]:
        """Hashes of all records."""
        return self.table.records.hashes_at(self.table.places(self.at))

    @property
    def bags(self) -> list[str | None]:
        """Multiset hashes of all records."""
        return self.table.records.bags_at(self.table.places(self.at))

    def digest_words(self, what: Literal["hashes", "bags"]) -> Array | None:
        """Return the hashes or multiset hashes as uint64 [records, words]; None unless all records have one stored in
        columns."""
        if not self.table.has_digests[what]:
            return None
        return self.table.records.digest_words(np.asarray(self.table.places(self.at)), what)

    @property
    def is_stored(self) -> bool:
        """Whether all records have a payload."""
        return self.table.is_stored[self.at] != 0

    @property
    def shape_key(self) -> int | None:
        """Key of the series within its run, see :attr:`FiringTable.shape_keys`; None if it has none."""
        form = self.table.shape_keys[self.at]
        return None if form < 0 else form

    @overload
    def __getitem__(self, index: int) -> Firing: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Firing, ...]: ...
    def __getitem__(self, index: int | slice) -> Firing | tuple[Firing, ...]:
        here = range(*self.table.bounds(self.at))[index]
        return tuple(map(self.table.firing, here)) if isinstance(here, range) else self.table.firing(here)

    def __len__(self) -> int:
        first, end = self.table.bounds(self.at)
        return end - first

    def __iter__(self) -> Iterator[Firing]:
        return map(self.table.firing, range(*self.table.bounds(self.at)))

    def __eq__(self, other: object) -> bool:
        return tuple(self) == tuple(other) if isinstance(other, Sequence) else NotImplemented

    __hash__ = None  # type: ignore[assignment]


def _bounds(new: Array) -> "array[int]":
    """Return the start index of each group of equal adjacent items, followed by the number of items.

    ``new[i]`` marks that item i + 1 differs from item i.
    """
    return array("q", np.concatenate(([0], np.flatnonzero(new) + 1, [len(new) + 1])).tobytes())
