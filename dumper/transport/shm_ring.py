"""ShmRing: shared memory that carries payloads to the recorder on the same host without another copy.

The producer creates a file of mode 0600 in shared memory, with every page allocated beforehand (a full file system is
then an error, never a SIGBUS later), and maps it. The recorder maps it too and unlinks it immediately: nothing is left,
however either side ends. This module does not import torch: the recorder uses :class:`ShmRingView`.
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
"""A smaller ring is not worth its bookkeeping."""
_SHARED_MEMORY = Path("/dev/shm")
_ABANDONED_S = 60.0  # a recorder maps a ring within seconds


class ShmRingError(Exception):
    """There can be no ring, with the reason. Payloads then travel inside messages."""


class ShmRing:
    """The producer's side: allocates and frees slots. Callers must hold a lock."""

    def __init__(self, nbytes: int) -> None:
        """Raises ShmRingError when shared memory is missing or full."""
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
        """Address of its first byte in this process."""
        self._places: deque[int] = deque()  # offsets in use, in order of allocation
        self._freed: set[int] = set()
        self._head = 0

    def reserve(self, nbytes: int) -> int | None:
        """Offset of a free slot, a multiple of ALIGNMENT; None without room."""
        size = (nbytes + ALIGNMENT - 1) & -ALIGNMENT or ALIGNMENT
        start = self._room(size)
        if start is not None:
            self._places.append(start)
            self._head = start + size
        return start

    def _room(self, size: int) -> int | None:
        if not self._places:
            return 0 if size <= self.nbytes else None
        tail, head = self._places[0], self._head
        if head <= tail:  # the free bytes are between them
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
        """Bytes from the oldest slot in use to the newest, including gaps."""
        if not self._places:
            return 0
        span = self._head - self._places[0]
        return span if span > 0 else self.nbytes + span

    def unlink(self) -> None:
        """Remove the name; mappings stay."""
        self.path.unlink(missing_ok=True)


class ShmRingView:
    """The recorder's side."""

    def __init__(self, path: str, nbytes: int) -> None:
        """Map the file and unlink it; raises ShmRingError when it is missing (another host) or not as described."""
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
        """The bytes of one slot; raises ShmRingError for one outside the ring."""
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
    """Remove rings whose producer was killed before a recorder had mapped them."""
    for path in _SHARED_MEMORY.glob("tapscope-*-*"):
        pid = path.name.split("-")[1]
        with contextlib.suppress(OSError):
            about = path.lstat()
            old = time.time() - about.st_mtime > _ABANDONED_S
            if old and pid.isdigit() and about.st_uid == os.getuid() and not is_alive(int(pid)):
                path.unlink()
