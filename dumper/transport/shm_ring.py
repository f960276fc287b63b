"""ShmRing: a shared-memory ring buffer that passes payloads to a recorder on the same host without another copy.

The producer creates and maps a file of mode 0600 in /dev/shm. All pages are preallocated, so that a full file system is
an error immediately rather than a SIGBUS later. The recorder maps the file too and unlinks it immediately, so that no
file remains if either process is killed. This module does not import torch, because the recorder uses
:class:`ShmRingView`.
"""

import contextlib
import ctypes
import mmap
import os
import time
from collections import deque
from pathlib import Path

from tapscope.dumper.job.processes import is_alive

ALIGNMENT = 64
MIN_BYTES = 1 << 20
"""Minimum size of a ring in bytes; a smaller one is not worth its overhead."""
_SHARED_MEMORY = Path("/dev/shm")
_ABANDONED_S = 60.0  # age after which a ring of a dead producer is removed; a recorder maps a ring within seconds


class ShmRingError(Exception):
    """A ring cannot be created or mapped; payloads are then sent inside messages."""


class ShmRing:
    """Producer side of the ring: allocates and frees slots. Not thread-safe: callers must hold a lock."""

    def __init__(self, nbytes: int) -> None:
        """Create a ring of ``nbytes``, rounded down to whole pages; raises ShmRingError if that fails."""
        self.nbytes = nbytes - nbytes % mmap.PAGESIZE
        if self.nbytes < MIN_BYTES:
            raise ShmRingError(f"{nbytes} bytes are too few for a ring; at least {MIN_BYTES} are needed")
        _sweep()
        self.path = _SHARED_MEMORY / f"tapscope-{os.getpid()}-{os.urandom(8).hex()}"
        try:
            self.memory = _create(self.path, self.nbytes)
        except OSError as error:
            raise ShmRingError(
                f"no {self.nbytes} bytes of shared memory in {_SHARED_MEMORY}: {error.strerror}"
            ) from None
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        """Address of the first byte in this process."""
        self._places: deque[int] = deque()  # offsets in use, oldest first
        self._freed: set[int] = set()
        self._head = 0

    def reserve(self, nbytes: int) -> int | None:
        """Allocate a slot; return its offset, a multiple of :data:`ALIGNMENT`, or None if there is no space."""
        size = (nbytes + ALIGNMENT - 1) & -ALIGNMENT or ALIGNMENT
        start = self._find_space(size)
        if start is not None:
            self._places.append(start)
            self._head = start + size
        return start

    def _find_space(self, size: int) -> int | None:
        if not self._places:
            return 0 if size <= self.nbytes else None
        tail, head = self._places[0], self._head
        if head <= tail:  # the free space is between head and tail
            return head if head + size <= tail else None
        if head + size <= self.nbytes:
            return head
        return 0 if size <= tail else None

    def free(self, offset: int) -> None:
        """Free a slot; slots may be freed in any order."""
        self._freed.add(offset)
        while self._places and self._places[0] in self._freed:
            self._freed.remove(self._places.popleft())

    @property
    def is_idle(self) -> bool:
        """Whether no slot is in use."""
        return not self._places

    @property
    def used(self) -> int:
        """Number of bytes from the oldest to the newest slot in use, including gaps."""
        if not self._places:
            return 0
        span = self._head - self._places[0]
        return span if span > 0 else self.nbytes + span

    def unlink(self) -> None:
        """Remove the file name; existing mappings remain valid."""
        self.path.unlink(missing_ok=True)


class ShmRingView:
    """Recorder side of the ring: a read-only mapping."""

    def __init__(self, path: str, nbytes: int) -> None:
        """Map the file and unlink it.

        Raises ShmRingError if the file is missing (e.g. on another host), or has another size or owner than expected.
        """
        file = Path(path)
        if file.parent != _SHARED_MEMORY or not file.name.startswith("tapscope-"):
            raise ShmRingError(f"{path} is not a tapscope ring")
        try:
            fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if os.fstat(fd).st_size != nbytes or os.fstat(fd).st_uid != os.getuid():
                    raise ShmRingError(f"{path} is not the ring that was described")
                self._memory = mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE, prot=mmap.PROT_READ)
            finally:
                os.close(fd)
            file.unlink()
        except (OSError, ValueError) as error:
            raise ShmRingError(f"{path} cannot be mapped: {error}") from None
        self._view = memoryview(self._memory)

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Return the bytes of one slot; raises ShmRingError for an offset outside the ring."""
        if not 0 <= offset <= offset + nbytes <= len(self._view):
            raise ShmRingError(f"bytes {offset} to {offset + nbytes} are outside the ring of {len(self._view)}")
        return self._view[offset : offset + nbytes]


def _create(path: Path, nbytes: int) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
        return mmap.mmap(fd, nbytes, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(fd)


def _sweep() -> None:
    """Remove rings whose producer was killed before a recorder mapped them."""
    for path in _SHARED_MEMORY.glob("tapscope-*-*"):
        pid = path.name.split("-")[1]
        with contextlib.suppress(OSError):
            about = path.lstat()
            old = time.time() - about.st_mtime > _ABANDONED_S
            if old and pid.isdigit() and about.st_uid == os.getuid() and not is_alive(int(pid)):
                path.unlink()
