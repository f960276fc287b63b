"""Segment: one file of many payloads that becomes a valid safetensors file when it is sealed.

A segment begins with an 8-byte header length and a reserved, blank header; payloads are appended, each at a
64-byte boundary, the gaps covered by ``__pad`` tensors because safetensors allows no holes. Sealing writes
the header into the reserved place. Before that, the record lines say what is where.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tapscope import dtypes

ALIGNMENT = 64
HEADER_BYTES = 128 * 1024
"""Reserved for the header; a segment is full when its header is."""
SEGMENT_BYTES = 256 * 1024 * 1024
"""A segment is full at this size; one larger tensor gets a segment of its own."""


class SegmentWriter:
    """Appends payloads to one new file; raises OSError as the file system does."""

    def __init__(self, path: Path, *, limit: int = SEGMENT_BYTES, header_bytes: int = HEADER_BYTES) -> None:
        self.path = path
        self._limit = limit
        self._reserved = header_bytes - 8
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o644)
        self._header: dict[str, Any] = {}
        self._header_size = 2
        self._end = 0
        os.write(self._fd, self._reserved.to_bytes(8, "little") + b" " * self._reserved)

    def has_room(self, name: str, nbytes: int) -> bool:
        """Whether the payload fits the size limit and its name the header; the first one always does."""
        if not self._header:
            return True
        entry = len(name) * 6 + 256  # worst case: escaped name, shape, offsets and one pad
        return self._end + nbytes <= self._limit and self._header_size + entry <= self._reserved

    def append(self, name: str, dtype: str, shape: Sequence[int], payload: Any) -> tuple[int, int]:
        """Write the payload (any bytes-like); returns (offset in the file, nbytes)."""
        name = self._unused(name)
        view = memoryview(payload).cast("B") if memoryview(payload).nbytes else memoryview(b"")
        pad = -self._end % ALIGNMENT
        begin = self._end + pad
        self._write([b"\0" * pad, view])
        if pad:
            self._describe(f"__pad{begin}", "U8", [pad], self._end, begin)
        self._describe(name, dtypes.to_safetensors(dtype), list(shape), begin, begin + view.nbytes)
        self._end = begin + view.nbytes
        return self._reserved + 8 + begin, view.nbytes

    def seal(self) -> None:
        """Write the header; the file is then valid safetensors. An empty segment is removed."""
        if not self._header:
            os.close(self._fd)
            self.path.unlink()
            return
        header = json.dumps(self._header, separators=(",", ":")).encode()
        os.pwrite(self._fd, header.ljust(self._reserved), 8)
        os.close(self._fd)

    def _unused(self, name: str) -> str:
        if name not in self._header:
            return name
        return next(f"{name}~{n}" for n in range(2, len(self._header) + 3) if f"{name}~{n}" not in self._header)

    def _describe(self, name: str, dtype: str, shape: list[int], begin: int, end: int) -> None:
        entry = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
        self._header[name] = entry
        self._header_size += len(json.dumps({name: entry}, separators=(",", ":"))) + 1

    def _write(self, parts: list[Any]) -> None:
        at = self._reserved + 8 + self._end
        for part in parts:
            view = memoryview(part)
            while view.nbytes:
                done = os.pwrite(self._fd, view, at)
                at += done
                view = view[done:]
