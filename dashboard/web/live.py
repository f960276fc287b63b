"""Live runs: what has been recorded so far, read by the lines that were appended."""

import time
from collections import OrderedDict
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec

from tapscope.run_format.directory import may_grow
from tapscope.run_format.manifest import INDEX, rank_dirs

MAX_POLLED = 8
"""Runs of polling clients that are kept."""
MAX_READ = 8 << 20
"""Bytes read of a rank at a time; more are reported as still to read."""
MAX_POINTS = 300
"""Steps of a series that are kept."""


@dataclass(frozen=True, slots=True)
class LivePoint:
    """Metrics of one step."""

    step: int
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class LiveView:
    """A run while it is recorded."""

    number: int
    """Goes up with every change; the id of the server-sent event."""
    state: str
    """``recording``, ``closed`` or ``dead``: the recorder no longer holds its lock and did not close the run."""
    num_records: int
    num_steps: int
    last_step: int | None
    num_dropped: int
    records_per_s: float
    bytes_unread: int
    anomalies: tuple[str, ...]
    """The latest records that are not finite: site and step."""
    points: tuple[LivePoint, ...]


@dataclass(slots=True)
class _Counts:
    records: int = 0
    dropped: int = 0
    closed_ranks: set[int] = field(default_factory=set)
    steps: set[int] = field(default_factory=set)


class LiveRun:
    """Reads a growing run; each call of :meth:`read` parses the appended lines alone."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offsets: dict[int, int] = {}
        self._counts = _Counts()
        self._points: dict[int, dict[str, float]] = {}
        self._anomalies: list[str] = []
        self._number = 0
        self._last: LiveView | None = None
        """The view of the last change, with the number 0."""
        self._unread = 0
        self._rates: list[tuple[float, int]] = []

    def read(self) -> LiveView:
        """Parse what is new; ``number`` of the view rises with every change of it."""
        self._unread = 0
        for rank, folder in rank_dirs(self._path).items():
            self._read_rank(rank, folder / INDEX)
        now = time.monotonic()
        self._rates = [*self._rates[-9:], (now, self._counts.records)]
        (first, few), (last, many) = self._rates[0], self._rates[-1]
        view = LiveView(
            0,
            self._state(),
            self._counts.records,
            len(self._counts.steps),
            max(self._counts.steps, default=None),
            self._counts.dropped,
            (many - few) / (last - first) if last > first else 0.0,
            self._unread,
            tuple(self._anomalies[-8:]),
            tuple(LivePoint(step, dict(self._points[step])) for step in sorted(self._points)),
        )
        if view != self._last:
            self._last, self._number = view, self._number + 1
        return replace(view, number=self._number)

    def _state(self) -> str:
        ranks = set(self._offsets)
        if ranks and ranks <= self._counts.closed_ranks:
            return "closed"
        return "recording" if may_grow(self._path) else "dead"

    def _read_rank(self, rank: int, file: Path) -> None:
        at = self._offsets.get(rank, 0)
        try:
            size = file.stat().st_size
            if size < at:  # replaced by a shorter one
                at = 0
            with file.open("rb") as lines:
                lines.seek(at)
                block = lines.read(MAX_READ)
        except OSError:
            return
        end = block.rfind(b"\n") + 1
        self._offsets[rank] = at + end
        self._unread += max(size - at - end, 0) if len(block) == MAX_READ else 0
        for line in block[:end].splitlines():
            try:
                self._take(rank, msgspec.json.decode(line))
            except (msgspec.DecodeError, UnicodeDecodeError, TypeError, ValueError):
                continue  # a damaged line is counted where the run is opened

    def _take(self, rank: int, line: Any) -> None:
        if not isinstance(line, dict):
            return
        kind = line.get("type")
        if kind == "record":
            self._counts.records += 1
            stats = line.get("stats")
            if isinstance(stats, dict) and any(stats.get(name) for name in ("nan", "posinf", "neginf")):
                self._anomalies = [*self._anomalies[-7:], f"{line.get('site')} step {line.get('step')} rank {rank}"]
        elif kind == "step" and line.get("at") == "end":
            self._counts.steps.add(int(line["step"]))
            dropped = line.get("dropped")
            self._counts.dropped += dropped if isinstance(dropped, int) else 0
        elif kind == "metric":
            self._points.setdefault(int(line["step"]), {})[str(line["name"])[:64]] = float(line["value"])
            while len(self._points) > MAX_POINTS:
                self._points.pop(min(self._points))
        elif kind == "event" and line.get("kind") == "close":
            self._counts.closed_ranks.add(rank)


class PolledRuns:
    """Live runs of clients that poll: each continues where the previous request stopped."""

    def __init__(self) -> None:
        self._runs: OrderedDict[Path, LiveRun] = OrderedDict()
        self._lock = Lock()

    def read(self, path: Path) -> LiveView:
        """As :meth:`LiveRun.read`; one request at a time."""
        with self._lock:
            live = self._runs.setdefault(path, LiveRun(path))
            self._runs.move_to_end(path)
            while len(self._runs) > MAX_POLLED:
                self._runs.popitem(last=False)
            return live.read()
