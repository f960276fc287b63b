"""FollowedRun: the run that another process records, read again while a step waits for its values."""

import time
from collections.abc import Callable

from tapscope.run_format.manifest import INDEX
from tapscope.run_format.run import Run
from tapscope.sources import open_run

_POLL_S = 0.005
_MAX_SHARE = 0.5
"""Share of the waiting time that may go into reading a long index."""


class FollowedRun:
    """The newest state of a run, for waits of bounded length.

    A step waits at most ``wait_s`` in all. After a wait in vain none waits until the run grows again: its process may
    have ended without closing it.
    """

    def __init__(self, run: Run, wait_s: float, on_growth: Callable[[Run], None]) -> None:
        """``on_growth`` gets the run as read again."""
        self.run, self.wait_s, self._on_growth = run, wait_s, on_growth
        self._size = self._bytes()
        self._step: int | None = None
        self._left = 0.0
        self._read_s = 0.0
        self._is_stalled = False

    def wait(self, step: int) -> bool:
        """Whether the run has grown; False if it is closed or ``step`` has waited long enough."""
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
        """Of the index, which is written after the values."""
        return sum(path.stat().st_size for path in self.run.path.glob(f"rank-*/{INDEX}"))
