"""Records: a columnar sequence of records that needs a fifth of the memory of record objects.

A :class:`.Record` is created on access. Rare fields (non-tensor value, rows, slice, tags, ...) have no column: a record
that uses one is "irregular" and is additionally stored as an object.
"""

from array import array
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, Literal, overload

import numpy as np

from tapscope.run_format.record import Entry, Key, Record
from tapscope.run_format.record_columns import DIGESTS, HASH, NO_COUNTS, NO_SUMS, Kind, bare, parts_of
from tapscope.run_format.stats import Stats

Array = np.ndarray[Any, Any]
_COUNTS, _SUMS = len(NO_COUNTS), len(NO_SUMS)
_INT64 = 1 << 63
_NO_DIGESTS = bytes(DIGESTS)
_make = tuple.__new__  # creates a NamedTuple in half the time of its constructor


class Records(Sequence[Record]):
    """A sequence of records, stored as columns.

    Compares equal to any sequence of equal records. Readers append records; the sequence is not modified afterwards.
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        self.kinds: list[Kind] = []
        """Distinct kinds; some may be unused by any record."""
        self.site_names: list[str] = []
        """Distinct sites; some may be unused by any record."""
        self._codes: dict[tuple[Any, ...], int] = {}
        self._site_codes: dict[str, int] = {}
        self._site, self._kind, self._step, self._seq, self._offset, self._nbytes = (
            array("i"),
            array("i"),
            *(array("q") for _ in range(4)),
        )
        self._digests, self._counts, self._sums = bytearray(), array("q"), array("d")
        self._odd: dict[int, Record] = {}
        """Index -> record, for the irregular records, which the columns cannot represent."""
        self.extend(records)

    def extend(self, records: Iterable[Record]) -> None:
        """Append records."""
        for record in records:
            self.append(record)

    def append(self, record: Record) -> None:
        """Append one record."""
        parts = parts_of(record)
        if parts is None:
            self._odd[len(self)] = record
            parts = parts_of(bare(record))
            assert parts is not None
        self.add(*parts)

    def add_bare(
        self,
        key: Key,
        seq: int,
        dtype: str,
        shape: tuple[int, ...],
        dims: str | None,
        file: str,
        offset: int,
        nbytes: int,
    ) -> None:
        """Append a record with a payload but without digests, statistics or irregular fields."""
        site, step, rank, occurrence, micro, pass_, model = key
        kind = (rank, occurrence, micro, pass_, model, dtype, shape, dims, file, False, False, False)
        self.add(kind, site, step, seq, offset, nbytes, _NO_DIGESTS, NO_COUNTS, NO_SUMS)

    def join(self, other: "Records") -> None:
        """Append all records of ``other``."""
        self._odd.update((len(self) + at, record) for at, record in other._odd.items())
        kinds, sites = [self._code(kind) for kind in other.kinds], self._codes_of(other.site_names)
        self._kind.frombytes(_bytes(np.array(kinds or [0], np.int32)[other.kind]))
        self._site.frombytes(_bytes(np.array(sites or [0], np.int32)[other.site]))
        for name in ("_step", "_seq", "_offset", "_nbytes", "_digests", "_counts", "_sums"):
            getattr(self, name).extend(getattr(other, name))

    def _code(self, kind: tuple[Any, ...]) -> int:
        code = self._codes.setdefault(kind, len(self.kinds))
        if code == len(self.kinds):
            self.kinds.append(_make(Kind, kind))
        return code

    def _site_code(self, site: str) -> int:
        code = self._site_codes.setdefault(site, len(self.site_names))
        if code == len(self.site_names):
            self.site_names.append(site)
        return code

    def _codes_of(self, sites: Iterable[str]) -> list[int]:
        """Return the index of each site in :attr:`site_names`, appending sites seen for the first time."""
        codes = self._site_codes
        return [code if (code := codes.get(site)) is not None else self._site_code(site) for site in sites]

    def add(
        self,
        kind: tuple[Any, ...],
        site: str,
        step: int,
        seq: int,
        offset: int,
        nbytes: int,
        digests: bytes,
        counts: tuple[int, ...],
        sums: tuple[float, ...],
    ) -> None:
        """Append a record given as the fields of :class:`~tapscope.run_format.record_columns.Parts`."""
        code, site_code = self._codes.get(kind), self._site_codes.get(site)
        self._site.append(self._site_code(site) if site_code is None else site_code)
        self._kind.append(self._code(kind) if code is None else code)
        self._step.append(step)
        self._seq.append(seq)
        self._offset.append(offset)
        self._nbytes.append(nbytes)
        self._digests += digests
        self._counts.extend(counts)
        self._sums.extend(sums)

    def add_many(
        self,
        kinds: Iterable[tuple[Any, ...]],
        sites: list[str],
        steps: list[int],
        seqs: list[int],
        offsets: list[int],
        nbytes: list[int],
        digests: bytes,
        counts: bytes,
        sums: bytes,
    ) -> None:
        """Append many records given as columns of the fields of :meth:`add`.

        ``digests``, ``counts`` (int64) and ``sums`` (float64) are the concatenated bytes of all records.
        """
        codes = self._codes
        self._kind.extend([code if (code := codes.get(kind)) is not None else self._code(kind) for kind in kinds])
        self._site.extend(self._codes_of(sites))
        self._step.extend(steps)
        self._seq.extend(seqs)
        self._offset.extend(offsets)
        self._nbytes.extend(nbytes)
        self._digests += digests
        self._counts.frombytes(counts)
        self._sums.frombytes(sums)

    def add_columns(
        self,
        kinds: Sequence[tuple[Any, ...]],
        kind_of: Array,
        sites: Sequence[str],
        site_of: Array,
        step: Array,
        seq: Array,
        offset: Array,
        nbytes: Array,
        digests: bytes,
        counts: Array,
        sums: Array,
    ) -> None:
        """Append many records given as arrays; ``kind_of`` and ``site_of`` index into ``kinds`` and ``sites``."""
        self._kind.frombytes(_bytes(np.array([*map(self._code, kinds)] or [0], np.int32)[kind_of]))
        self._site.frombytes(_bytes(np.array(self._codes_of(sites) or [0], np.int32)[site_of]))
        whole = (self._step, step), (self._seq, seq), (self._offset, offset), (self._nbytes, nbytes)
        for column, values in (*whole, (self._counts, counts)):
            column.frombytes(_bytes(np.ascontiguousarray(values, np.int64)))
        self._sums.frombytes(_bytes(np.ascontiguousarray(sums, np.float64)))
        self._digests += digests

    @overload
    def __getitem__(self, index: int) -> Record: ...
    @overload
    def __getitem__(self, index: slice) -> "Records": ...
    def __getitem__(self, index: int | slice) -> "Record | Records":
        if isinstance(index, slice):
            return self.take(np.arange(*index.indices(len(self))))
        place = index + len(self) if index < 0 else index
        if not 0 <= place < len(self):
            raise IndexError(f"record index {index} out of range for {len(self)} records")
        return self._record(place)

    def __len__(self) -> int:
        return len(self._site)

    def __iter__(self) -> Iterator[Record]:
        return map(self._record, range(len(self)))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(one == two for one, two in zip(self, other, strict=True))

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"<Records: {len(self):,} of {len(self.distinct_sites()):,} sites>"

    def _record(self, at: int) -> Record:
        if self._odd and at in self._odd:
            return self._odd[at]
        kind = self.kinds[self._kind[at]]
        rank, occurrence, micro, pass_, model, dtype, shape, dims, file, has_hash, has_bag, has_stats = kind
        key = _make(Key, (self.site_names[self._site[at]], self._step[at], rank, occurrence, micro, pass_, model))
        counts, sums, digests = at * _COUNTS, at * _SUMS, at * DIGESTS
        stats = None
        if has_stats:
            stats = Stats(*self._counts[counts : counts + _COUNTS], *self._sums[sums : sums + _SUMS])
        hash_ = self._digests[digests : digests + HASH].hex() if has_hash else None
        bag = self._digests[digests + HASH : digests + DIGESTS].hex() if has_bag else None
        entry = None if file is None else _make(Entry, (file, self._offset[at], self._nbytes[at]))
        seq = self._seq[at]
        return _make(
            Record, (key, seq, dtype, shape, dims, None, stats, hash_, bag, entry, None, None, None, None, None)
        )

    @property
    def sites(self) -> list[str]:
        """Site of each record; the list is built on every access."""
        names = self.site_names
        return [names[code] for code in self._site]

    def places_of(self, site: str) -> Array:
        """Return the indices of the records of ``site``."""
        return np.flatnonzero(self.site == self._site_codes.get(site, -1))

    def site_at(self, place: int) -> str:
        """Return the site of the record at index ``place``."""
        return self.site_names[self._site[place]]

    def kind_at(self, place: int) -> Kind:
        """Return the kind of the record at index ``place``."""
        return self.kinds[self._kind[place]]

    def hashes_at(self, places: Sequence[int]) -> list[str | None]:
        """Return the hash of each record at ``places``; None for a record without a hash."""
        return self._digests_at(places, slice(0, HASH), lambda kind: kind.has_hash, lambda record: record.hash)

    def bags_at(self, places: Sequence[int]) -> list[str | None]:
        """Return the bag (multiset hash) of each record at ``places``; None for a record without a bag."""
        return self._digests_at(places, slice(HASH, DIGESTS), lambda kind: kind.has_bag, lambda record: record.bag)

    def digest_words(self, places: Array, what: Literal["hashes", "bags"]) -> Array:
        """Return the hashes or bags at ``places`` as [places, words] uint64; zeros for a record without one."""
        part = slice(0, HASH) if what == "hashes" else slice(HASH, DIGESTS)
        return np.ascontiguousarray(np.asarray(self._digests).reshape(-1, DIGESTS)[places, part]).view(np.uint64)

    def _digests_at(
        self, places: Sequence[int], part: slice, has: Callable[[Kind], bool], own: Callable[[Record], str | None]
    ) -> list[str | None]:
        chosen = np.asarray(places, np.int64)
        data = np.asarray(self._digests).reshape(-1, DIGESTS)[chosen, part].tobytes()
        digests: list[str | None] = [*data.hex(",", part.stop - part.start).split(",")] if data else []
        codes = self.kind[chosen]
        without = [code for code in set(codes.tolist()) if not has(self.kinds[code])]
        for at in np.flatnonzero(np.isin(codes, without)).tolist() if without else ():
            digests[at] = None
        for at, place in enumerate(places) if self._odd else ():
            if place in self._odd:
                digests[at] = own(self._odd[place])
        return digests

    def hash_bytes(self, places: Array) -> list[bytes]:
        """Return the hash of each record at ``places`` as 16 bytes; zeros for a record without a hash."""
        chosen = np.asarray(self._digests).reshape(-1, DIGESTS)[places, :HASH].tobytes()
        return [chosen[at : at + HASH] for at in range(0, len(chosen), HASH)]

    @property
    def forms(self) -> Array:
        """[records] int64: group id of each record; -1 for irregular records.

        Records of a group differ only in site, sequence number, digests, statistics and payload location.
        """
        _, steps = np.unique(self.step, return_inverse=True)
        known: dict[Kind, int] = {}
        placeless = (kind if kind.file is None else kind._replace(file="") for kind in self.kinds)
        kinds = np.array([known.setdefault(kind, len(known)) for kind in placeless] or [0])
        forms: Array = steps * len(self.kinds) + kinds[self.kind]
        forms[list(self._odd)] = -1
        return forms

    def seq_at(self, place: int) -> int:
        """Return the ``seq`` of the record at index ``place``."""
        return self._seq[place]

    @property
    def site(self) -> Array:
        """[records] int32: index into :attr:`site_names`."""
        return np.asarray(self._site)

    @property
    def kind(self) -> Array:
        """[records] int32: index into :attr:`kinds`."""
        return np.asarray(self._kind)

    @property
    def step(self) -> Array:
        """[records] int64: step of each record."""
        return np.asarray(self._step)

    @property
    def offset(self) -> Array:
        """[records] int64: offset of the payload in its file; 0 for a record without payload."""
        return np.asarray(self._offset)

    @property
    def nbytes(self) -> Array:
        """[records] int64: size of the payload in bytes; 0 for a record without payload."""
        return np.asarray(self._nbytes)

    @property
    def seq(self) -> Array:
        """[records] int64: sequence number within the rank."""
        return np.asarray(self._seq)

    @property
    def counts(self) -> Array:
        """[records, 6] int64: counts of the statistics, in the field order of :class:`.Stats`.

        Zeros for records without statistics and for irregular records.
        """
        return np.asarray(self._counts).reshape(-1, _COUNTS)

    @property
    def sums(self) -> Array:
        """[records, 5] float64: minimum, maximum, largest magnitude, sum and sum of squares.

        Zeros for records without statistics and for irregular records.
        """
        return np.asarray(self._sums).reshape(-1, _SUMS)

    @property
    def irregular_places(self) -> list[int]:
        """Indices of the irregular records, whose statistics and digests are not in the columns."""
        return list(self._odd)

    def hashes(self) -> tuple[list[str | None], list[str | None]]:
        """Return the hashes and the bags of all records, without creating record objects."""
        places = range(len(self))
        return self.hashes_at(places), self.bags_at(places)

    def which(self, holds: Callable[[Kind], Any]) -> Array:
        """Return the ascending indices of the records whose kind satisfies the predicate ``holds``."""
        return np.flatnonzero(self.of_kinds(holds))

    def of_kinds(self, tell: Callable[[Kind], Any]) -> Array:
        """Return ``tell(kind)`` of each record as a [records] array; ``tell`` is called once per distinct kind."""
        return np.array([tell(kind) for kind in self.kinds] or [0])[self.kind]

    def of_sites(self, tell: Callable[[str], Any], kind: type = bool) -> Array:
        """Return ``tell(site)`` of each record as a [records] array of dtype ``kind``, calling it once per site."""
        codes = self._site_first()[0]
        values: Array = np.zeros(len(self.site_names), kind)
        values[codes] = np.fromiter(map(tell, map(self.site_names.__getitem__, codes.tolist())), kind, len(codes))
        return values[self.site]

    def distinct_sites(self) -> list[str]:
        """Return the distinct sites in order of their first records."""
        return [self.site_names[code] for code in self._site_first()[0].tolist()]

    def _site_first(self, places: Array | None = None) -> tuple[Array, Array]:
        """Find the distinct sites among the records at ``places`` (ascending; default: all records).

        Returns their indices in :attr:`site_names`, ordered by first record, and the position of that first record in
        ``places``.
        """
        site = self.site if places is None else self.site[places]
        first = np.full(len(self.site_names), len(site))
        np.minimum.at(first, site, np.arange(len(site)))
        codes = np.argsort(first, kind="stable")[: np.count_nonzero(first < len(site))]
        return codes, first[codes]

    def ends(self) -> dict[tuple[int, str], int]:
        """Return (rank, file) -> end offset of the last payload in that file."""
        places: dict[tuple[int, str], int] = {}
        at = self.of_kinds(lambda k: -1 if k.file is None else places.setdefault((k.rank, k.file), len(places)))
        wide = object if np.max([self.offset, self.nbytes], initial=0) >= _INT64 // 2 else np.int64
        ends = np.zeros(len(places), wide)
        np.maximum.at(ends, at[at >= 0], (self.offset.astype(wide) + self.nbytes)[at >= 0])
        used = set(at.tolist())
        return {place: int(ends[code]) for place, code in places.items() if code in used}

    def per_step(self) -> Counter[tuple[int, int]]:
        """Return (rank, step) -> number of records."""
        return Counter({(rank, step): len(places) for (step, rank), places in self.by_step().items()})

    def by_step(self) -> dict[tuple[int, int], Array]:
        """Return (step, rank) -> indices of the records of that step and rank, ascending."""
        if not len(self):
            return {}
        ranks = self.of_kinds(lambda kind: kind.rank)
        order = np.lexsort((ranks, self.step))
        steps, ranks = self.step[order], ranks[order]
        starts = np.flatnonzero((steps[1:] != steps[:-1]) | (ranks[1:] != ranks[:-1])) + 1
        firsts = [0, *starts.tolist()]
        keys = zip(steps[firsts].tolist(), ranks[firsts].tolist(), strict=True)
        return dict(zip(keys, np.split(order, starts), strict=True))

    def site_codes(self) -> tuple[dict[str, int], Array]:
        """Number the distinct sites in order of their first records.

        Returns site -> number, and the number of each record's site as [records] int32.
        """
        codes, _ = self._site_first()
        number_of = np.zeros(len(self.site_names), np.int32)
        number_of[codes] = np.arange(len(codes))
        return {self.site_names[code]: number for number, code in enumerate(codes.tolist())}, number_of[self.site]

    def first_seqs(self, places: Array | None = None) -> dict[str, int]:
        """Return site -> ``seq`` of its first record, in that order.

        ``places`` (ascending indices) restricts the records that are considered.
        """
        codes, first = self._site_first(places)
        seqs = self.seq[first if places is None else places[first]].tolist()
        return dict(zip([self.site_names[code] for code in codes.tolist()], seqs, strict=True))

    @property
    def nonfinite(self) -> Array:
        """[records] int64: number of NaN and infinite elements; 0 without statistics."""
        counts: Array = self.counts[:, 1:4].sum(1)
        for place, record in self._odd.items():
            counts[place] = record.stats.nonfinite if record.stats else 0
        return counts

    @property
    def absmax(self) -> Array:
        """[records] float64: largest finite magnitude; NaN without statistics or without a finite element."""
        values = np.where(self.of_kinds(lambda kind: kind.has_stats).astype(bool), self.sums[:, 2], np.nan)
        for place, record in self._odd.items():
            largest = record.stats.absmax if record.stats else None
            values[place] = np.nan if largest is None else largest
        return values

    @property
    def rms(self) -> Array:
        """[records] float64: root mean square of the finite elements; NaN without statistics or a finite element."""
        finite = (self.counts[:, 0] - self.counts[:, 1:4].sum(1)).astype(np.float64)
        finite[finite == 0] = np.nan
        values: Array = np.sqrt(np.maximum(self.sums[:, 4], 0.0) / finite)
        for place, record in self._odd.items():
            value = record.stats.rms if record.stats else None
            values[place] = np.nan if value is None else value
        return values

    def largest_first(self) -> Array:
        """Return the record indices by descending :attr:`absmax`, records with non-finite values first."""
        order: Array = np.lexsort((-np.nan_to_num(self.absmax), self.nonfinite == 0))
        return order

    def of(
        self,
        steps: Iterable[int] | None = None,
        ranks: Iterable[int] | None = None,
        sites: Collection[str] | None = None,
    ) -> "Records":
        """Return the records of the given steps, ranks and sites; None means no restriction."""
        kept = np.ones(len(self), bool)
        if steps is not None:
            kept &= np.isin(self.step, [step for step in steps if abs(step) < _INT64])
        if ranks is not None:
            known = frozenset(ranks)
            kept &= self.of_kinds(lambda kind: kind.rank in known).astype(bool)
        if sites is not None:
            kept &= self.of_sites(lambda site: site in sites)
        return self if kept.all() else self.take(np.flatnonzero(kept))

    def take(self, places: Array) -> "Records":
        """Return the records at the indices ``places``, in the order of ``places``."""
        taken = Records()
        taken.kinds, taken._codes = self.kinds, self._codes
        taken.site_names, taken._site_codes = self.site_names, self._site_codes
        for name in ("_site", "_kind", "_step", "_seq", "_offset", "_nbytes"):
            getattr(taken, name).frombytes(_bytes(np.asarray(getattr(self, name))[places]))
        taken._digests += np.asarray(self._digests).reshape(-1, DIGESTS)[places].data
        taken._counts.frombytes(_bytes(np.asarray(self._counts).reshape(-1, _COUNTS)[places]))
        taken._sums.frombytes(_bytes(np.asarray(self._sums).reshape(-1, _SUMS)[places]))
        if self._odd:
            taken._odd = {i: self._odd[old] for i, old in enumerate(places.tolist()) if old in self._odd}
        return taken

    def in_order(self) -> "Records":
        """Return the records sorted by ``seq``."""
        seq = np.asarray(self._seq)
        return self if (seq[1:] >= seq[:-1]).all() else self.take(np.argsort(seq, kind="stable"))


def _bytes(values: Array) -> memoryview:
    """Return the bytes of a contiguous array as a memoryview for ``array.frombytes``, without a copy."""
    return values.view(np.uint8).data


def joined(parts: Sequence[Records]) -> Records:
    """Concatenate the records of all ``parts``."""
    if len(parts) == 1:
        return parts[0]
    records = Records()
    for part in parts:
        records.join(part)
    return records
