"""Repair: complete the run of a killed recorder from its lines, without discarding data.

A rank is repaired in three steps: bytes after the last complete line move to a side file, unsealed segments get a
header built from the record lines, and an ``event`` line reports the repair. Bytes that no line references become
``__orphan`` tensors, so that the file is valid and every byte remains accounted for.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from tapscope.core import dtypes
from tapscope.core.errors import RunCorruptError
from tapscope.core.regular_files import open_regular
from tapscope.run_format.directory import RECORDER_FILE, locked
from tapscope.run_format.index import read_index
from tapscope.run_format.io_syscalls import Disk
from tapscope.run_format.ledger import encode_line, event_line
from tapscope.run_format.manifest import INDEX, rank_dirs, read_manifest
from tapscope.run_format.record import Record
from tapscope.run_format.segment import ALIGNMENT, SEGMENTS, describe, read_head, unused_name

TORN = f"{INDEX}.torn"
"""Side file for the bytes after the last complete line, one per repair: ``records.jsonl.torn``, ``….torn~2``, …"""
_TAIL = 1 << 16
_MAX_TORN = 1 << 30
"""Maximum size of a torn line in bytes; no writer leaves more after its last complete line."""


@dataclass(slots=True)
class Repair:
    """Repairs of one rank, applied or (with ``check``) only determined."""

    rank: int
    torn_bytes: int = 0
    """Number of bytes after the last complete line, which move to a side file."""
    sealed: list[str] = field(default_factory=list)
    """Segments that received a header."""
    orphans: dict[str, int] = field(default_factory=dict)
    """Segment -> number of bytes that no line references."""
    removed: list[str] = field(default_factory=list)
    """Segments without payload bytes, which are deleted."""
    problems: list[str] = field(default_factory=list)
    """Defects that could not be repaired, one sentence each."""

    @property
    def needed(self) -> bool:
        """Whether the rank required a repair."""
        return bool(self.torn_bytes or self.sealed or self.removed)

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return {name: getattr(self, name) for name in self.__slots__}


def repair_run(path: Path, *, check: bool = False, advance: Callable[[int], object] = lambda n: None) -> list[Repair]:
    """Repair every rank of a run; with ``check``, only report the necessary repairs.

    Idempotent. ``advance(1)`` is called after each rank. Raises RunExistsError if the run is being recorded,
    RunCorruptError on an I/O error, and the errors of :func:`tapscope.open_run`.
    """
    read_manifest(path)
    with locked(path, create=not check):
        done = []
        for folder in rank_dirs(path).values():
            try:
                done.append(repair_rank(folder, check=check))
            except OSError as error:
                raise RunCorruptError(f"{folder} cannot be repaired: {error}; nothing was lost") from None
            advance(1)
        if not check:
            with suppress(OSError):  # the file is not part of the run
                (path / RECORDER_FILE).unlink(missing_ok=True)  # no process listens at this address any more
    return done


def repair_rank(folder: Path, *, check: bool = False) -> Repair:
    """Repair the rank in ``folder``, or with ``check`` only report the repairs; the caller must hold its lock."""
    repair = Repair(int(folder.name.removeprefix("rank-")))
    flags = os.O_RDONLY if check else os.O_RDWR | os.O_NOFOLLOW
    with os.fdopen(open_regular(folder / INDEX, flags), "rb" if check else "r+b") as index:
        _cut_torn_line(index, folder, repair, check=check)
        by_file: dict[str, list[Record]] = {}
        for record in read_index(folder, repair.rank).records:
            if (stored := record.payload) is not None:
                by_file.setdefault(stored[0].file, []).append(record)
        seal_segments(folder, lambda name: by_file.get(name, ()), repair, check=check)
        if repair.needed and not check:
            fields = {name: value for name, value in repair.to_json().items() if value and name != "rank"}
            index.seek(0, os.SEEK_END)
            index.write(encode_line(event_line("repaired", **fields)) + b"\n")
            _sync(index)
            Disk().sync_path(folder)
    return repair


def seal_segments(folder: Path, records_in: Callable[[str], Iterable[Record]], repair: Repair, *, check: bool) -> None:
    """Write the header of every unsealed segment of a rank, and add the results to ``repair``.

    ``records_in`` returns the records with payloads in the named file; it is called for unsealed files only. With
    ``check``, no file is changed.
    """
    for path in sorted(folder.glob(SEGMENTS)):
        _seal(path, records_in, repair, check=check)


def _cut_torn_line(index: BinaryIO, folder: Path, repair: Repair, *, check: bool) -> None:
    size = index.seek(0, os.SEEK_END)
    whole = _end_of_last_line(index, size)
    if size - whole > _MAX_TORN:
        raise OSError(errno.EFBIG, f"more than {_MAX_TORN:,} bytes follow its last complete line", index.name)
    repair.torn_bytes = size - whole
    if check or not repair.torn_bytes:
        return
    index.seek(whole)
    side = next(p for n in range(1, 10**6) if not (p := folder / (TORN if n == 1 else f"{TORN}~{n}")).exists())
    try:
        with side.open("xb") as file:
            shutil.copyfileobj(index, file)
            _sync(file)
    except OSError:
        side.unlink(missing_ok=True)
        raise
    Disk().sync_path(folder)
    index.truncate(whole)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _end_of_last_line(index: BinaryIO, size: int) -> int:
    end = size
    while end > 0 and size - end <= _MAX_TORN:
        begin = max(end - _TAIL, 0)
        index.seek(begin)
        at = index.read(end - begin).rfind(b"\n")
        if at >= 0:
            return begin + at + 1
        end = begin
    return end


def _seal(path: Path, records_in: Callable[[str], Iterable[Record]], repair: Repair, *, check: bool) -> None:
    try:
        size, reserved, header_of = read_head(path)
    except OSError as error:
        repair.problems.append(f"{path}: cannot be read: {error.strerror or error}; the file is unchanged")
        return
    if header_of is not None:
        return
    records = list(records_in(path.name))
    start = reserved + 8
    if not records and size <= max(start, 8):
        _remove_empty(path, repair, check=check)
        return
    if not 0 < reserved < size or any((stored := rec.payload) and stored[0].offset < start for rec in records):
        repair.problems.append(f"{path}: its first bytes are damaged or missing; the file is unchanged")
        return
    header, orphans = _header(path, records, start, size, repair)
    if len(header) > reserved:
        repair.problems.append(f"{path}: its header needs {len(header)} bytes, {reserved} are reserved; left unsealed")
        return
    repair.sealed.append(path.name)
    if orphans:
        repair.orphans[path.name] = orphans
    if not check:
        fd = open_regular(path, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            os.fsync(fd)
            Disk().write(fd, path, [header.ljust(reserved)], 8)
            os.fsync(fd)
        finally:
            os.close(fd)


def _remove_empty(path: Path, repair: Repair, *, check: bool) -> None:
    repair.removed.append(path.name)
    if not check:
        path.unlink()


def _header(path: Path, records: list[Record], start: int, size: int, repair: Repair) -> tuple[bytes, int]:
    """Return a safetensors header that covers every byte of the file, and the number of unreferenced bytes."""
    names: dict[str, None] = {}
    pieces: list[str] = []
    orphans = 0
    at = start
    for rec in _payloads(records):
        stored = rec.payload
        assert stored is not None
        entry, dtype, shape = stored
        begin, end = entry.offset, entry.offset + entry.nbytes
        if begin < at or end > size:
            why = "overlap what stands before them" if begin < at else f"end at {end}, the file at {size}"
            repair.problems.append(f"{path}: the bytes of {rec.key.tensor_name} {why}")
            continue
        orphans += _cover(pieces, at, begin, start)
        name = unused_name(rec.key.tensor_name, names)
        names[name] = None
        pieces.append(describe(name, *dtypes.safetensors_form(dtype, shape), begin - start, end - start))
        at = end
    orphans += _cover(pieces, at, size, start)
    return ("{" + ",".join(pieces) + "}").encode(), orphans


def _payloads(records: Iterable[Record]) -> list[Record]:
    """Return one record per distinct entry, in file order."""
    unique: dict[tuple[int, int], Record] = {}
    for rec in records:
        if (stored := rec.payload) is not None:
            unique.setdefault((stored[0].offset, stored[0].nbytes), rec)
    return [unique[place] for place in sorted(unique)]


def _cover(pieces: list[str], at: int, begin: int, start: int) -> int:
    """Add a header entry for the gap from ``at`` to ``begin``; return its size in bytes, or 0 if it is padding."""
    gap = begin - at
    if gap <= 0:
        return 0
    is_pad = gap < ALIGNMENT and begin % ALIGNMENT == start % ALIGNMENT
    name = f"__pad{begin - start}" if is_pad else f"__orphan{at - start}"
    pieces.append(describe(name, "U8", [gap], at - start, begin - start))
    return 0 if is_pad else gap
