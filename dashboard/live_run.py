"""Live runs: what has been recorded so far, read by the lines that were appended."""

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
"""Runs that are kept although nobody holds them: those of polling clients."""
MAX_READ = 64 << 20
"""Bytes read of a rank in one reading; more are reported as still to read."""
BLOCK = 1 << 20
"""Bytes parsed at a time."""
SHARED_S = 0.2
"""How old a view of several viewers may be."""
MAX_STEPS = 300
"""Steps that are kept one by one."""
MAX_METRICS = 64
"""Of a step."""
MAX_ANOMALIES = 100
"""Records that are not finite, the latest ones."""


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
    """The totals of one step."""

    ended: bool = False
    records: int = 0
    dropped: int = 0
    nonfinite: int = 0
    metrics: dict[str, float | None] = field(default_factory=dict)


class LiveRun:
    """Reads a growing run; each call of :meth:`read` parses the appended lines alone.

    The recorder publishes the same lines on a ZMQ PUB socket, after it has written them, and drops them for a slow
    subscriber. The file has them as early, keeps them, and works for runs of another host, so it is the only source.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = 0
        self._lock = Lock()
        self._read_at = -math.inf
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
        self._first_anomaly: LiveAnomaly | None = None
        self._unread = 0
        self._rates: deque[tuple[float, int]] = deque(maxlen=10)

    def read(self, max_age_s: float = 0.0) -> LiveView:
        """Parse what is new; ``number`` of the view rises with every change of it.

        A view that is not older than ``max_age_s`` is returned as it is. Several threads may read.
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
        """Whether every rank that was read is there and at least as long: not deleted, replaced or compacted."""
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
                        break  # a line that is being written
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
            if type(line) is _Record:  # nearly all lines, of one step after the other
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
        """A step; of the oldest ones only the sums are kept."""
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
    """The lines one by one, without damaged ones, which are counted where the run is opened."""
    for line in block.splitlines():
        with suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            yield _decoder.decode(line)


class LiveRuns:
    """Live runs, each read once for all its viewers; polling clients continue where the previous request stopped."""

    def __init__(self) -> None:
        self._held: WeakValueDictionary[Path, LiveRun] = WeakValueDictionary()
        self._recent: OrderedDict[Path, LiveRun] = OrderedDict()
        self._lock = Lock()

    def of(self, path: Path) -> LiveRun:
        """The run at ``path``; the latest ones are kept."""
        with self._lock:
            live = self._held.get(path) or LiveRun(path)
            self._held[path] = self._recent[path] = live
            self._recent.move_to_end(path)
            while len(self._recent) > MAX_RECENT:
                self._recent.popitem(last=False)
            return live
