"""Heartbeat: the current activity of a process, in a small memory-mapped file shared with its watchdog.

The owner writes a few integers, taking nanoseconds each, and never blocks. The watchdog only reads, so it detects a
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
    """Current activity of a process."""

    STARTING = 0
    """Importing modules and joining the other ranks, which has its own timeout."""
    LOADING = 1
    """Reading weights; a single tick may take minutes."""
    WORKING = 2
    WAITING = 3
    """Waiting for the other ranks in a collective."""
    IDLE = 4
    """Waiting for a message, with no work queued."""
    CLOSING = 5
    """Shutting down; the requesting process has its own timeout."""


class HeartbeatSample(NamedTuple):
    """Snapshot of a heartbeat. Consecutive samples differ as long as the process makes progress."""

    ticks: int
    activity: Activity
    step: int
    """Current or last step; -1 before the first."""
    layer: int
    """Last layer started in the step; -1 before the first."""

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
    """Heartbeat of one process, opened by its owner and its watchdog; private to the process without a path."""

    def __init__(self, path: Path | None = None) -> None:
        """``path``: file created by :meth:`create`."""
        if path is None:
            self._values = memoryview(bytearray(_BYTES)).cast("q")
            return
        with path.open("r+b") as file:
            self._values = memoryview(mmap.mmap(file.fileno(), _BYTES)).cast("q")

    @classmethod
    def create(cls, path: Path) -> "Heartbeat":
        """Create the heartbeat file for a process that has not started yet."""
        path.write_bytes(bytes(_BYTES))
        heartbeat = cls(path)
        heartbeat._values[_STEP] = heartbeat._values[_LAYER] = -1
        return heartbeat

    def beat(self) -> None:
        """Record progress."""
        self._values[_TICKS] += 1

    def set_activity(self, activity: Activity) -> None:
        """Record the activity that starts now."""
        self._values[_ACTIVITY] = activity
        self._values[_TICKS] += 1

    @contextmanager
    def during(self, activity: Activity) -> Iterator[None]:
        """Context manager: record ``activity`` inside, and ``WORKING`` on exit, including exit by an exception."""
        self.set_activity(activity)
        try:
            yield
        finally:
            self.set_activity(Activity.WORKING)

    def start_step(self, number: int) -> None:
        """Record the start of step ``number``."""
        self._values[_LAYER] = -1
        self._values[_STEP] = number
        self.set_activity(Activity.WORKING)

    def start_layer(self, number: int) -> None:
        """Record the start of layer ``number`` in the current step."""
        self._values[_LAYER] = number
        self._values[_TICKS] += 1

    def track(self, items: Iterable[T]) -> Iterator[T]:
        """Yield ``items``, recording progress for each."""
        for item in items:
            self.beat()
            yield item

    def read(self) -> HeartbeatSample:
        """Return the current sample.

        Reads are not atomic, but a sample always differs from earlier ones if there was progress.
        """
        ticks, activity, step, layer = self._values.tolist()
        return HeartbeatSample(ticks, Activity(activity), step, layer)


def heartbeat_path(folder: Path, number: int) -> Path:
    """Return the path of the heartbeat file of worker ``number``."""
    return folder / f"heartbeat-{number}"
