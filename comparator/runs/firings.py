"""Firings: those of all recorded series of a run, made when they are asked for: a million of them need not be held."""

from array import array
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, overload

import numpy as np
from msgspec import Struct

from tapscope.run_format.record import Record
from tapscope.run_format.record_columns import Kind
from tapscope.run_format.records import Records

Array = np.ndarray[Any, Any]
_KEPT = 4096
"""Firings that are kept for whoever asks again; more than pairs that are measured together have."""


class Firing(Struct, frozen=True, gc=False):
    """One firing of a site, on all ranks."""

    step: int
    turn: tuple[int, int]
    """(micro-batch, occurrence) within the step."""
    records: tuple[Record, ...]
    """One a rank, in rank order."""
    apart: frozenset[str] = frozenset()
    """Mesh axes along which it is a part on purpose: the ranks hold rows of their own, see :mod:`.split`."""
    is_stacked: bool = False
    """Whether the ranks hold values of their own, which are laid one behind the other to be compared rank by rank."""
    is_replicated: bool = False
    """Whether its ranks should hold one value though no dims say so: those of the other run do."""


class Spans(NamedTuple):
    """Where the payloads of the records of some series lie."""

    file: Array
    """[records]: the same for those that are in one."""
    offset: Array
    """[records] int64: first byte; negative for what lies nowhere."""
    nbytes: Array
    """[records] int64"""


class FiringTable:
    """Where the firings of each series lie among the records of a run."""

    def __init__(self, records: Records) -> None:
        groups: dict[tuple[str, str], int] = {}
        group = records.of_kinds(lambda kind: groups.setdefault((kind.model, kind.pass_), len(groups)))
        known: dict[object, int] = {}
        names = records.sites if len(groups) < 2 else zip(records.sites, group.tolist(), strict=True)
        series = np.fromiter((known.setdefault(name, len(known)) for name in names), np.int64, len(records))
        place = series, records.step, *records.of_kinds(lambda kind: (kind.micro, kind.occurrence)).T
        order = np.lexsort((records.of_kinds(lambda kind: kind.rank), *place[::-1]))
        new = np.array([column[order][1:] != column[order][:-1] for column in place])
        self.records = records
        self._order = array("q", order.tobytes())
        self._first = _bounds(np.any(new, 0))
        """Firing -> the first of its records in that order."""
        self._series = array("q", np.searchsorted(self._first, np.frombuffer(_bounds(new[0]), np.int64)).tobytes())
        """Series -> its first firing."""
        self._kept: dict[int, Firing] = {}

    def series(self) -> "Iterator[tuple[int, Firings]]":
        """(place of its first record, its firings) of each series."""
        for at in range(len(self._series) - 1):
            place = self._order[self._first[self._series[at]]]
            yield place, Firings(self, at, self.records.kind_at(place))

    @cached_property
    def forms(self) -> "array[int]":
        """Of each series: equal for those whose firings are each one record, and alike but for values and sites; -1 for
        others."""
        forms = self.records.forms[np.asarray(self._order)]
        any_odd = bool((forms < 0).any())
        known: dict[bytes, int] = {}
        found = array("q")
        for series in range(len(self._series) - 1):
            first, end = self.bounds(series)
            here = forms[self._first[first] : self._first[end]]
            is_odd = len(here) != end - first or (any_odd and bool((here < 0).any()))
            found.append(-1 if is_odd else known.setdefault(here.tobytes(), len(known)))
        return found

    @cached_property
    def is_stored(self) -> bytes:
        """Of each series, 1 where all its records have a payload, else 0."""
        has = self.records.of_kinds(lambda kind: kind.file is not None)[np.asarray(self._order)]
        return np.logical_and.reduceat(has, np.asarray(self._first)[np.asarray(self._series)[:-1]]).tobytes()

    def spans(self, series: Sequence[int]) -> Spans:
        """Of some series that have as many records each, in their order."""
        first = np.asarray(self._first)[np.asarray(self._series)[list(series)]]
        at = first[:, np.newaxis] + np.arange(self.num_records(series[0]))
        places = np.asarray(self._order)[at].reshape(-1)
        records, files = self.records, dict[str | None, int]()
        file = np.array([files.setdefault(kind.file, len(files)) for kind in records.kinds])[records.kind[places]]
        return Spans(file, records.offset[places], records.nbytes[places])

    def bounds(self, series: int) -> tuple[int, int]:
        """Its first firing, and the one behind its last."""
        return self._series[series], self._series[series + 1]

    def num_records(self, series: int) -> int:
        """Of all its firings."""
        return self._first[self._series[series + 1]] - self._first[self._series[series]]

    def places(self, series: int) -> "array[int]":
        """Those of its records, one firing after the other."""
        first, end = self.bounds(series)
        return self._order[self._first[first] : self._first[end]]

    def firing(self, at: int) -> Firing:
        """One firing."""
        found = self._kept.get(at)
        if found is None:
            if len(self._kept) >= _KEPT:
                self._kept.clear()
            found = self._kept[at] = self._made(at)
        return found

    def _made(self, at: int) -> Firing:
        places = self._order[self._first[at] : self._first[at + 1]]
        records = tuple([self.records[place] for place in places])
        key = records[0].key
        return Firing(key.step, (key.micro, key.occurrence), records)


class Firings(Sequence[Firing]):
    """Those of one recorded series, by step, micro-batch and occurrence."""

    __slots__ = ("at", "kind", "table")

    def __init__(self, table: FiringTable, at: int, kind: Kind) -> None:
        """``kind`` is that of the first record."""
        self.table, self.at, self.kind = table, at, kind

    @property
    def num_records(self) -> int:
        """Of all of them."""
        return self.table.num_records(self.at)

    @property
    def hashes(self) -> list[str | None]:
        """Of all records."""
        return list(map(self.table.records.hash_at, self.table.places(self.at)))

    @property
    def is_stored(self) -> bool:
        """Whether all records have a payload."""
        return self.table.is_stored[self.at] != 0

    @property
    def form(self) -> int | None:
        """Equal for series of a run whose firings are each one record, and alike but for values and sites; None for
        others."""
        form = self.table.forms[self.at]
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
    """Where runs of what is alike begin, of whose items but the first some are ``new``, and where the last ends."""
    return array("q", np.concatenate(([0], np.flatnonzero(new) + 1, [len(new) + 1])).tobytes())
