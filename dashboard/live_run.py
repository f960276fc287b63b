"""Live runs: what has been recorded so far, read by the lines that were appended."""

import os
import time
from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

import msgspec

from tapscope.dashboard.model.live import LiveAnomaly, LivePoint, LiveView, largest
from tapscope.run_format.directory import may_grow
from tapscope.run_format.manifest import INDEX, rank_dirs

MAX_POLLED = 8
"""Runs of polling clients that are kept."""
MAX_READ = 8 << 20
"""Bytes read of a rank at a time; more are reported as still to read."""
MAX_STEPS = 300
"""Steps that are kept one by one."""
MAX_METRICS = 64
"""Of a step."""
MAX_ANOMALIES = 100
"""Records that are not finite, the latest ones."""


@dataclass(slots=True)
class _Step:
    """What the lines of one step add up to."""

    ended: bool = False
    records: int = 0
    dropped: int = 0
    nonfinite: int = 0
    metrics: dict[str, float | None] = field(default_factory=dict)


class LiveRun:
    """Reads a growing run; each call of :meth:`read` parses the appended lines alone."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = 0
        self._last: LiveView | None = None
        """The view of the last change, with the number 0."""
        self._forget()

    def _forget(self) -> None:
        """Begin again: another run is in the directory."""
        self._offsets: dict[int, int] = {}
        self._files: dict[int, int] = {}
        """Inode of the lines of each rank."""
        self._closed_ranks: set[int] = set()
        self._steps: dict[int, _Step] = {}
        self._older, self._num_older = _Step(), 0
        """Sums of the steps that are no longer kept, and how many of them had ended."""
        self._anomalies: deque[LiveAnomaly] = deque(maxlen=MAX_ANOMALIES)
        self._unread = 0
        self._rates: deque[tuple[float, int]] = deque(maxlen=10)

    def read(self) -> LiveView:
        """Parse what is new; ``number`` of the view rises with every change of it."""
        files = {rank: folder / INDEX for rank, folder in rank_dirs(self._path).items()}
        if not self._is_continued(files):
            self._forget()
        self._unread = 0
        for rank, file in files.items():
            self._read_rank(rank, file)
        view = self._view()
        if view != self._last:
            self._last, self._number = view, self._number + 1
        return replace(view, number=self._number)

    def _view(self) -> LiveView:
        points = []
        total, num_steps = replace(self._older), self._num_older
        for number in sorted(self._steps):
            step = self._steps[number]
            total.records += step.records
            total.dropped += step.dropped
            total.nonfinite += step.nonfinite
            if step.ended:
                num_steps += 1
                totals = total.records, total.dropped, total.nonfinite
                points.append(LivePoint(number, num_steps, *totals, dict(step.metrics)))
        self._rates.append((time.monotonic(), total.records))
        (first, few), (last, many) = self._rates[0], self._rates[-1]
        return LiveView(
            0,
            self._state(),
            total.records,
            num_steps,
            points[-1].step if points else None,
            total.dropped,
            total.nonfinite,
            (many - few) / (last - first) if last > first else 0.0,
            self._unread,
            tuple(self._anomalies),
            tuple(points),
        )

    def _state(self) -> str:
        ranks = set(self._offsets)
        if ranks and ranks <= self._closed_ranks:
            return "closed"
        return "recording" if may_grow(self._path) else "dead"

    def _is_continued(self, files: Mapping[int, Path]) -> bool:
        """Whether every rank that was read is there and at least as long: not deleted, replaced or compacted."""
        for rank, offset in self._offsets.items():
            try:
                found = files[rank].stat()
            except (KeyError, OSError):
                return False
            if found.st_size < offset or self._files.setdefault(rank, found.st_ino) != found.st_ino:
                return False
        return True

    def _read_rank(self, rank: int, file: Path) -> None:
        at = self._offsets.get(rank, 0)
        try:
            with file.open("rb") as lines:
                size = os.fstat(lines.fileno()).st_size
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
            step = self._step(line)
            step.records += 1
            stats = line.get("stats")
            if isinstance(stats, dict) and any(stats.get(name) for name in ("nan", "posinf", "neginf")):
                step.nonfinite += 1
                number = int(line["step"])
                self._anomalies.append(LiveAnomaly(number, f"{line.get('site')} step {number} rank {rank}"))
        elif kind == "step" and line.get("at") in ("end", "late"):
            step = self._step(line)
            step.ended |= line["at"] == "end"
            dropped = line.get("dropped")
            step.dropped += dropped if isinstance(dropped, int) else 0
        elif kind == "metric":
            metrics, name = self._step(line).metrics, str(line["name"])[:64]
            value = None if line["value"] is None else float(line["value"])
            if name in metrics or len(metrics) < MAX_METRICS:
                metrics[name] = largest(metrics[name], value) if name in metrics else value
        elif kind == "event" and line.get("kind") == "close":
            self._closed_ranks.add(rank)
        elif kind == "event" and line.get("kind") == "compacted":
            self._older.records += int(line["num_records"])

    def _step(self, line: dict[str, Any]) -> _Step:
        """The step of a line; of the oldest ones only the sums are kept."""
        number = int(line["step"])
        if number in self._steps:
            return self._steps[number]
        if len(self._steps) >= MAX_STEPS:
            if number < min(self._steps):
                return self._older
            old = self._steps.pop(min(self._steps))
            self._num_older += old.ended
            self._older.records += old.records
            self._older.dropped += old.dropped
            self._older.nonfinite += old.nonfinite
        return self._steps.setdefault(number, _Step())


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
