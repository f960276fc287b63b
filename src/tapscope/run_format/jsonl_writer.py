"""Lines: the one open ``records.jsonl`` of a rank's writer."""

import fcntl
import json
import os
from pathlib import Path

from tapscope.core.errors import RunExistsError
from tapscope.run_format.io_syscalls import Disk
from tapscope.run_format.ledger import encode_line, event_line
from tapscope.run_format.record import Entry
from tapscope.run_format.segment import check_present

SPARE = 16 * 1024
"""Room that record lines leave free, so that on a full disk an event can still say why there are no more."""
AHEAD = 256 * 1024
"""Room that is reserved at a time."""


class LineWriter:
    """Appends whole lines to a file that nobody else appends to; raises OSError, naming it, as the file system does."""

    def __init__(self, path: Path, disk: Disk, owner: str) -> None:
        """``owner`` is what the file belongs to; RunExistsError names it when somebody else holds the file."""
        self.path = path
        self._disk = disk
        self._fd = disk.create(path, os.O_RDWR | os.O_APPEND)
        self._broken: OSError | None = None
        self._reserved = 0
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._reserve(self.size + SPARE)
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
        """Write ``parts`` (whole lines when put together) at the end; with ``spare`` what was set aside may be used.

        Raises FileNotFoundError when the file was removed: what is written would go nowhere.
        """
        if self._broken is not None:
            raise self._broken
        check_present(self._fd, self.path)
        if not spare:
            self._reserve(self.size + sum(map(len, parts)) + SPARE)
        self._disk.write(self._fd, self.path, parts, None)

    def go_back(self, size: int) -> None:
        """Cut off what came after the first ``size`` bytes; where that fails nothing is ever appended again."""
        try:
            if self.size > size:
                self._disk.truncate(self._fd, self.path, size)
                self._reserved = 0
        except OSError as error:
            self.give_up(error)

    def give_up(self, error: OSError) -> None:
        """Append nothing any more: the file or a segment could not be brought back to where it was."""
        self._broken = error

    def sync(self) -> None:
        """Return when everything appended is on the medium."""
        self._disk.sync(self._fd, self.path)

    def close(self) -> None:
        """Let go of the file and its lock."""
        if self._fd >= 0:
            try:
                if self._reserved:
                    os.ftruncate(self._fd, self.size)  # gives back what was reserved
            finally:
                self._disk.close(self._fd)
                self._fd = -1

    def _reserve(self, size: int) -> None:
        if size > self._reserved:
            self._disk.reserve(self._fd, self.path, size + AHEAD)
            self._reserved = size + AHEAD


def without_bytes(line: bytes, number: int) -> bytes:
    """The event that says why a record has no entry."""
    about = json.loads(line)
    reason = f"it shares the bytes of payload {number}, which never came"
    return encode_line(event_line("failed", where=about.get("site"), reason=reason, step=about.get("step"), late=True))


def with_entry(line: bytes, entry: Entry) -> bytes:
    """A record's line with its entry put in."""
    return b'%b,"entry":["%b",%d,%d]}' % (line[:-1], entry.file.encode(), entry.offset, entry.nbytes)
