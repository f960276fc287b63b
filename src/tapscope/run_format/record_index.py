"""Record index: a cache of the records of ``records.jsonl`` as the columns of :class:`.Records`, for fast opening.

``records.jsonl.index`` covers a prefix of ``records.jsonl`` and states its size and SHA-256: lines appended later are
parsed as usual, and an index that does not match is ignored and replaced. Lines that are not plain records are kept
verbatim, so that opening yields the same events, steps and problems. The recorder writes an index after the last rank
disconnected; otherwise the first reader does, if the directory is writable. The index is optional.
"""

import hashlib
import logging
import os
import zlib
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
from msgspec import Struct

from tapscope.core.dtypes import NAMES
from tapscope.core.regular_files import reading, replacing
from tapscope.run_format.record_columns import DIGESTS, NO_COUNTS, NO_SUMS
from tapscope.run_format.records import Records
from tapscope.run_format.validation import MAX_AXES, MAX_COUNT

_log = logging.getLogger("tapscope")
SUFFIX = ".index"
_VERSION = 1
_MAX_HEADER = 256 << 20
_BLOCK = 1 << 20
_CHECK = 9
"""Length of the CRC-32 prefix of the header in bytes: 8 hexadecimal digits and a space."""
_SCALARS = {"_kind": np.int32, "_step": np.int64, "_seq": np.int64, "_offset": np.int64, "_nbytes": np.int64}
_NUMBERS = {"_counts": np.int64, "_sums": np.float64}
_KIND = tuple[
    int, int, str, str, str | None, tuple[int, ...], str | None, str | None, bool, bool, bool
]  # the fields of Kind without the rank


class OtherLine(Struct, frozen=True, array_like=True):
    """A line that the columns do not represent: not a record, an irregular record, or unreadable."""

    number: int
    """Line number, from 1."""
    text: str
    """The line decoded as Latin-1, which is valid for any bytes."""
    num_records: int
    """Number of records in the columns that precede the line."""


class _Header(Struct, frozen=True):
    version: int
    size: int
    """Size of the covered prefix of the file in bytes; a prefix consists of whole lines."""
    sha256: str
    """SHA-256 of the covered prefix."""
    num_lines: int
    num_records: int
    kinds: list[_KIND]
    sites: list[str]
    others: list[OtherLine]
    crc32: int
    """CRC-32 of the columns, which follow this header."""


class RecordIndex(Struct, frozen=True):
    """Parsed content of the covered prefix of a ``records.jsonl``."""

    records: Records
    others: list[OtherLine]
    size: int
    """Size of the covered prefix in bytes."""
    num_lines: int


def read_record_index(path: Path, rank: int) -> RecordIndex | None:
    """Read the index of the ``records.jsonl`` at ``path``; None if missing, damaged or not matching the file."""
    try:
        with reading(f"{path}{SUFFIX}") as file:
            head = file.readline(_MAX_HEADER)
            if head[:_CHECK] != _check(head[_CHECK:]):
                return None
            header = msgspec.json.decode(head[_CHECK:], type=_Header)
            if header.version != _VERSION or digest_of(path, header.size) != header.sha256:
                return None
            expected = header.num_records * _row_size()
            if os.fstat(file.fileno()).st_size != len(head) + expected:
                return None
            records = _records(header, file, rank)
    except (OSError, EOFError, ValueError, msgspec.MsgspecError, MemoryError, RecursionError):
        return None
    return RecordIndex(records, header.others, header.size, header.num_lines)


def state_of(path: Path) -> tuple[int, ...] | None:
    """Return (device, inode, size, mtime) of a file, which changes if it is replaced or written; None if missing."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def write_record_index(path: Path, index: RecordIndex, state: tuple[int, ...] | None) -> None:
    """Write ``index`` next to the file at ``path``; a failure is logged at debug level and leaves no file.

    ``state`` is the :func:`state_of` the file before it was read. If the state has changed, nothing is written, because
    the records and the SHA-256 would describe different content.
    """
    try:
        with replacing(Path(f"{path}{SUFFIX}")) as file:
            os.fchmod(file.fileno(), path.stat().st_mode & 0o666)
            _write(file, path, index)
            if state_of(path) != state:
                raise ValueError("the file changed while it was read")
    except (OSError, ValueError, OverflowError, msgspec.MsgspecError, MemoryError) as error:
        _log.debug("tapscope: cannot write an index of %s, so it will be read in full again: %r", path, error)


def _write(file: BinaryIO, path: Path, index: RecordIndex) -> None:
    """Write the header and columns of ``index`` to ``file``; raises ValueError if the file at ``path`` shrank."""
    records, sha256 = index.records, digest_of(path, index.size)
    if sha256 is None:
        raise ValueError(f"the file has fewer than {index.size:,} bytes")
    columns = records._site, records._digests, *(getattr(records, name) for name in (*_SCALARS, *_NUMBERS))
    crc = 0
    for column in columns:
        crc = zlib.crc32(column, crc)
    kinds: list[_KIND] = [kind[1:] for kind in records.kinds]
    size, lines, others = index.size, index.num_lines, index.others
    head = _Header(_VERSION, size, sha256, lines, len(records), kinds, records.site_names, others, crc)
    text = msgspec.json.encode(head) + b"\n"
    file.write(_check(text) + text)
    for column in columns:
        file.write(column)


def _check(text: bytes) -> bytes:
    return b"%08x " % zlib.crc32(text)


def digest_of(path: Path, size: int) -> str | None:
    """Return the SHA-256 of the first ``size`` bytes of a file; None if it has fewer. Raises OSError."""
    hasher, room = hashlib.sha256(), memoryview(bytearray(_BLOCK))
    with reading(path) as file:
        left = size
        while left > 0 and (num := file.readinto(room[: min(_BLOCK, left)])):  # type: ignore[attr-defined]
            hasher.update(room[:num])
            left -= num
    return None if left else hasher.hexdigest()


def _row_size() -> int:
    """Return the number of bytes per record in the columns."""
    return 4 + DIGESTS + sum(np.dtype(kind).itemsize for kind in _SCALARS.values()) + 8 * len((*NO_COUNTS, *NO_SUMS))


def _records(header: _Header, file: BinaryIO, rank: int) -> Records:
    """Read the columns after the header; raises ValueError if they are damaged or contain impossible values."""
    records, num = Records(), header.num_records
    for kind in header.kinds:
        if (kind[4] is not None and kind[4] not in NAMES) or len(kind[5]) > MAX_AXES:
            raise ValueError(f"invalid kind {kind}")
        if min((kind[0], kind[1], *kind[5])) < 0 or max((kind[0], kind[1], *kind[5])) >= MAX_COUNT:
            raise ValueError(f"invalid kind {kind}")
        records._code((rank, *kind))
    for site in header.sites:
        records._site_code(site)
    if len(records.kinds) != len(header.kinds) or len(records.site_names) != len(header.sites):
        raise ValueError("kinds or sites occur twice")
    columns = records._site, bytearray(DIGESTS * num), *(getattr(records, name) for name in (*_SCALARS, *_NUMBERS))
    crc = 0
    for column, count in zip(columns, (1, 0, *(1 for _ in _SCALARS), len(NO_COUNTS), len(NO_SUMS)), strict=True):
        if isinstance(column, bytearray):
            file.readinto(column)  # type: ignore[attr-defined]
            records._digests = column
        else:
            column.fromfile(file, count * num)
        crc = zlib.crc32(column, crc)
    if crc != header.crc32:
        raise ValueError("the columns do not have their CRC-32")
    limits = {
        "_site": len(records.site_names),
        "_kind": len(records.kinds),
        "_step": MAX_COUNT,
        "_seq": MAX_COUNT,
        "_nbytes": MAX_COUNT,
    }
    for name, limit in limits.items():
        values = np.asarray(getattr(records, name))
        if num and not 0 <= values.min() <= values.max() < limit:
            raise ValueError(f"{name} out of range")
    return records


def remove_record_index(path: Path) -> None:
    """Remove the index of the file at ``path``, if any; raises OSError."""
    Path(f"{path}{SUFFIX}").unlink(missing_ok=True)


def without(records: Records, places: list[int]) -> Records:
    """Return ``records`` without those at the indices ``places``."""
    return records.take(np.delete(np.arange(len(records)), places)) if places else records


def with_others(records: Records, others: Records, before: list[int]) -> Records:
    """Insert ``others`` into ``records``; ``before`` is the number of ``records`` that precede each of them."""
    if not len(others):
        return records
    num = len(records)
    order = np.insert(np.arange(num), np.asarray(before, np.int64), num + np.arange(len(others)))
    records.join(others)
    return records.take(order)
