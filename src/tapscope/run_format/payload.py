"""Payloads: the bytes of records, mapped from the files of a source."""

import mmap
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tapscope.core import dtypes
from tapscope.core.errors import RunCorruptError
from tapscope.core.regular_files import reading
from tapscope.run_format.manifest import segment_path
from tapscope.run_format.record import COUNTERS, Record
from tapscope.run_format.record_columns import Kind
from tapscope.run_format.records import Records
from tapscope.run_format.validation import MAX_COUNT

Array = np.ndarray[Any, Any]
TAIL = 256
"""Bytes of the end of a payload that :meth:`Payloads.tail` gives, a multiple of every element size."""


class Payloads(Protocol):
    """The source of a :class:`~tapscope.run_format.run.Run`'s values."""

    damaged: list[str]
    """The error of each file that could not be read when the run was opened."""
    has_checksums: bool
    """Whether :meth:`flaw` may find anything."""

    def array(self, record: Record) -> Array:
        """The values of a record with an entry, read-only; raises RunCorruptError if they are missing."""
        ...

    def file(self, record: Record, end: int) -> Array | None:
        """All bytes of the file that holds the payload of a record with an entry; None if the payload is not stored
        in one piece. Raises RunCorruptError if there are fewer than ``end``."""
        ...

    def tail(self, record: Record) -> bytes | None:
        """The last :data:`TAIL` bytes of the payload, or all of a shorter one, if they need not be read; else None."""
        ...

    def lacks(self, record: Record) -> str:
        """Why the bytes of a record with an entry cannot be in the file, without reading it; empty if they may be."""
        ...

    def suspects(self, records: Records) -> Array:
        """Indices of records for which :meth:`lacks` may find something."""
        ...

    def flaw(self, record: Record) -> str | None:
        """How the bytes of a record with an entry violate a checksum of their file, as the end of a sentence: empty
        if they do not, None without a checksum.

        Reads the file; raises RunCorruptError if it cannot.
        """
        ...

    def missing(self, records: Records) -> list[str]:
        """Files that are missing or too short for their records, one sentence each."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...


class MappedFiles:
    """Files, mapped on first use."""

    def __init__(self) -> None:
        self._maps: dict[Path, Array] = {}

    def bytes_of(self, path: Path, end: int) -> Array:
        """The file as bytes; raises RunCorruptError when it has fewer than ``end``."""
        mapped = self._maps.get(path)
        if mapped is None or mapped.nbytes < end:
            try:
                with reading(path) as file:
                    mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
            except (OSError, ValueError) as error:
                raise RunCorruptError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
            if mapped.nbytes < end:
                raise RunCorruptError(f"{path}: truncated: {mapped.nbytes} bytes, a record needs {end}")
            self._maps[path] = mapped
        return mapped

    def close(self) -> None:
        """Release the maps; arrays in use keep theirs."""
        self._maps.clear()


class SegmentPayloads:
    """The segments of a tapscope run."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._files = MappedFiles()
        self._paths: dict[tuple[int, str], Path] = {}
        self._sizes: dict[tuple[int, str], int] = {}
        self._mapped: dict[tuple[int, str], Array] = {}
        self.has_checksums = False
        """Records have hashes."""
        self.damaged: list[str] = []
        """None: each file is checked when its values are read."""

    def array(self, record: Record) -> Array:
        """See :class:`Payloads`."""
        entry = record.entry
        assert entry is not None
        dtype = dtypes.numpy_dtype(record.dtype or "")
        if entry.offset < 0 or prod(record.shape) * dtype.itemsize != entry.nbytes:
            raise RunCorruptError(self._misfit(record))
        if entry.nbytes == 0:
            return np.empty(record.shape, dtype)
        data = self.file(record, entry.offset + entry.nbytes)
        return np.ndarray(record.shape, dtype, data, entry.offset)

    def sketch(self, record: Record) -> Array:
        """The counters of a record with a sketch, read-only; raises RunCorruptError if they are missing."""
        assert record.sketch is not None
        entry = record.sketch.entry
        if entry.offset < 0:
            raise RunCorruptError(f"the sketch of {record.key.tensor_name} has the negative offset {entry.offset}")
        path = segment_path(self._run, record.key.rank, entry.file)
        data = self._files.bytes_of(path, entry.offset + entry.nbytes)
        return np.ndarray((COUNTERS,), np.float32, data, entry.offset)

    def file(self, record: Record, end: int) -> Array:
        """See :class:`Payloads`."""
        assert record.entry is not None
        place = record.key.rank, record.entry.file
        data = self._mapped.get(place)
        if data is None or data.nbytes < end:
            data = self._mapped[place] = self._files.bytes_of(self._path(record), end)
        return data

    def tail(self, record: Record) -> None:
        """None: records have hashes."""

    def lacks(self, record: Record) -> str:
        """See :class:`Payloads`."""
        entry = record.entry
        assert entry is not None
        place = record.key.rank, entry.file
        size = self._sizes.get(place)
        if size is None:
            path = self._path(record)
            size = self._sizes[place] = path.stat().st_size if path.is_file() else -1
        end = entry.offset + entry.nbytes
        if size < end:
            return f"{self._path(record)}: {'missing' if size < 0 else f'{size:,} bytes, a record needs {end:,}'}"
        return self._misfit(record)

    def _misfit(self, record: Record) -> str:
        """The error in the entry of a record itself."""
        entry = record.entry
        assert entry is not None
        try:
            expected = prod(record.shape) * dtypes.itemsize(record.dtype or "")
        except RunCorruptError as error:
            return str(error)
        if entry.offset < 0:
            return f"{self._path(record)}: {record.key.tensor_name} has the negative offset {entry.offset}"
        if expected != entry.nbytes:
            return (
                f"{self._path(record)}: {record.key.tensor_name} has {entry.nbytes} bytes, its shape needs {expected}"
            )
        return ""

    def suspects(self, records: Records) -> Array:
        """See :class:`Payloads`."""
        offset, nbytes, size = records.offset, records.nbytes, records.of_kinds(self._size)
        odd = (offset < 0) | (offset > size - nbytes) | (nbytes != records.of_kinds(_num_bytes))
        return np.flatnonzero(odd & records.of_kinds(_has_payload))

    def flaw(self, record: Record) -> None:
        """None: records have hashes."""

    def _size(self, kind: Kind) -> int:
        """Bytes of the file; -1 without one."""
        if kind.file is None:
            return -1
        place = kind.rank, kind.file
        if place not in self._sizes:
            path = segment_path(self._run, *place)
            self._sizes[place] = path.stat().st_size if path.is_file() else -1
        return self._sizes[place]

    def missing(self, records: Records) -> list[str]:
        """Segments that are missing or shorter than their records require; one stat per file."""
        problems = []
        for place, end in records.ends().items():
            file = segment_path(self._run, *place)
            size = file.stat().st_size if file.is_file() else None
            if size is None:
                problems.append(f"{file}: missing, and with it the values of its records")
            elif size < end:
                problems.append(f"{file}: truncated: {size} bytes, its records need {end}")
        return problems

    def close(self) -> None:
        """See :class:`Payloads`."""
        self._mapped.clear()
        self._files.close()

    def _path(self, record: Record) -> Path:
        assert record.entry is not None
        place = record.key.rank, record.entry.file
        if place not in self._paths:
            self._paths[place] = segment_path(self._run, *place)
        return self._paths[place]


def _has_payload(kind: Kind) -> bool:
    return kind.file is not None


def _num_bytes(kind: Kind) -> int:
    """Size of a payload; -1 for an unknown type or an impossible size."""
    try:
        num_bytes = prod(kind.shape) * dtypes.itemsize(kind.dtype or "")
    except RunCorruptError:
        return -1
    return num_bytes if num_bytes < MAX_COUNT else -1
