"""Disk: the system calls that write a run, in one place, so that a test can watch their order or make one fail.

Every call raises OSError that names the file.
"""

import ctypes
import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
MAX_PARTS = 1024
"""Buffers one ``pwritev`` takes (IOV_MAX on Linux)."""


class Disk:
    """What a writer asks of the file system."""

    def create(self, path: Path, flags: int) -> int:
        """Open a file for writing, made if need be; returns its descriptor. A symbolic link is an error: what it names
        is none of ours."""
        return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)

    def write(self, fd: int, path: Path, parts: Sequence[Any], offset: int | None) -> None:
        """Write all ``parts`` (bytes-like, one after the other) at ``offset``, or at the end when None."""
        with naming(path):
            for first in range(0, len(parts), MAX_PARTS):
                some = parts[first : first + MAX_PARTS]
                written = os.writev(fd, some) if offset is None else os.pwritev(fd, some, offset)
                total = sum(memoryview(part).nbytes for part in some)
                if written < total:
                    self._finish(fd, some, written, offset)
                offset = None if offset is None else offset + total

    def reserve(self, fd: int, path: Path, size: int) -> None:
        """Make sure that the file can grow to ``size`` bytes, where the file system can; its length stays."""
        if _LIBC.fallocate(fd, _KEEP_SIZE, ctypes.c_longlong(0), ctypes.c_longlong(size)):
            number = ctypes.get_errno()
            if number in (errno.ENOSPC, errno.EDQUOT):
                raise OSError(number, os.strerror(number), str(path))

    def truncate(self, fd: int, path: Path, size: int) -> None:
        """Cut the file off at ``size`` bytes."""
        with naming(path):
            os.ftruncate(fd, size)

    def sync(self, fd: int, path: Path) -> None:
        """Return when the content of the file is on the medium."""
        with naming(path):
            os.fdatasync(fd)

    def sync_path(self, path: Path) -> None:
        """The same for a closed file, or for the names in a directory."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with naming(path):
                os.fsync(fd)
        finally:
            os.close(fd)

    def close(self, fd: int) -> None:
        """Let go of a descriptor."""
        os.close(fd)

    def remove(self, path: Path) -> None:
        """Take a file away."""
        path.unlink()

    def _finish(self, fd: int, parts: Sequence[Any], written: int, offset: int | None) -> None:
        """What a short write left over."""
        skip = written
        for part in parts:
            view = memoryview(part).cast("B") if memoryview(part).nbytes else memoryview(b"")
            begin, skip = min(skip, view.nbytes), max(skip - view.nbytes, 0)
            view = view[begin:]
            while view.nbytes:
                done = os.write(fd, view) if offset is None else os.pwrite(fd, view, offset + written)
                written += done
                view = view[done:]


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError of a descriptor does not say which file; this puts the path in."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
