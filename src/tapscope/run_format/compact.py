"""Compact: replace the record lines of a finished run by Parquet tables."""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tapscope.core.errors import RunCorruptError
from tapscope.core.extras import require
from tapscope.core.gc_control import gc_paused
from tapscope.core.regular_files import reading
from tapscope.run_format.directory import locked
from tapscope.run_format.index import Event, table_names
from tapscope.run_format.io_syscalls import Disk
from tapscope.run_format.ledger import encode_line, event_line
from tapscope.run_format.manifest import COMPACTED, INDEX, TABLE, rank_dirs, read_manifest, write_manifest
from tapscope.run_format.parquet import checksum, read_table, write_table
from tapscope.run_format.record import Record, from_json
from tapscope.run_format.record_index import remove_record_index
from tapscope.run_format.record_parser import RecordLines
from tapscope.run_format.records import Records, joined

_TABLES = 2
"""Format version that introduced Parquet tables."""


@dataclass(frozen=True, slots=True)
class Compaction:
    """Result of the compaction of one rank."""

    rank: int
    num_records: int
    bytes_before: int
    """Size of ``records.jsonl`` before."""
    bytes_after: int
    """Size of ``records.jsonl`` and of the table after."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {name: getattr(self, name) for name in self.__slots__}


def compact_run(path: Path, *, advance: Callable[[int], object] = lambda n: None) -> list[Compaction]:
    """Compact every rank that has record lines.

    The record lines of a rank are removed only after its table was read back and compared equal. ``advance(1)`` is
    called after each rank. Raises MissingExtraError without polars, RunExistsError if the run is being recorded,
    RunCorruptError if a table does not reproduce the records (the rank is then unchanged), and the errors of
    :func:`tapscope.open_run`.
    """
    require("table", "compacting a run")
    manifest = read_manifest(path)
    done = []
    with locked(path), gc_paused():
        if manifest["version"] < _TABLES:  # readers of version 1 do not know about tables and would miss the records
            write_manifest(path, {"hash_version": manifest["version"], **manifest, "version": _TABLES})
        for rank, folder in rank_dirs(path).items():
            try:
                one = _compact_rank(folder, rank)
            except OSError as error:
                for left in folder.glob("*.new"):
                    left.unlink()
                raise RunCorruptError(f"{folder} cannot be compacted: {error}; it reads as before") from None
            done += [one] if one is not None else []
            advance(1)
    return done


def _compact_rank(folder: Path, rank: int) -> Compaction | None:
    index = folder / INDEX
    with reading(index) as file:
        end = file.seek(0, os.SEEK_END)
        file.seek(max(end - 1, 0))
        is_torn = file.read(1) not in (b"\n", b"")
        file.seek(0)
        lines = [] if is_torn else file.read().splitlines(keepends=True)
    if is_torn:
        raise RunCorruptError(f"{index}: its last line is cut off; run first: tapscope repair {folder.parent}")
    plain = Records()
    read = RecordLines(rank, plain, exact=True).read
    lines = [line for line in lines if not read(line)]
    parsed = [_record_of(line, rank) for line in lines]
    others = [item for item in parsed if item is not None]
    if not plain and not others:
        return None
    rest = [line for line, item in zip(lines, parsed, strict=True) if item is None]
    table = folder / _unused_table(rest)
    temporary, num_records = folder / f"{table.name}.new", len(plain) + len(others)
    _write_checked(plain, others, temporary, rank)
    rest.append(
        encode_line(event_line(COMPACTED, file=table.name, num_records=num_records, crc32=checksum(temporary))) + b"\n"
    )
    before = index.stat().st_size
    _replace(folder, temporary, table, index, b"".join(rest))
    return Compaction(rank, num_records, before, index.stat().st_size + table.stat().st_size)


def _record_of(line: bytes, rank: int) -> tuple[Record, dict[str, Any]] | None:
    """Parse a record line into (record, JSON object); None for other and unreadable lines, which are kept verbatim."""
    try:
        content = json.loads(line)
        return (from_json(content, rank), content) if content["type"] == "record" else None
    except (ValueError, KeyError, TypeError, IndexError):
        return None


def _unused_table(lines: list[bytes]) -> str:
    """Return a table file name that no line references.

    The file may exist: a table without a line is a leftover of a killed compaction, and is overwritten.
    """
    taken = table_names(_compacted(lines))
    names = (TABLE if n == 1 else TABLE.replace(".", f"-{n}.") for n in range(1, len(taken) + 2))
    return next(name for name in names if name not in taken)


def _compacted(lines: list[bytes]) -> Iterator[Event]:
    """Yield the events of earlier compactions."""
    for line in lines:
        with suppress(ValueError):
            content = json.loads(line) if COMPACTED.encode() in line else None
            if isinstance(content, dict) and content.get("kind") == COMPACTED:
                yield Event(0, COMPACTED, content)


def _write_checked(plain: Records, others: list[tuple[Record, dict[str, Any]]], path: Path, rank: int) -> None:
    try:
        write_table(plain, others, path)
        written = read_table(path, rank)
        same = written == joined([plain, Records(record for record, _ in others)])
    except ValueError as error:
        path.unlink(missing_ok=True)
        raise RunCorruptError(f"{path}: {error}; the run is unchanged") from None
    if not same:
        path.unlink()
        raise RunCorruptError(f"{path}: the table does not reproduce the records; the run is unchanged")


def _replace(folder: Path, temporary: Path, table: Path, index: Path, rest: bytes) -> None:
    """Move the table into place, then atomically replace ``records.jsonl`` by the lines ``rest`` that reference it."""
    disk = Disk()
    lines = folder / f"{INDEX}.new"
    lines.unlink(missing_ok=True)  # leftover of a killed compaction, or a foreign link
    with lines.open("xb") as file:
        file.write(rest)
        file.flush()
        os.fsync(file.fileno())
    disk.sync_path(temporary)
    temporary.replace(table)
    disk.sync_path(folder)
    lines.replace(index)
    with suppress(OSError):  # readers ignore an index that does not match its file
        remove_record_index(index)
    disk.sync_path(folder)
