"""Writing a run: what the recorder does with lines and payloads, one writer per rank."""

import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tapscope.errors import RunExistsError
from tapscope.ledger import encode_line, event_line
from tapscope.record import Entry
from tapscope.run import FORMAT, INDEX, MANIFEST, VERSION, rank_dir
from tapscope.segment import SEGMENT_BYTES, SegmentWriter

RECORDER_FILE = "recorder.json"
"""Where a live recorder says how to reach it."""
RECORDER_LOG = "recorder.log"
"""What a recorder had to say on stderr."""


def create_run(path: Path, manifest: dict[str, Any]) -> None:
    """Write ``run.json`` (atomically) into a directory that has none.

    ``manifest`` may hold framework, model, dtype, mesh, world_size, command, seeds, config.
    """
    path.mkdir(parents=True, exist_ok=True)
    content = {"format": FORMAT, "version": VERSION, "created": _now(), **manifest}
    temporary = path / f".{MANIFEST}.{os.getpid()}"
    temporary.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n")
    temporary.replace(path / MANIFEST)


def remove_empty_run(path: Path) -> None:
    """Take back a :func:`create_run` that nobody has written into."""
    (path / MANIFEST).unlink(missing_ok=True)
    path.rmdir()


def clear_run(path: Path, *, force: bool) -> None:
    """Make sure no finished run lies at ``path``.

    Without ``force`` a taken path raises RunExistsError; with it an old run is removed, but only a directory
    that is provably a tapscope run and nothing else.
    """
    if not check_free(path, force=force):
        return
    for entry in path.iterdir():
        if entry.is_dir() and entry.name.startswith("rank-"):
            shutil.rmtree(entry)
        elif entry.name in (MANIFEST, RECORDER_FILE, RECORDER_LOG):
            entry.unlink()


def check_free(path: Path, *, force: bool) -> bool:
    """Whether an old run lies there that may be replaced; raises like :func:`clear_run` and changes nothing."""
    if path.is_file():
        raise RunExistsError(f"{path} is a file; choose another directory for the run")
    left_over = (RECORDER_FILE, RECORDER_LOG)  # of a recorder that never got as far as a run
    entries = path.iterdir() if path.is_dir() else ()
    taken = any(not entry.name.startswith(".") and entry.name not in left_over for entry in entries)
    if not taken:
        return False
    is_run = (path / MANIFEST).is_file() and FORMAT in (path / MANIFEST).read_text(errors="replace")
    if not is_run:
        raise RunExistsError(f"{path} holds files that are no tapscope run; choose another directory")
    if not force:
        hint = "choose another path or replace it (--force, in Python force=True)"
        raise RunExistsError(f"{path} already holds a run; {hint}")
    return True


class RankWriter:
    """The one writer of a rank in a run; a record's line is written after its bytes, never before."""

    def __init__(self, run: Path, rank: int, *, segment_bytes: int = SEGMENT_BYTES) -> None:
        """Raises RunExistsError when the rank already has a writer or lines."""
        self.rank = rank
        self._dir = rank_dir(run, rank)
        self._dir.mkdir(parents=True, exist_ok=True)
        self._segment_bytes = segment_bytes
        self._segment: SegmentWriter | None = None
        self._num_segments = 0
        self._entries: dict[int, Entry] = {}
        self._sharing = -1
        self.bytes_written = 0
        self.lines_written = 0
        self._fd = os.open(self._dir / INDEX, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._fd)
            raise RunExistsError(f"rank {rank} of {run} already has a writer") from None
        if os.fstat(self._fd).st_size:
            os.close(self._fd)
            raise RunExistsError(f"rank {rank} of {run} has already been written")

    def lines(self, blob: bytes) -> None:
        """Append whole lines, each ended by a newline."""
        self._write(blob)
        self.lines_written += blob.count(b"\n")

    def line(self, content: dict[str, Any]) -> None:
        """Append one line."""
        self.lines(encode_line(content) + b"\n")

    def record(self, line: bytes, name: str, dtype: str, shape: Sequence[int], payload: Any) -> None:
        """Append one payload and its record's line."""
        self.batch([line], [(0, -1, name, dtype, shape, payload)])

    def batch(
        self,
        lines: list[bytes],
        payloads: Iterable[tuple[int, int, str, str, Sequence[int], Any]],
        shared: Iterable[tuple[int, int]] = (),
        sharing: int = -1,
    ) -> list[bytes]:
        """Append payloads, then all lines (without newlines); returns the lines as written.

        A payload is (index of its line, number, tensor name, dtype, shape, bytes); its line gets the entry put in.
        A shared one is (index of its line, number of a payload with the same bytes, written under the same
        ``sharing``); its line gets that entry.
        """
        if sharing != self._sharing:
            self._sharing = sharing
            self._entries.clear()
        for index, number, name, dtype, shape, payload in payloads:
            entry = self._entries[number] = self._payload(name, dtype, shape, payload)
            lines[index] = _with_entry(lines[index], entry)
        for index, number in shared:
            lines[index] = _with_entry(lines[index], self._entries[number])
        if lines:
            self.lines(b"\n".join(lines) + b"\n")
        return lines

    def _payload(self, name: str, dtype: str, shape: Sequence[int], payload: Any) -> Entry:
        if self._segment is not None and not self._segment.has_room(name, memoryview(payload).nbytes):
            self._segment.seal()
            self._segment = None
        if self._segment is None:
            path = self._dir / f"seg-{self._num_segments:06d}.safetensors"
            self._segment = SegmentWriter(path, limit=self._segment_bytes)
            self._num_segments += 1
        offset, nbytes = self._segment.append(name, dtype, shape, payload)
        self.bytes_written += nbytes
        return Entry(self._segment.path.name, offset, nbytes)

    def event(self, kind: str, **fields: Any) -> None:
        """Append an ``event`` line."""
        self.line(event_line(kind, **fields))

    def close(self) -> None:
        """Seal the open segment and let go of the rank."""
        if self._segment is not None:
            self._segment.seal()
            self._segment = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, blob: bytes) -> None:
        view = memoryview(blob)
        while view.nbytes:
            view = view[os.write(self._fd, view) :]


def _with_entry(line: bytes, entry: Entry) -> bytes:
    return line[:-1] + b',"entry":' + json.dumps(list(entry), separators=(",", ":")).encode() + b"}"


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
