"""FollowedRun: follow a run that another process is recording, by rereading it while a step waits for values."""

import time
from collections.abc import Callable

from tapscope.run_format.manifest import INDEX
from tapscope.run_format.run import Run
from tapscope.sources import open_run

_POLL_S = 0.005
_MAX_SHARE = 0.5
"""Maximum share of the waiting time spent on reading a long index."""


class FollowedRun:
    """The latest state of a growing run, with bounded waits for growth.

    A step waits for at most ``wait_s`` seconds in total. After a timeout, later steps do not wait until the run has
    grown again, because its process may have exited without closing it.
    """

    def __init__(self, run: Run, wait_s: float, on_growth: Callable[[Run], None]) -> None:
        """``on_growth`` is called with the reread run whenever it has grown."""
        self.run, self.wait_s, self._on_growth = run, wait_s, on_growth
        self._size = self._bytes()
        self._step: int | None = None
        self._left = 0.0
        self._read_s = 0.0
        self._is_stalled = False

    def wait(self, step: int) -> bool:
        """Wait until the run has grown, and reread it; return False if it is closed or ``step`` has no time left."""
        if step != self._step:
            self._step, self._left = step, self.wait_s
        if self.run.closed:
            return False
        begin = time.monotonic()
        deadline = begin + (0.0 if self._is_stalled else self._left)
        try:
            while (size := self._bytes()) == self._size:
                if time.monotonic() >= deadline:
                    self._is_stalled = True
                    return False
                time.sleep(max(_POLL_S, self._read_s / _MAX_SHARE))
            self._size, self._is_stalled = size, False
            started = time.monotonic()
            self.run = open_run(self.run.path)
            self._on_growth(self.run)
            self._read_s = time.monotonic() - started
            return True
        finally:
            self._left -= time.monotonic() - begin

    def _bytes(self) -> int:
        """Return the total size of the ``records.jsonl`` files, which are written after the values."""
        return sum(path.stat().st_size for path in self.run.path.glob(f"rank-*/{INDEX}"))
