"""Corrupt records: exclude records whose bytes are missing or differ from their hash, and compare the rest of the
run."""

from collections.abc import Iterable

import numpy as np
from msgspec import Struct, field

from tapscope.comparator.runs.series import Series, sources_of
from tapscope.core.dims import parse
from tapscope.core.errors import DataError, DimsError, RunCorruptError
from tapscope.core.formatting import plural
from tapscope.kernels.native import summarize_array
from tapscope.run_format.manifest import FORMAT, HASH_VERSION
from tapscope.run_format.record import Entry, Key, Record
from tapscope.run_format.records import Records
from tapscope.run_format.run import Run


class CorruptRecords(Struct):
    """The known corrupt records of one run; :meth:`intact` and :meth:`recheck` detect more.

    A firing with a corrupt record is excluded as a whole, because the rest is not a full tensor. It is kept if another
    rank holds a copy of the corrupt part.
    """

    run: Run
    reasons: dict[Key, str] = field(default_factory=dict)
    """Key of a corrupt record -> description of the defect."""
    num_records: int = 0
    """Number of excluded records, including intact records of the same firings."""
    num_copied: int = 0
    """Number of excluded records of which another rank holds a copy."""
    num_unchecked: int = 0
    """Number of payloads that :meth:`intact` could not verify because they have no hash."""
    _compared: Records = field(default_factory=Records)
    _is_verified: bool = False

    def intact(self, records: Records, *, verify: bool = False) -> Records:
        """Return the records without corrupt ones. Raises RunCorruptError if none are left.

        By default, checks that the bytes exist without reading them. With ``verify``, reads all bytes and checks their
        hashes.
        """
        if verify and not self._is_verified:
            self._is_verified = True
            self._check_all(records)
        for record in self.run.suspects(records):
            if reason := self.run.lacks(record):
                self.reasons.setdefault(record.key, reason)
        kept = self._without(records) if self.reasons else records
        self.num_records, self._compared = len(records) - len(kept), kept
        if not kept and self.reasons:
            raise RunCorruptError(f"{self.run.path}: every value to compare is damaged: {self._first()}")
        return kept

    def _without(self, records: Records) -> Records:
        odd = {_firing(key) for key in self.reasons}
        firings: dict[Key, list[Record]] = {}
        for record in records:
            if (firing := _firing(record.key)) in odd:
                firings.setdefault(firing, []).append(record)
        lost = {firing: [r for r in every if r.key in self.reasons] for firing, every in firings.items()}
        gone = {firing for firing, some in lost.items() if not all(self._has_copy(r, firings[firing]) for r in some)}
        self.num_copied = sum(len(some) for firing, some in lost.items() if firing not in gone)
        keys = [record.key for record in records]
        kept = [at for at, key in enumerate(keys) if key not in self.reasons and _firing(key) not in gone]
        return records.take(np.array(kept, np.int64))

    def _has_copy(self, lost: Record, firing: Iterable[Record]) -> bool:
        return any(other.key not in self.reasons and self._is_copy(lost, other) for other in firing)

    def _is_copy(self, lost: Record, other: Record) -> bool:
        """Return whether another rank's record can replace a corrupt one.

        The dims must declare it a replica, or the recorded hashes must be equal; and the tensor must not be sharded
        over a mesh axis on which the two ranks differ.
        """
        if (lost.dtype, lost.shape, lost.dims) != (other.dtype, other.shape, other.dims):
            return False
        try:
            dims = parse(lost.dims) if lost.dims else None
        except DimsError:
            return False
        here, there = self.run.coords(lost.key.rank), self.run.coords(other.key.rank)
        apart = {axis for axis in {**here, **there} if here.get(axis) != there.get(axis)}
        if dims is not None and (dims.rows or apart & {*(shard.axis for _, shard in dims.shards()), dims.dp}):
            return False
        declared = dims is not None and bool(apart) and apart <= set(dims.replicated)
        return declared or (lost.hash is not None and lost.hash == other.hash)

    def recheck(self, suspects: Iterable[Series]) -> bool:
        """Read and verify the values of ``suspects``; return True if any are damaged.

        In that case every compared record is verified too, because damage is seldom isolated.
        """
        before = len(self.reasons)
        for series in suspects:
            for source in sources_of(series):
                for firing in source.firings:
                    for record in firing.records:
                        self._check(record)
        if len(self.reasons) == before:
            return False
        self._check_all(self._compared)
        return True

    def _check_all(self, records: Records) -> None:
        flaw_of: dict[tuple[int, Entry, str | None], str | None] = {}  # bytes of several records are read once
        for record in records:
            if record.entry is None:
                continue
            place = record.key.rank, record.entry, record.hash
            if place not in flaw_of:
                flaw_of[place] = self._flaw(record)
            self.num_unchecked += flaw_of[place] is None
            if reason := flaw_of[place]:
                self.reasons.setdefault(record.key, reason)

    def _check(self, record: Record) -> None:
        if record.entry is not None and (reason := self._flaw(record)):
            self.reasons.setdefault(record.key, reason)

    def _flaw(self, record: Record) -> str | None:
        """Return the defect of a record's bytes; empty if the bytes are intact, None if they cannot be verified."""
        key, entry = record.key, record.entry
        assert entry is not None
        try:
            if record.hash is None or self.run.hash_version != HASH_VERSION or not self._has_hashes:
                flaw = self.run.flaw(record)
            else:
                digest = summarize_array(np.ascontiguousarray(self.run.array(record))).hash
                flaw = "differ from those recorded" if digest != record.hash else ""
        except DataError as error:
            return str(error)
        where = f"{entry.file} of rank {key.rank}: the bytes of {key.site} at step {key.step}"
        return f"{where} {flaw}" if flaw else flaw

    @property
    def _has_hashes(self) -> bool:
        """Whether the run recorded hashes; those of other dump formats are computed from the present bytes."""
        return bool(self.run.manifest.get("format") == FORMAT)

    def sentences(self) -> list[str]:
        """Return one sentence that describes the damage, in a list; an empty list without damage."""
        if not self.reasons:
            lost = self.run.damaged
            return [f"{self.run.name} is damaged, {plural(len(lost), 'file')} left out: {lost[0]}"] if lost else []
        left_out = f"{plural(self.num_records, 'record')} left out"
        left_out += f", {self.num_copied:,} of them replicas that other ranks hold" if self.num_copied else ""
        return [f"{self.run.name} is damaged, {left_out} (tapscope verify {self.run.path} lists them): {self._first()}"]

    def _first(self) -> str:
        return next(iter(self.reasons.values()))


def _firing(key: Key) -> Key:
    return key._replace(rank=0)
