"""Corrupt records: their bytes are missing or differ from those recorded; the rest of a run is compared."""

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
    """The known corrupt records of one run; :meth:`intact` and :meth:`recheck` find more.

    A firing is excluded as a whole, unless another rank holds a copy of its corrupt part: the rest is not a full
    tensor.
    """

    run: Run
    reasons: dict[Key, str] = field(default_factory=dict)
    """Record -> its defect."""
    num_records: int = 0
    """Excluded records, including intact ones of the same firing."""
    num_copied: int = 0
    """Excluded records of which another rank holds a copy."""
    num_unchecked: int = 0
    """Payloads that :meth:`intact` could not check, for lack of a hash."""
    _compared: Records = field(default_factory=Records)
    _is_verified: bool = False

    def intact(self, records: Records, *, verify: bool = False) -> Records:
        """Return the records without corrupt ones; raises RunCorruptError if nothing is left.

        Checks only that the bytes exist, without reading them; with ``verify`` all of them are read and checked against
        their hashes.
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
        """Return whether another rank's record can replace one: dims declare it a replica or the recorded hashes are
        equal, and the tensor is not sharded over an axis along which the two ranks differ."""
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
        """Read the values of ``suspects`` and check them; True if some differ from what was recorded.

        In that case every compared record is read, since damage is seldom isolated.
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
        flaw_of: dict[tuple[int, Entry, str | None], str | None] = {}  # shared bytes are read once
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
        """Return the defect in the bytes of a record that has some; empty if there is none, None if it cannot be
        checked."""
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
        """Whether the run's hashes were recorded; those of a dump are computed from its present bytes."""
        return bool(self.run.manifest.get("format") == FORMAT)

    def sentences(self) -> list[str]:
        """Return the damage in one sentence; empty if there is none."""
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
