"""LineWriter: append to the ``records.jsonl`` of a rank."""

import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path

from tapscope.core.errors import RunExistsError
from tapscope.run_format.io_syscalls import Disk
from tapscope.run_format.ledger import encode_line, event_line
from tapscope.run_format.record import Entry
from tapscope.run_format.segment import check_present

SPARE_BYTES = 16 * 1024
"""Reserved bytes that record lines may not use, so that an event line can still report a full disk."""
RESERVED_BYTES = 256 * 1024
"""Number of bytes reserved at a time."""


class LineWriter:
    """Appends complete lines to a locked file. Methods raise an OSError that names the file."""

    def __init__(self, path: Path, disk: Disk, owner: str) -> None:
        """Open and lock ``path``, creating it if necessary.

        Raises RunExistsError if another process holds the lock; its message names ``owner``, e.g. "rank 0 of RUN".
        """
        self.path = path
        self._disk = disk
        self._fd = disk.create(path, os.O_RDWR | os.O_APPEND)
        self._broken: OSError | None = None
        self._reserved = 0
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._reserve(self.size + SPARE_BYTES)
        except OSError as error:
            self.close()
            if isinstance(error, BlockingIOError):
                raise RunExistsError(f"{owner} already has a writer") from None
            raise

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return os.fstat(self._fd).st_size

    @property
    def closed(self) -> bool:
        """Whether the file was closed."""
        return self._fd < 0

    def append(self, parts: list[bytes], *, spare: bool = False) -> None:
        """Append ``parts``, which concatenate to complete lines; ``spare`` permits use of the :data:`SPARE_BYTES`.

        Raises FileNotFoundError if the file was removed, because the data would be lost.
        """
        if self._broken is not None:
            raise self._broken
        check_present(self._fd, self.path)
        if not spare:
            self._reserve(self.size + sum(map(len, parts)) + SPARE_BYTES)
        self._disk.write(self._fd, self.path, parts, None)

    def roll_back(self, size: int) -> None:
        """Truncate the file to ``size`` bytes; if that fails, later appends raise the error."""
        try:
            if self.size > size:
                self._disk.truncate(self._fd, self.path, size)
                self._reserved = size
        except OSError as error:
            self.give_up(error)

    def give_up(self, error: OSError) -> None:
        """Make later appends raise ``error``, because the file or a segment could not be rolled back."""
        self._broken = error

    def sync(self) -> None:
        """Sync all appended data to disk."""
        self._disk.sync(self._fd, self.path)

    def close(self) -> None:
        """Close the file and release its lock."""
        if self._fd >= 0:
            try:
                if self._reserved:
                    os.ftruncate(self._fd, self.size)  # releases the reserved space
            finally:
                self._disk.close(self._fd)
                self._fd = -1

    def _reserve(self, size: int) -> None:
        if size > self._reserved:
            self._disk.reserve(self._fd, self.path, size + RESERVED_BYTES, self._reserved)
            self._reserved = size + RESERVED_BYTES


def without_bytes(line: bytes, number: int) -> bytes:
    """Return the ``failed`` event for a record without entry: it shares payload ``number``, which never arrived."""
    about = json.loads(line)
    reason = f"it shares the bytes of payload {number}, which never arrived"
    return encode_line(event_line("failed", where=about.get("site"), reason=reason, step=about.get("step"), late=True))


def with_entries(lines: list[bytes], numbers: Sequence[int], first: Entry) -> None:
    """Add entries to ``lines`` at indices ``numbers``: payloads of equal size, stored back to back from ``first``."""
    file, offset, nbytes = first
    head, tail = b',"entry":["%b",' % file.encode(), b",%d]}" % nbytes
    for place, number in enumerate(numbers):
        lines[number] = b"%b%b%d%b" % (lines[number][:-1], head, offset + place * nbytes, tail)


def with_entry(line: bytes, entry: Entry) -> bytes:
    """Return a record line with ``entry`` added as its last field."""
    return b'%b,"entry":["%b",%d,%d]}' % (line[:-1], entry.file.encode(), entry.offset, entry.nbytes)
