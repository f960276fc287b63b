"""Heartbeat: what a process is doing, in a small file that the watching process maps as well.

The owner writes a few integers, at some nanoseconds each, and never blocks. The watchdog only reads, so it detects a
process that is stopped, deadlocked or no longer reads messages (:mod:`tapscope.engine.distributed.watchdog`).
"""

import mmap
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")

_FIELDS = 4
_BYTES = 8 * _FIELDS
_TICKS, _ACTIVITY, _STEP, _LAYER = range(_FIELDS)


class Activity(IntEnum):
    """The present activity of a process."""

    STARTING = 0
    """Importing, and joining the other ranks, which has its own timeout."""
    LOADING = 1
    """Reading weights; one tick may take minutes."""
    WORKING = 2
    WAITING = 3
    """Waiting for the other ranks in a collective."""
    IDLE = 4
    """Waiting for a message, with no work queued."""
    CLOSING = 5
    """Shutting down; the requesting process has its own timeout."""


class HeartbeatSample(NamedTuple):
    """A heartbeat at one moment; it differs from the previous one as long as the process makes progress."""

    ticks: int
    activity: Activity
    step: int
    """The current step, or the last one; -1 before the first."""
    layer: int
    """The last layer that was started in it; -1 before the first."""

    def __str__(self) -> str:
        if self.activity in (Activity.STARTING, Activity.LOADING):
            return f"while {self.activity.name.lower()}"
        where = "before its first step" if self.step < 0 else f"in step {self.step}"
        where += f", layer {self.layer}" if self.layer >= 0 else ""
        if self.activity is Activity.WAITING:
            return f"{where}, in a collective"
        if self.activity is Activity.IDLE:
            return "with nothing to do" + (f" after step {self.step}" if self.step >= 0 else "")
        return where


class Heartbeat:
    """The heartbeat of one process, for its owner and for its watchdog; without a path it is private."""

    def __init__(self, path: Path | None = None) -> None:
        """``path`` is a file that :meth:`create` made."""
        if path is None:
            self._values = memoryview(bytearray(_BYTES)).cast("q")
            return
        with path.open("r+b") as file:
            self._values = memoryview(mmap.mmap(file.fileno(), _BYTES)).cast("q")

    @classmethod
    def create(cls, path: Path) -> "Heartbeat":
        """Create the file of a process that has not started."""
        path.write_bytes(bytes(_BYTES))
        heartbeat = cls(path)
        heartbeat._values[_STEP] = heartbeat._values[_LAYER] = -1
        return heartbeat

    def beat(self) -> None:
        """Record progress."""
        self._values[_TICKS] += 1

    def set_activity(self, activity: Activity) -> None:
        """Record what the process does from now on."""
        self._values[_ACTIVITY] = activity
        self._values[_TICKS] += 1

    @contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        """Record ``activity`` for the ``with`` block, and ``WORKING`` after it, however it ends."""
        self.set_activity(activity)
        try:
            yield
        finally:
            self.set_activity(Activity.WORKING)

    def start_step(self, number: int) -> None:
        """Record that step ``number`` starts."""
        self._values[_LAYER] = -1
        self._values[_STEP] = number
        self.set_activity(Activity.WORKING)

    def start_layer(self, number: int) -> None:
        """Record that layer ``number`` of the step starts."""
        self._values[_LAYER] = number
        self._values[_TICKS] += 1

    def track(self, items: Iterable[T]) -> Iterator[T]:
        """Yield ``items`` and record progress for each."""
        for item in items:
            self.beat()
            yield item

    def read(self) -> HeartbeatSample:
        """The current sample. It may mix two moments, but always differs from earlier samples if there was progress."""
        ticks, activity, step, layer = self._values.tolist()
        return HeartbeatSample(ticks, Activity(activity), step, layer)


def heartbeat_path(folder: Path, number: int) -> Path:
    """Path of the heartbeat of worker ``number``."""
    return folder / f"heartbeat-{number}"
