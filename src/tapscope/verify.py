"""Verify: what a run holds against what its lines promise, rank by rank and byte by byte."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tapscope.audit import audit
from tapscope.errors import RunCorruptError
from tapscope.ledger import Ledger
from tapscope.manifest import HASH_VERSION, rank_dir
from tapscope.record import Entry, Record
from tapscope.repair import Repair, seal_segments
from tapscope.run import Run
from tapscope.segment import SEGMENTS, read_head

Digest = Callable[[np.ndarray[Any, Any]], str]
"""The hash of docs/format.md over an array's bytes; handed in, because this layer knows no kernels."""


@dataclass(frozen=True, slots=True)
class Damage:
    """A record whose bytes are missing or are not those that were recorded."""

    record: Record
    reason: str

    def __str__(self) -> str:
        key = self.record.key
        return f"{key.site} at step {key.step}, rank {key.rank}: {self.reason}"

    def to_json(self) -> dict[str, Any]:
        """Where and why."""
        key, entry = self.record.key, self.record.entry
        return {**key._asdict(), "entry": None if entry is None else list(entry), "reason": self.reason}


@dataclass(slots=True)
class RankReport:
    """One rank."""

    rank: int
    ledger: Ledger
    num_records: int = 0
    num_with_values: int = 0
    num_hashed: int = 0
    """Records whose bytes were read and have a hash to compare with."""
    nbytes: int = 0
    """Payload bytes that records name, shared ones once."""
    num_summed: int = 0
    """Records without a hash whose file has a checksum of them that was compared."""
    problems: list[str] = field(default_factory=list)
    """What is wrong with its segments, one sentence each."""
    orphan_bytes: int = 0
    """Payload bytes that no record names."""
    unsealed: list[str] = field(default_factory=list)
    """Segments without a header: still being written, or left by a killed recorder."""
    damaged: list[Damage] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """Counts by name; damage is listed apart."""
        counts = {name: getattr(self.ledger, name) for name in ("seen", "recorded", "dropped", "failed", "lost")}
        steps = {name: getattr(self.ledger, name) for name in ("unfinished_steps", "aborted_steps", "skipped_steps")}
        own = {name: getattr(self, name) for name in self.__slots__ if name not in ("ledger", "damaged")}
        return own | counts | steps | {"num_damaged": len(self.damaged)}


@dataclass(frozen=True, slots=True)
class Report:
    """All of them, and what only the whole run can say."""

    path: Path
    ranks: list[RankReport]
    ledger: Ledger
    hash_version: int

    @property
    def damaged(self) -> list[Damage]:
        """Of every rank, in order."""
        return [damage for rank in self.ranks for damage in rank.damaged]

    @property
    def complete(self) -> bool:
        """Whether the run was closed and everything that was selected is there, as it was recorded."""
        unsealed = any(rank.unsealed or rank.problems for rank in self.ranks)
        return self.ledger.complete and not (self.ledger.open_ranks or unsealed or self.damaged)

    def sentences(self) -> list[str]:
        """What is missing or odd, but for the damaged records."""
        said = self.ledger.sentences()
        if self.hash_version != HASH_VERSION:
            said.append(
                f"its hashes are of version {self.hash_version}, this tapscope knows {HASH_VERSION}: not checked"
            )
        if names := [f"rank {rank.rank} {name}" for rank in self.ranks for name in rank.unsealed]:
            more = f" and {len(names) - 4} more" if len(names) > 4 else ""
            said.append(f"segments without a header ({', '.join(names[:4])}{more}); see: tapscope repair {self.path}")
        said += [problem for rank in self.ranks for problem in rank.problems]
        if orphans := sum(rank.orphan_bytes for rank in self.ranks):
            said.append(f"{orphans:,} payload bytes that no record names")
        return said


def verify_run(run: Run, digest: Digest, advance: Callable[[int], object] = lambda n: None) -> Report:
    """Check every rank and read every payload; ``advance`` is called with the bytes read."""
    reports = {rank: RankReport(rank, audit(run, rank)) for rank in run.ranks}
    by_rank: dict[int, list[Record]] = {rank: [] for rank in run.ranks}
    for record in run.records:
        by_rank[record.key.rank].append(record)
    for rank, report in reports.items():
        _check_payloads(run, by_rank[rank], report, digest, advance)
        _check_segments(run.path, by_rank[rank], report)
    return Report(run.path, list(reports.values()), run.ledger(), run.hash_version)


def _check_payloads(
    run: Run, records: list[Record], report: RankReport, digest: Digest, advance: Callable[[int], object]
) -> None:
    found: dict[Entry, str] = {}  # shared bytes are read once
    for record in records:
        report.num_records += 1
        if record.entry is None:
            continue
        report.num_with_values += 1
        known = found.get(record.entry)
        try:
            array = run.array(record)
            if known is None:
                known = found[record.entry] = digest(array)
                report.nbytes += record.entry.nbytes
            flaw = run.flaw(record)
        except RunCorruptError as error:
            report.damaged.append(Damage(record, str(error)))
        else:
            if flaw:
                report.damaged.append(Damage(record, f"its bytes {flaw}"))
            report.num_summed += flaw is not None
            hashed = record.hash is not None and run.hash_version == HASH_VERSION
            report.num_hashed += hashed
            if hashed and known != record.hash:
                report.damaged.append(Damage(record, f"its bytes have hash {known}, recorded was {record.hash}"))
        advance(record.nbytes)


def _check_segments(run: Path, records: list[Record], report: RankReport) -> None:
    folder = rank_dir(run, report.rank)
    survey = Repair(report.rank)
    seal_segments(folder, records, survey, check=True)
    report.unsealed = survey.sealed + survey.removed
    report.problems = survey.problems
    report.orphan_bytes = sum(survey.orphans.values())
    named = {(record.entry.file, record.entry.offset) for record in records if record.entry is not None}
    for path in sorted(folder.glob(SEGMENTS)):
        report.orphan_bytes += _orphans(path, named)


def _orphans(path: Path, named: set[tuple[str, int]]) -> int:
    """Bytes of a sealed segment's tensors that no record names, padding left out."""
    try:
        _, reserved, header = read_head(path)
    except OSError:  # which was said when it was looked at for its seal
        return 0
    total = 0
    for name, tensor in (header or {}).items():
        if not name.startswith(("__pad", "__metadata__")):
            begin, end = _span(tensor)
            total += 0 if (path.name, begin + reserved + 8) in named else max(end - begin, 0)
    return total


def _span(tensor: Any) -> tuple[int, int]:
    """The first byte and the end of a tensor of a header; nothing where it does not say them."""
    span = tensor.get("data_offsets") if isinstance(tensor, dict) else None
    if isinstance(span, list) and len(span) == 2 and all(type(place) is int for place in span):
        return span[0], span[1]
    return 0, 0
