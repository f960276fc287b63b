"""Incremental reader of a run that is still being recorded."""

import math
import os
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from weakref import WeakValueDictionary

import msgspec
from msgspec import Struct

from tapscope.dashboard.model.live import LiveAnomaly, LivePoint, LiveView, largest
from tapscope.run_format.directory import may_grow
from tapscope.run_format.index import MAX_LINE_BYTES
from tapscope.run_format.manifest import INDEX, rank_dirs

MAX_RECENT = 8
"""Number of runs cached without an active viewer, for clients that poll."""
MAX_READ = 64 << 20
"""Maximum bytes read per rank and call; the rest is reported as unread."""
BLOCK = 1 << 20
"""Bytes parsed at a time."""
SHARED_S = 0.2
"""Maximum age in seconds of a view that several viewers share."""
MAX_STEPS = 300
"""Number of recent steps kept individually; older ones are summed."""
MAX_METRICS = 64
"""Maximum number of metrics per step."""
MAX_ANOMALIES = 100
"""Number of the latest records with non-finite values that are kept."""


class _Stats(Struct, gc=False):
    nan: int = 0
    posinf: int = 0
    neginf: int = 0


class _Record(Struct, tag_field="type", tag="record", gc=False):
    step: int
    site: str = ""
    stats: _Stats | None = None


class _StepLine(Struct, tag_field="type", tag="step", gc=False):
    step: int
    at: str
    dropped: int | None = None


class _Metric(Struct, tag_field="type", tag="metric", gc=False):
    step: int
    name: str
    value: float | None


class _Event(Struct, tag_field="type", tag="event", gc=False):
    kind: str
    num_records: int = 0


class _Site(Struct, tag_field="type", tag="site", gc=False):
    pass


_Line = _Record | _StepLine | _Metric | _Event | _Site
_decoder = msgspec.json.Decoder(_Line)


@dataclass(slots=True)
class _Step:
    """Totals of one step over all ranks."""

    ended: bool = False
    records: int = 0
    dropped: int = 0
    nonfinite: int = 0
    metrics: dict[str, float | None] = field(default_factory=dict)


class LiveRun:
    """Reader of a growing run; each call of :meth:`read` parses only the appended lines.

    The recorder also publishes the lines on a ZMQ PUB socket, after writing them, and drops them for a slow subscriber.
    The file has the lines no later, drops none of them, and works for runs recorded on another host.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = 0
        self._lock = Lock()
        self._read_at = -math.inf
        self._last: LiveView | None = None
        """The latest distinct view, with number 0."""
        self._forget()

    def _forget(self) -> None:
        """Reset all state, because the directory now contains another run."""
        self._offsets: dict[int, int] = {}
        self._files: dict[int, int] = {}
        """Rank -> inode of its index file."""
        self._closed_ranks: set[int] = set()
        self._steps: dict[int, _Step] = {}
        self._older, self._num_older = _Step(), 0
        """Sums over the evicted steps, and the number of evicted steps that had ended."""
        self._anomalies: deque[LiveAnomaly] = deque(maxlen=MAX_ANOMALIES)
        self._first_anomaly: LiveAnomaly | None = None
        self._unread = 0
        self._rates: deque[tuple[float, int]] = deque(maxlen=10)

    def read(self, max_age_s: float = 0.0) -> LiveView:
        """Parse the appended lines and return the current view; its ``number`` increases with every change.

        A view younger than ``max_age_s`` is returned without reading. Safe to call from several threads.
        """
        with self._lock:
            if self._last is None or time.monotonic() - self._read_at >= max_age_s:
                self._read()
                self._read_at = time.monotonic()
            assert self._last is not None
            return replace(self._last, number=self._number)

    def _read(self) -> None:
        files = {rank: folder / INDEX for rank, folder in rank_dirs(self._path).items()}
        if not self._is_continued(files):
            self._forget()
        self._unread = 0
        for rank, file in files.items():
            self._read_rank(rank, file)
        view = self._view()
        if view != self._last:
            self._last, self._number = view, self._number + 1

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
            number=0,
            state=self._state(),
            num_records=total.records,
            num_steps=num_steps,
            last_step=points[-1].step if points else None,
            num_dropped=total.dropped,
            num_nonfinite=total.nonfinite,
            records_per_s=(many - few) / (last - first) if last > first else 0.0,
            bytes_unread=self._unread,
            anomalies=tuple(self._anomalies),
            first_anomaly=self._first_anomaly,
            points=tuple(points),
        )

    def _state(self) -> str:
        ranks = set(self._offsets)
        if ranks and ranks <= self._closed_ranks:
            return "closed"
        return "recording" if may_grow(self._path) else "dead"

    def _is_continued(self, files: Mapping[int, Path]) -> bool:
        """Return whether each rank's file still exists, has the same inode and has not shrunk since the last read.

        False means that the run was deleted, replaced or compacted.
        """
        for rank, offset in self._offsets.items():
            try:
                status = files[rank].stat()
            except (KeyError, OSError):
                return False
            if status.st_size < offset or self._files.setdefault(rank, status.st_ino) != status.st_ino:
                return False
        return True

    def _read_rank(self, rank: int, file: Path) -> None:
        at = self._offsets.get(rank, 0)
        stop = at + MAX_READ
        try:
            with file.open("rb") as lines:
                size = os.fstat(lines.fileno()).st_size
                lines.seek(at)
                while at < stop and (block := lines.read(min(BLOCK, stop - at))):
                    block += b"" if block.endswith(b"\n") else lines.readline(MAX_LINE_BYTES)
                    end = block.rfind(b"\n") + 1
                    if not end:
                        break  # an incomplete line, still being written
                    at += end
                    self._take_block(rank, block[:end])
                    if end < len(block):
                        break
        except OSError:
            return
        finally:
            self._offsets[rank] = at
        self._unread += max(size - at, 0) if at >= stop else 0

    def _take_block(self, rank: int, block: bytes) -> None:
        try:
            lines: Iterable[_Line] = _decoder.decode_lines(block)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            lines = _readable(block)
        step, number = _Step(), -1
        for line in lines:
            if type(line) is _Record:  # nearly all lines; consecutive ones belong to the same step
                if line.step != number:
                    step, number = self._step(line.step), line.step
                step.records += 1
                if (stats := line.stats) is not None and (stats.nan or stats.posinf or stats.neginf):
                    step.nonfinite += 1
                    anomaly = LiveAnomaly(number, rank, line.site)
                    self._anomalies.append(anomaly)
                    if self._first_anomaly is None or number < self._first_anomaly.step:
                        self._first_anomaly = anomaly
            else:
                self._take(rank, line)
                number = -1

    def _take(self, rank: int, line: _Line) -> None:
        if isinstance(line, _StepLine) and line.at in ("end", "late"):
            step = self._step(line.step)
            step.ended |= line.at == "end"
            step.dropped += line.dropped or 0
        elif isinstance(line, _Metric):
            metrics, name = self._step(line.step).metrics, line.name[:64]
            if name in metrics or len(metrics) < MAX_METRICS:
                metrics[name] = largest(metrics[name], line.value) if name in metrics else line.value
        elif isinstance(line, _Event) and line.kind == "close":
            self._closed_ranks.add(rank)
        elif isinstance(line, _Event) and line.kind == "compacted":
            self._older.records += line.num_records

    def _step(self, number: int) -> _Step:
        """Return the totals of a step, creating them if needed; evicts the oldest step beyond ``MAX_STEPS``.

        A step older than all kept ones shares the summed totals.
        """
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


def _readable(block: bytes) -> Iterator[_Line]:
    """Yield the lines that can be decoded; damaged lines are skipped here and counted when the run is opened."""
    for line in block.splitlines():
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            yield _decoder.decode(line)


class LiveRuns:
    """Registry of live runs: viewers of a run share one reader, and polling clients reuse the reader of earlier
    requests."""

    def __init__(self) -> None:
        self._held: WeakValueDictionary[Path, LiveRun] = WeakValueDictionary()
        self._recent: OrderedDict[Path, LiveRun] = OrderedDict()
        self._lock = Lock()

    def of(self, path: Path) -> LiveRun:
        """Return the reader of the run at ``path``; the most recently used ones are kept alive."""
        with self._lock:
            live = self._held.get(path) or LiveRun(path)
            self._held[path] = self._recent[path] = live
            self._recent.move_to_end(path)
            while len(self._recent) > MAX_RECENT:
                self._recent.popitem(last=False)
            return live
