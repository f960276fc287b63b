"""The system calls that write a run, in one place, so that tests can observe their order or inject failures.

Every call raises an OSError that names the file.
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
"""Maximum number of buffers of one ``pwritev`` (IOV_MAX on Linux)."""


class Disk:
    """File system operations of a writer."""

    def create(self, path: Path, flags: int) -> int:
        """Open a file for writing, creating it if necessary, and return the descriptor.

        A symbolic link raises OSError, because its target is a foreign file.
        """
        return os.open(path, flags | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)

    def write(self, fd: int, path: Path, parts: Sequence[Any], offset: int | None) -> None:
        """Write all ``parts`` (bytes-like, concatenated) at ``offset``; with None, append (``fd`` has O_APPEND)."""
        with naming(path):
            for first in range(0, len(parts), MAX_PARTS):
                some = parts[first : first + MAX_PARTS]
                written = os.writev(fd, some) if offset is None else os.pwritev(fd, some, offset)
                total = sum(memoryview(part).nbytes for part in some)
                if written < total:
                    self._finish(fd, some, written, offset)
                offset = None if offset is None else offset + total

    def reserve(self, fd: int, path: Path, size: int, begin: int = 0) -> None:
        """Reserve disk space for ``size`` bytes if the file system supports it; the file length does not change.

        The first ``begin`` bytes are already reserved or written; skipping them saves tmpfs from visiting their pages.
        """
        if _LIBC.fallocate(fd, _KEEP_SIZE, ctypes.c_longlong(begin), ctypes.c_longlong(size - begin)):
            number = ctypes.get_errno()
            if number in (errno.ENOSPC, errno.EDQUOT):
                raise OSError(number, os.strerror(number), str(path))

    def truncate(self, fd: int, path: Path, size: int) -> None:
        """Truncate the file to ``size`` bytes."""
        with naming(path):
            os.ftruncate(fd, size)

    def sync(self, fd: int, path: Path) -> None:
        """Sync the content of the file to disk."""
        with naming(path):
            os.fdatasync(fd)

    def sync_path(self, path: Path) -> None:
        """Sync a closed file, or the entries of a directory."""
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            with naming(path):
                os.fsync(fd)
        finally:
            os.close(fd)

    def close(self, fd: int) -> None:
        """Close a descriptor."""
        os.close(fd)

    def remove(self, path: Path) -> None:
        """Remove a file."""
        path.unlink()

    def _finish(self, fd: int, parts: Sequence[Any], written: int, offset: int | None) -> None:
        """Complete a short write: write the bytes of ``parts`` after the first ``written`` ones."""
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
    """Context manager: add ``path`` to an OSError of a descriptor operation, which lacks a file name."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise
