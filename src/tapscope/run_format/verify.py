"""Verify: check that every rank of a run is complete and every payload matches its recorded hash."""

import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tapscope.core.errors import RunCorruptError
from tapscope.core.formatting import listed
from tapscope.run_format.completeness import audit
from tapscope.run_format.directory import may_grow
from tapscope.run_format.ledger import Ledger
from tapscope.run_format.manifest import HASH_VERSION, rank_dir
from tapscope.run_format.record import Entry, Record
from tapscope.run_format.records import Records
from tapscope.run_format.repair import Repair, seal_segments
from tapscope.run_format.run import Run
from tapscope.run_format.segment import SEGMENTS, read_head

Array = np.ndarray[Any, Any]
Digest = Callable[[int, int], bytes]
"""Function (address, number of bytes) -> hash of run-format.md; a parameter because this layer imports no kernels."""


@dataclass(frozen=True, slots=True)
class Corruption:
    """A record whose payload is missing or differs from the recorded hash or checksum."""

    record: Record
    reason: str

    def __str__(self) -> str:
        key = self.record.key
        return f"{key.site} at step {key.step}, rank {key.rank}: {self.reason}"

    def to_json(self) -> dict[str, Any]:
        """Return the key and entry of the record, and the reason."""
        key, entry = self.record.key, self.record.entry
        return {**key._asdict(), "entry": None if entry is None else list(entry), "reason": self.reason}


@dataclass(slots=True)
class RankReport:
    """Verification result of one rank."""

    rank: int
    ledger: Ledger
    num_records: int = 0
    num_with_values: int = 0
    num_sketches: int = 0
    """Number of records with a sketch instead of values; each sketch is compared with its checksum."""
    num_hashed: int = 0
    """Number of records whose values were read and compared with a hash."""
    nbytes: int = 0
    """Payload bytes that were read; shared payloads count once."""
    num_summed: int = 0
    """Number of records compared with a checksum in their file."""
    problems: list[str] = field(default_factory=list)
    """Errors in the segments of the rank, one sentence each."""
    orphan_bytes: int = 0
    """Payload bytes that no record references."""
    unsealed: list[str] = field(default_factory=list)
    """Segments without a header: still being written, or left by a killed recorder."""
    damaged: list[Corruption] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Return the counts by name; damaged records are only counted."""
        counts = {name: getattr(self.ledger, name) for name in ("seen", "recorded", "dropped", "failed", "lost")}
        steps = {name: getattr(self.ledger, name) for name in ("unfinished_steps", "aborted_steps", "skipped_steps")}
        own = {name: getattr(self, name) for name in self.__slots__ if name not in ("ledger", "damaged")}
        return own | counts | steps | {"num_damaged": len(self.damaged)}


@dataclass(frozen=True, slots=True)
class Report:
    """Verification result of a run."""

    path: Path
    ranks: list[RankReport]
    ledger: Ledger
    hash_version: int | None
    """Version of the recorded hashes; None if no record has a hash."""

    @property
    def damaged(self) -> list[Corruption]:
        """Corrupt payloads of all ranks, ordered by rank."""
        return [damage for rank in self.ranks for damage in rank.damaged]

    @property
    def complete(self) -> bool:
        """Whether the run was closed, and every selected value is present and intact."""
        unsealed = any(rank.unsealed or rank.problems for rank in self.ranks)
        return self.ledger.complete and not (self.ledger.open_ranks or unsealed or self.damaged)

    @property
    def is_in_progress(self) -> bool:
        """Whether a recorder still writes the run."""
        return bool(self.ledger.open_ranks) and may_grow(self.path)

    def sentences(self) -> list[str]:
        """Return one sentence per kind of missing or unusual data; damaged records are not included."""
        sentences = self.ledger.sentences()
        if self.hash_version not in (None, HASH_VERSION):
            sentences.append(
                f"its hashes are of version {self.hash_version}, this tapscope knows {HASH_VERSION}: not checked"
            )
        if names := [f"rank {rank.rank} {name}" for rank in self.ranks for name in rank.unsealed]:
            what, hint = "segments without a header", f"; see: tapscope repair {self.path}"
            if self.is_in_progress:
                what, hint = "segments still being written", ""
            sentences.append(f"{what} ({listed(names)}){hint}")
        sentences += [problem for rank in self.ranks for problem in rank.problems]
        if orphans := sum(rank.orphan_bytes for rank in self.ranks):
            sentences.append(f"{orphans:,} payload bytes that no record names")
        return sentences


def verify_run(run: Run, digest: Digest, advance: Callable[[int], object] = lambda n: None) -> Report:
    """Verify every rank of ``run``, reading every payload; ``advance`` is called with the number of bytes read."""
    reports = []
    ranks = run.records.of_kinds(lambda kind: kind.rank)
    for rank in run.ranks:
        report = RankReport(rank, audit(run, rank))
        places = np.flatnonzero(ranks == rank)
        _check_payloads(run, places, report, digest, advance)
        _check_segments(run, places, report)
        reports.append(report)
    has_hashes = bool(run.records.of_kinds(lambda kind: kind.has_hash).any())
    return Report(run.path, reports, run.ledger(), run.hash_version if has_hashes else None)


def _check_payloads(
    run: Run, places: Array, report: RankReport, digest: Digest, advance: Callable[[int], object]
) -> None:
    """Verify the records of one rank at the indices ``places``: first in bulk by columns, the rest one by one."""
    report.num_records = len(places)
    has_entry = run.records.of_kinds(lambda kind: kind.file is not None)[places].astype(bool)
    has_entry |= np.isin(places, run.records.irregular_places)
    places = places[has_entry]
    checked = _check_columns(run, places, report, digest, advance)
    digests: dict[Entry, str] = {}  # a shared payload is hashed once
    for place in places[~checked].tolist():
        _check_record(run, run.records[place], report, digest, digests)
        advance(int(run.records.nbytes[place]))


def _check_columns(
    run: Run, places: Array, report: RankReport, digest: Digest, advance: Callable[[int], object]
) -> Array:
    """Verify records in bulk; return [places] bool: True for records whose payload matches the recorded hash.

    Only those are counted in ``report``.
    """
    records = run.records
    checked = np.zeros(len(places), bool)
    if run.has_checksums or run.hash_version != HASH_VERSION:
        return checked
    usable = records.of_kinds(lambda kind: kind.has_hash and kind.file is not None)[places].astype(bool)
    usable &= ~np.isin(places, [*records.irregular_places, *run.suspect_places(records)])
    kinds = records.kind[places]
    files: dict[str, list[int]] = {}
    for code in np.unique(kinds[usable]).tolist():
        files.setdefault(str(records.kinds[code].file), []).append(code)
    for codes in files.values():
        here = np.flatnonzero(usable & np.isin(kinds, codes))
        offsets, sizes = records.offset[places[here]], records.nbytes[places[here]]
        try:
            data = run.file(records[int(places[here[0]])], int((offsets + sizes).max()))
        except RunCorruptError:
            continue
        if data is not None:
            checked[here] = _are_as_recorded(records.hash_bytes(places[here]), data, offsets, sizes, digest)
            _, firsts = np.unique(np.stack((offsets, sizes)), axis=1, return_index=True)
            report.nbytes += int(sizes[firsts][checked[here][firsts]].sum())
            advance(int(sizes[checked[here]].sum()))
    report.num_with_values += int(checked.sum())
    report.num_hashed += int(checked.sum())
    return checked


def _are_as_recorded(hashes: list[bytes], data: Array, offsets: Array, sizes: Array, digest: Digest) -> list[bool]:
    """Return whether each span of the file ``data`` has the recorded hash; a shared span is hashed once."""
    first, known, is_equal = data.ctypes.data, dict[tuple[int, int], bytes](), []
    for recorded, offset, size in zip(hashes, offsets.tolist(), sizes.tolist(), strict=True):
        span = offset, size
        read = known.get(span)
        if read is None:
            read = known[span] = digest(first + offset, size)
        is_equal.append(read == recorded)
    return is_equal


def _check_record(run: Run, record: Record, report: RankReport, digest: Digest, digests: dict[Entry, str]) -> None:
    if record.sketch is not None:
        _check_sketch(run, record, report)
    if record.entry is None:
        return
    report.num_with_values += 1
    known = digests.get(record.entry)
    try:
        array = np.ascontiguousarray(run.array(record))
        if known is None:
            known = digests[record.entry] = digest(array.ctypes.data, array.nbytes).hex()
            report.nbytes += record.entry.nbytes
        flaw = run.flaw(record)
    except RunCorruptError as error:
        report.damaged.append(Corruption(record, str(error)))
        return
    if flaw:
        report.damaged.append(Corruption(record, f"its bytes {flaw}"))
    report.num_summed += flaw is not None
    hashed = record.hash is not None and run.hash_version == HASH_VERSION
    report.num_hashed += hashed
    if hashed and known != record.hash:
        report.damaged.append(Corruption(record, f"its bytes have hash {known}, but {record.hash} was recorded"))


def _check_sketch(run: Run, record: Record, report: RankReport) -> None:
    """Compare the sketch of ``record`` with its checksum."""
    report.num_sketches += 1
    try:
        counters = run.sketch(record)
    except RunCorruptError as error:
        report.damaged.append(Corruption(record, str(error)))
        return
    report.nbytes += counters.nbytes
    assert record.sketch is not None
    if (crc32 := zlib.crc32(counters.tobytes())) != record.sketch.crc32:
        problem = f"its sketch has crc32 {crc32}, but {record.sketch.crc32} was recorded"
        report.damaged.append(Corruption(record, problem))


def _check_segments(run: Run, places: Array, report: RankReport) -> None:
    folder, records = rank_dir(run.path, report.rank), run.records
    survey = Repair(report.rank)
    seal_segments(folder, lambda name: _in_file(records, places, name), survey, check=True)
    report.unsealed = survey.sealed + survey.removed
    report.problems = survey.problems
    report.orphan_bytes = sum(survey.orphans.values())
    irregular = [
        stored[0]
        for at in records.irregular_places
        if (record := records[at]).key.rank == report.rank and (stored := record.payload) is not None
    ]
    for path in sorted(folder.glob(SEGMENTS)):
        here = _is_in_file(records, places, path.name)
        named = {entry.offset for entry in irregular if entry.file == path.name}
        report.orphan_bytes += _orphans(path, named.union(records.offset[places[here]].tolist()))


def _in_file(records: Records, places: Array, name: str) -> Iterator[Record]:
    """Yield the records at ``places`` whose payload is in the segment ``name``."""
    here = _is_in_file(records, places, name) | np.isin(places, records.irregular_places)
    candidates = map(records.__getitem__, places[here].tolist())
    return (record for record in candidates if (stored := record.payload) is not None and stored[0].file == name)


def _is_in_file(records: Records, places: Array, name: str) -> Array:
    """Return [places] bool: whether the kind of each record references the segment ``name``."""
    is_inside: Array = records.of_kinds(lambda kind: kind.file == name)[places].astype(bool)
    return is_inside


def _orphans(path: Path, named: set[int]) -> int:
    """Return the number of bytes in a sealed segment that no record references, excluding padding.

    ``named`` are the referenced offsets.
    """
    try:
        _, reserved, header = read_head(path)
    except OSError:  # already reported by the check of its header
        return 0
    total = 0
    for name, (begin, end) in (header or {}).items():
        if begin + reserved + 8 not in named and not name.startswith(("__pad", "__metadata__")):
            total += max(end - begin, 0)
    return total
