"""Floor: the free space below which nothing more is written, watched by the recorder."""

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tapscope.core.wire import Message

if TYPE_CHECKING:
    from tapscope.dumper.recorder.recorder import Recorder

_EVERY_BYTES = 4 * 1024 * 1024
_EVERY_S = 0.5


class Floor:
    """Tells every rank that still captures to stop once the disk of the run has too little room left."""

    def __init__(self, recorder: "Recorder") -> None:
        self._recorder = recorder
        self._unchecked = _EVERY_BYTES  # the first batch is looked at
        self._checked = time.monotonic()
        self._told: dict[int, float] = {}  # rank -> when it was last told

    def wrote(self, nbytes: int) -> None:
        """So many bytes were written: look at the disk now and then."""
        self._unchecked += nbytes
        if self._unchecked >= _EVERY_BYTES or time.monotonic() - self._checked > _EVERY_S:
            self.check()

    def check(self) -> None:
        """Look at the disk."""
        self._unchecked, self._checked = 0, time.monotonic()
        changes = self._recorder.steering.changes
        floor = changes.config.get("min_free_bytes")
        if not floor or (free := free_bytes(changes.run_path)) is None or free >= floor:
            return
        for peer in self._recorder.present():
            if peer.stopped is None and self._checked - self._told.get(peer.rank, 0.0) > _EVERY_S:
                self._told[peer.rank] = self._checked
                self._recorder.send(peer.identity, Message("halt", {"free": free}))


def free_bytes(path: Path) -> int | None:
    """What an ordinary user may still write on the file system of ``path``; None when it cannot be asked."""
    try:
        found = os.statvfs(path)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize
