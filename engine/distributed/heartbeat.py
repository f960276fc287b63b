"""Pulse: what a process does, in a small file that the process watching it maps too.

Its owner writes a few numbers, some nanoseconds each, and never waits; who watches needs no answer, so a process that
is stopped, deadlocked or deaf is seen like any other (watch.py).
"""

import mmap
from collections.abc import Iterable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, TypeVar

T = TypeVar("T")

_FIELDS = 4
_BYTES = 8 * _FIELDS
_COUNT, _DOING, _STEP, _LAYER = range(_FIELDS)


class Doing(IntEnum):
    """What a process is at."""

    STARTING = 0
    """Importing, and meeting the other ranks, which has a limit of its own."""
    LOADING = 1
    """Reading weights: it may take minutes from one sign of life to the next."""
    WORKING = 2
    WAITING = 3
    """In a collective, for the other ranks."""
    ASLEEP = 4
    """Nothing to do: it waits for a message."""
    CLOSING = 5
    """Told to end; who told it waits with a limit of its own."""


class Beat(NamedTuple):
    """What a pulse said at one moment; a process that moves changes it."""

    num_beats: int
    doing: Doing
    step: int
    """The step under way, or the last one; -1 before the first."""
    layer: int
    """The last layer begun in it; -1 before the first."""

    def __str__(self) -> str:
        if self.doing in (Doing.STARTING, Doing.LOADING):
            return f"while {self.doing.name.lower()}"
        where = "before its first step" if self.step < 0 else f"in step {self.step}"
        where += f", layer {self.layer}" if self.layer >= 0 else ""
        if self.doing is Doing.WAITING:
            return f"{where}, in a collective"
        if self.doing is Doing.ASLEEP:
            return "with nothing to do" + (f" after step {self.step}" if self.step >= 0 else "")
        return where


class Pulse:
    """One process's, from either side; without a path nobody sees it."""

    def __init__(self, path: Path | None = None) -> None:
        """``path`` is a file that :meth:`create` made."""
        if path is None:
            self._values = memoryview(bytearray(_BYTES)).cast("q")
            return
        with path.open("r+b") as file:
            self._values = memoryview(mmap.mmap(file.fileno(), _BYTES)).cast("q")

    @classmethod
    def create(cls, path: Path) -> "Pulse":
        """A new file, of a process that has not begun."""
        path.write_bytes(bytes(_BYTES))
        pulse = cls(path)
        pulse._values[_STEP] = pulse._values[_LAYER] = -1
        return pulse

    def beat(self) -> None:
        """A sign of life."""
        self._values[_COUNT] += 1

    def now(self, doing: Doing) -> None:
        """From now on the process is at ``doing``."""
        self._values[_DOING] = doing
        self._values[_COUNT] += 1

    def step(self, number: int) -> None:
        """Step ``number`` begins."""
        self._values[_LAYER] = -1
        self._values[_STEP] = number
        self.now(Doing.WORKING)

    def layer(self, number: int) -> None:
        """Layer ``number`` of the step begins."""
        self._values[_LAYER] = number
        self._values[_COUNT] += 1

    def over(self, items: Iterable[T]) -> Iterator[T]:
        """``items``, with a sign of life for each."""
        for item in items:
            self.beat()
            yield item

    def read(self) -> Beat:
        """What it says now; may be of two moments, which changes nothing about whether it changes."""
        num_beats, doing, step, layer = self._values.tolist()
        return Beat(num_beats, Doing(doing), step, layer)


def pulse_in(folder: Path, number: int) -> Path:
    """Where the pulse of worker ``number`` lies."""
    return folder / f"pulse-{number}"
