"""LineWriter: the open ``records.jsonl`` of a rank's writer."""

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
"""Space that record lines leave free, so that an event can still report a full disk."""
RESERVED_BYTES = 256 * 1024
"""Space that is reserved at a time."""


class LineWriter:
    """Appends whole lines to a locked file; raises OSError that names the file."""

    def __init__(self, path: Path, disk: Disk, owner: str) -> None:
        """``owner`` names what the file belongs to, for the RunExistsError raised if another process holds it."""
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
        """Bytes in the file."""
        return os.fstat(self._fd).st_size

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._fd < 0

    def append(self, parts: list[bytes], *, spare: bool = False) -> None:
        """Append ``parts`` (whole lines when joined); with ``spare`` the reserved space may be used.

        Raises FileNotFoundError when the file was removed: writes would be lost.
        """
        if self._broken is not None:
            raise self._broken
        check_present(self._fd, self.path)
        if not spare:
            self._reserve(self.size + sum(map(len, parts)) + SPARE_BYTES)
        self._disk.write(self._fd, self.path, parts, None)

    def roll_back(self, size: int) -> None:
        """Truncate to ``size`` bytes; if that fails, nothing is appended any more."""
        try:
            if self.size > size:
                self._disk.truncate(self._fd, self.path, size)
                self._reserved = size
        except OSError as error:
            self.give_up(error)

    def give_up(self, error: OSError) -> None:
        """Stop appending: the file or a segment could not be rolled back."""
        self._broken = error

    def sync(self) -> None:
        """Sync everything appended to disk."""
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
    """The event that reports why a record has no entry."""
    about = json.loads(line)
    reason = f"it shares the bytes of payload {number}, which never arrived"
    return encode_line(event_line("failed", where=about.get("site"), reason=reason, step=about.get("step"), late=True))


def with_entries(lines: list[bytes], numbers: Sequence[int], first: Entry) -> None:
    """Add entries to these lines, of payloads of equal size, one after the other from ``first`` on."""
    file, offset, nbytes = first
    head, tail = b',"entry":["%b",' % file.encode(), b",%d]}" % nbytes
    for place, number in enumerate(numbers):
        lines[number] = b"%b%b%d%b" % (lines[number][:-1], head, offset + place * nbytes, tail)


def with_entry(line: bytes, entry: Entry) -> bytes:
    """A record's line with its entry added."""
    return b'%b,"entry":["%b",%d,%d]}' % (line[:-1], entry.file.encode(), entry.offset, entry.nbytes)
