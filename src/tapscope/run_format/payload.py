"""Payloads: access to the bytes of records, memory-mapped from the files of a source."""

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
"""Maximum number of bytes that :meth:`Payloads.tail` returns, a multiple of every element size."""


class Payloads(Protocol):
    """Source of the tensor values of a :class:`~tapscope.run_format.run.Run`.

    A ``record`` argument must have an entry.
    """

    damaged: list[str]
    """One error message per file that could not be read when the run was opened."""
    has_checksums: bool
    """Whether :meth:`flaw` can detect corruption, i.e. the source stores checksums for some of its files."""

    def array(self, record: Record) -> Array:
        """Return the values of ``record`` as a read-only array; raises RunCorruptError if they are missing."""
        ...

    def file(self, record: Record, end: int) -> Array | None:
        """Memory-map the whole file that contains the payload of ``record``.

        Returns None if the payload is not one contiguous range of a local file. Raises RunCorruptError if the file has
        fewer than ``end`` bytes.
        """
        ...

    def tail(self, record: Record) -> bytes | None:
        """Return the last :data:`TAIL` bytes of the payload (all bytes of a shorter one).

        Returns None if these bytes are not available without reading the whole payload.
        """
        ...

    def lacks(self, record: Record) -> str:
        """Return why the file cannot contain the payload of ``record``, judged by metadata only; empty if it can."""
        ...

    def suspects(self, records: Records) -> Array:
        """Return the indices of the records for which :meth:`lacks` may report a defect."""
        ...

    def flaw(self, record: Record) -> str | None:
        """Check the payload of ``record`` against a checksum stored in its file; reads the payload.

        Returns the mismatch as the end of a sentence ("its bytes ..."), an empty string if the checksum matches, or
        None if there is no checksum. Raises RunCorruptError if the file cannot be read.
        """
        ...

    def missing(self, records: Records) -> list[str]:
        """Return one sentence per file that is missing or too short for ``records``."""
        ...

    def close(self) -> None:
        """Close the files."""
        ...


class MappedFiles:
    """Cache of memory-mapped files; each file is mapped on first use."""

    def __init__(self) -> None:
        self._maps: dict[Path, Array] = {}

    def bytes_of(self, path: Path, end: int) -> Array:
        """Return the whole file as a uint8 array; raises RunCorruptError if it has fewer than ``end`` bytes."""
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
        """Release the memory maps; arrays that are still referenced keep theirs alive."""
        self._maps.clear()


class SegmentPayloads:
    """Payload source of a tapscope run: its segment files."""

    def __init__(self, run: Path) -> None:
        self._run = run
        self._files = MappedFiles()
        self._paths: dict[tuple[int, str], Path] = {}
        self._sizes: dict[tuple[int, str], int] = {}
        self._mapped: dict[tuple[int, str], Array] = {}
        self.has_checksums = False
        """False: payloads are verified with the hashes of the records."""
        self.damaged: list[str] = []
        """Always empty: files are checked when values are read."""

    def array(self, record: Record) -> Array:
        """See :meth:`Payloads.array`."""
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
        """Return the counters of a record with a sketch: [256] float32, read-only.

        Raises RunCorruptError if they are missing.
        """
        assert record.sketch is not None
        entry = record.sketch.entry
        if entry.offset < 0:
            raise RunCorruptError(f"the sketch of {record.key.tensor_name} has the negative offset {entry.offset}")
        path = segment_path(self._run, record.key.rank, entry.file)
        data = self._files.bytes_of(path, entry.offset + entry.nbytes)
        return np.ndarray((COUNTERS,), np.float32, data, entry.offset)

    def file(self, record: Record, end: int) -> Array:
        """See :meth:`Payloads.file`."""
        assert record.entry is not None
        place = record.key.rank, record.entry.file
        data = self._mapped.get(place)
        if data is None or data.nbytes < end:
            data = self._mapped[place] = self._files.bytes_of(self._path(record), end)
        return data

    def tail(self, record: Record) -> None:
        """Return None: comparisons use the hashes of the records instead."""

    def lacks(self, record: Record) -> str:
        """See :meth:`Payloads.lacks`."""
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
        """Return the inconsistency between the entry of ``record`` and its dtype and shape; empty if there is none."""
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
        """See :meth:`Payloads.suspects`."""
        offset, nbytes, size = records.offset, records.nbytes, records.of_kinds(self._size)
        odd = (offset < 0) | (offset > size - nbytes) | (nbytes != records.of_kinds(_num_bytes))
        return np.flatnonzero(odd & records.of_kinds(_has_payload))

    def flaw(self, record: Record) -> None:
        """Return None: segments have no checksums, records have hashes."""

    def _size(self, kind: Kind) -> int:
        """Return the size in bytes of the file of ``kind``; -1 if there is no file."""
        if kind.file is None:
            return -1
        place = kind.rank, kind.file
        if place not in self._sizes:
            path = segment_path(self._run, *place)
            self._sizes[place] = path.stat().st_size if path.is_file() else -1
        return self._sizes[place]

    def missing(self, records: Records) -> list[str]:
        """Return one sentence per segment that is missing or too short for ``records``; calls stat once per file."""
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
        """Close the files, see :meth:`Payloads.close`."""
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
    """Return the payload size in bytes that dtype and shape imply; -1 for an unknown dtype or an impossible size."""
    try:
        num_bytes = prod(kind.shape) * dtypes.itemsize(kind.dtype or "")
    except RunCorruptError:
        return -1
    return num_bytes if num_bytes < MAX_COUNT else -1
