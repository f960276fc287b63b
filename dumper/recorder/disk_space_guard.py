"""DiskSpaceGuard: stop the capture before the disk of the run is full."""

import os
import time
from collections.abc import Callable
from pathlib import Path

from tapscope.core.wire import Message
from tapscope.dumper.recorder.rank_registry import RankRegistry, Send

_EVERY_BYTES = 4 * 1024 * 1024
_EVERY_S = 0.5


class DiskSpaceGuard:
    """Sends ``disk_low`` to every rank that still captures when free disk space falls below ``min_free_bytes``."""

    def __init__(self, ranks: RankRegistry, limit: Callable[[], tuple[Path, int | None]], send: Send) -> None:
        """``limit`` returns the current run and its ``min_free_bytes`` (None: no limit)."""
        self._ranks = ranks
        self._limit = limit
        self._send = send
        self._unchecked_bytes = _EVERY_BYTES  # check on the first batch
        self._last_check = time.monotonic()
        self._last_sent: dict[int, float] = {}  # rank -> time of the last message

    def wrote(self, nbytes: int) -> None:
        """Account for ``nbytes`` written bytes; check the disk every 4 MiB or 0.5 s."""
        self._unchecked_bytes += nbytes
        if self._unchecked_bytes >= _EVERY_BYTES or time.monotonic() - self._last_check > _EVERY_S:
            self.check()

    def check(self) -> None:
        """Check free disk space now, and notify ranks if it is low."""
        self._unchecked_bytes, self._last_check = 0, time.monotonic()
        run, minimum = self._limit()
        if not minimum or (free := free_bytes(run)) is None or free >= minimum:
            return
        for rank in self._ranks.present():
            if rank.stopped is None and self._last_check - self._last_sent.get(rank.rank, 0.0) > _EVERY_S:
                self._last_sent[rank.rank] = self._last_check
                self._send(rank.identity, Message("disk_low", {"free": free}))


def free_bytes(path: Path) -> int | None:
    """Return the bytes available to unprivileged users on the file system of ``path``; None if the query fails."""
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize
