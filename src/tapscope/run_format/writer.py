"""RankWriter: write the lines and payloads of one rank."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tapscope.core.errors import RunExistsError
from tapscope.run_format import index_limits
from tapscope.run_format.io_syscalls import Disk
from tapscope.run_format.jsonl_writer import LineWriter, with_entries, with_entry, without_bytes
from tapscope.run_format.ledger import encode_line, event_line
from tapscope.run_format.manifest import INDEX, MANIFEST, rank_dir
from tapscope.run_format.record import LINE_START, Entry
from tapscope.run_format.segment import HEADER_BYTES, MAX_HEADER_BYTES, SEGMENT_BYTES, Mark, SegmentWriter

Fsync = Literal["never", "close", "segment", "batch"]
"""When written data is synced to disk; payloads are always synced before the lines that reference them:

``never``    when the kernel decides; a power failure may leave lines without their payload (``verify`` reports them)
``close``    everything when the rank closes
``segment``  when a segment is full, and when the rank closes
``batch``    before :meth:`RankWriter.batch` returns: acknowledged data survives a power failure
"""

Payload = tuple[int, int, str, str, Sequence[int], Any]
"""(index of its line in the batch, payload number, tensor name, dtype, shape, bytes)"""


class PackedPayloads(NamedTuple):
    """Payloads of equal dtype and shape, contiguous in memory."""

    lines: Sequence[int]
    """Index of the line of each payload in the batch."""
    names: Sequence[str]
    """Tensor name of each payload."""
    dtype: str
    shape: Sequence[int]
    data: Any
    """Bytes of all payloads, back to back."""
    shared: Sequence[tuple[int, int]] = ()
    """(index of a further line, index of the payload in this object that it shares)"""


class _Mark(NamedTuple):
    """State before a batch, restored if the batch fails."""

    index_size: int
    num_segments: int
    segment: SegmentWriter | None
    inside: Mark | None


class RankWriter:
    """The exclusive writer of one rank of a run; the line of a record is written after its payload.

    A batch is atomic: if it fails (disk full, directory removed), the writer rolls it back and raises an OSError that
    names the file. The writer remains usable.
    """

    def __init__(
        self,
        run: Path,
        rank: int,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        fsync: Fsync = "never",
        resume: bool = False,
        disk: Disk | None = None,
    ) -> None:
        """Open the rank for writing, creating its directory.

        ``resume`` repairs the output of a killed writer and continues after it. Raises RunExistsError if the rank
        already has a writer, or has lines and ``resume`` is not set.
        """
        self.rank = rank
        self._disk = disk or Disk()
        self._dir = rank_dir(run, rank)
        if self._dir.is_symlink():  # writing would change files of another directory
            raise RunExistsError(f"{self._dir} is a symbolic link; remove it or choose another directory")
        self._dir.mkdir(parents=True, exist_ok=True)
        self._segment_bytes = segment_bytes
        self._header_bytes = HEADER_BYTES
        self._fsync = fsync
        self._segment: SegmentWriter | None = None
        self._full: list[SegmentWriter] = []  # sealed once the lines of their last payloads are written
        self._num_segments = 0
        self._entries: dict[int, Entry] = {}
        self._sharing = -1
        self._unsealed: OSError | None = None  # error of sealing a full segment; the next batch raises it
        self.bytes_written = 0
        self.lines_written = 0
        self.records_written = 0
        self._lines = LineWriter(self._dir / INDEX, self._disk, f"rank {rank} of {run}")
        try:
            self._take_over(run, resume)
            if fsync != "never":
                self._sync_names(run)
        except BaseException:
            self._lines.close()
            raise

    def lines(self, blob: bytes) -> None:
        """Append complete lines, each with its newline."""
        mark = self._mark()
        try:
            self._append([blob], spare=True)
        except BaseException:
            self._roll_back(mark)
            raise
        self.lines_written += blob.count(b"\n")

    def line(self, content: dict[str, Any]) -> None:
        """Encode and append one line."""
        self.lines(encode_line(content) + b"\n")

    def record(self, line: bytes, name: str, dtype: str, shape: Sequence[int], payload: Any) -> None:
        """Append one payload and the line of its record."""
        self.batch([line], [(0, -1, name, dtype, shape, payload)])

    def batch(
        self,
        lines: list[bytes],
        payloads: Iterable[Payload],
        shared: Iterable[tuple[int, int]] = (),
        sharing: int = -1,
        packed: Iterable[PackedPayloads] = (),
    ) -> list[bytes]:
        """Append payloads, then all ``lines`` (without newlines); return the lines as written.

        The line of each payload gets an entry. An item of ``shared`` is (index of a line, number of an earlier payload
        with equal bytes, written with the same ``sharing`` id): the line gets the entry of that payload, or is
        followed by a ``failed`` event if the payload never arrived. ``packed`` payloads cannot be shared by later
        batches. Raises an OSError that names the file, or RecorderError for a payload whose size does not match its
        dtype and shape; in both cases nothing of the batch is written.
        """
        if self._unsealed is not None:
            error, self._unsealed = self._unsealed, None
            raise error
        mark = self._mark()
        entries: dict[int, Entry] = {} if sharing != self._sharing else self._entries
        new: dict[int, Entry] = {}
        written = list(lines)
        try:
            for index, number, name, dtype, shape, payload in payloads:
                new[number] = entry = self._place(name, dtype, shape, payload)
                written[index] = with_entry(lines[index], entry)
            in_packed = sum([self._place_packed(each, written) for each in packed])
            for index, number in shared:
                if (known := new.get(number) or entries.get(number)) is not None:
                    written[index] = with_entry(lines[index], known)
                else:
                    written.append(without_bytes(lines[index], number))
            self._flush()
            if written:
                self._append([b"\n".join(written), b"\n"])
        except BaseException:
            self._roll_back(mark)
            raise
        self._sharing, self._entries = sharing, entries
        entries.update(new)
        self.lines_written += len(written)
        self.records_written += sum([line.startswith(LINE_START) for line in written])
        self.bytes_written += sum(entry.nbytes for entry in new.values()) + in_packed
        try:
            self._seal_full()
        except OSError as error:  # this batch is complete and readable, so the next batch raises the error
            self._unsealed = error
        return written

    def event(self, kind: str, **fields: Any) -> None:
        """Append an ``event`` line."""
        self.line(event_line(kind, **fields))

    def close(self) -> None:
        """Seal the open segment, sync as configured, and release the rank; raises OSError, but releases it anyway."""
        if self._lines.closed:
            return
        try:
            if self._segment is not None:
                self._full.append(self._segment)
                self._segment = None
            self._seal_full()
            if self._fsync == "close":
                for path in sorted(self._dir.glob("seg-*.safetensors")):
                    self._disk.sync_path(path)
                self._disk.sync_path(self._dir)
            if self._fsync != "never":
                self._lines.sync()
        finally:
            self._lines.close()

    def index(self) -> None:
        """Write the record index of a closed rank if it has many lines; takes 5 s and 230 MB per million records.

        For more than :data:`~.index_limits.MAX_AT_CLOSE` lines, the first reader writes the index instead.
        """
        if index_limits.MIN_RECORDS <= self.lines_written <= index_limits.MAX_AT_CLOSE:
            from tapscope.run_format.index import read_index

            read_index(self._dir, self.rank)

    def _take_over(self, run: Path, resume: bool) -> None:
        if not self._lines.size:
            return
        if not resume:
            raise RunExistsError(f"rank {self.rank} of {run} has already been written")
        from tapscope.run_format.repair import repair_rank

        repair_rank(self._dir)
        numbers = [int(path.stem.removeprefix("seg-")) for path in self._dir.glob("seg-*.safetensors")]
        self._num_segments = max(numbers, default=-1) + 1

    def _place(self, name: str, dtype: str, shape: Sequence[int], payload: Any) -> Entry:
        offset = None if self._segment is None else self._segment.place(name, dtype, shape, payload)
        if self._segment is None or offset is None:
            self._open_segment()
            assert self._segment is not None
            offset = self._segment.place(name, dtype, shape, payload)
            assert offset is not None
        return Entry(self._segment.name, offset, memoryview(payload).nbytes)

    def _place_packed(self, packed: PackedPayloads, lines: list[bytes]) -> int:
        """Place packed payloads and add their entries to ``lines``; return their total size in bytes."""
        data = memoryview(packed.data).cast("B")
        nbytes, segment = data.nbytes // max(len(packed.lines), 1), self._segment
        offset = None if segment is None else segment.place_packed(packed.names, packed.dtype, packed.shape, data)
        if segment is not None and offset is not None:
            first = Entry(segment.name, offset, nbytes)
            with_entries(lines, packed.lines, first)
            entries = {n: first._replace(offset=offset + n * nbytes) for _, n in packed.shared}
        else:
            places = range(0, data.nbytes, nbytes or 1)
            entries = {
                n: self._place(name, packed.dtype, packed.shape, data[place : place + nbytes])
                for n, (name, place) in enumerate(zip(packed.names, places, strict=True))
            }
            for n, line in enumerate(packed.lines):
                lines[line] = with_entry(lines[line], entries[n])
        for line, n in packed.shared:
            lines[line] = with_entry(lines[line], entries[n])
        return data.nbytes

    def _open_segment(self) -> None:
        if self._segment is not None:
            if self._segment.full_of_names:
                self._header_bytes = min(self._header_bytes * 2, MAX_HEADER_BYTES)
            self._full.append(self._segment)
            self._segment = None
        path = self._dir / f"seg-{self._num_segments:06d}.safetensors"
        self._segment = SegmentWriter(path, limit=self._segment_bytes, header_bytes=self._header_bytes, disk=self._disk)
        self._num_segments += 1
        if self._fsync == "batch":
            self._disk.sync_path(self._dir)

    def _flush(self) -> None:
        """Flush the placed payloads; raise FileNotFoundError if a segment was removed, as its data would be lost."""
        for segment in (*self._full, self._segment):
            if segment is not None and segment.num_waiting:
                segment.check_present()
                segment.flush()
                if self._fsync == "batch":
                    segment.sync()

    def _append(self, parts: list[bytes], *, spare: bool = False) -> None:
        self._lines.append(parts, spare=spare)
        if self._fsync == "batch":
            self._lines.sync()

    def _seal_full(self) -> None:
        durable = self._fsync in ("segment", "batch")
        sealed = bool(self._full)
        failed: list[OSError] = []
        while self._full:
            try:
                self._full.pop(0).seal(sync=durable)
            except OSError as error:  # continue with the other segments
                failed.append(error)
        if failed:
            raise failed[0]
        if sealed and self._fsync == "segment":
            self._disk.sync_path(self._dir)
            self._lines.sync()

    def _mark(self) -> _Mark:
        inside = None if self._segment is None else self._segment.mark()
        return _Mark(self._lines.size, self._num_segments, self._segment, inside)

    def _roll_back(self, mark: _Mark) -> None:
        """Restore the state before the batch; if that fails, all later writes raise the error."""
        try:
            for segment in (*self._full, self._segment):
                if segment is not None and segment is not mark.segment:
                    segment.discard()
            self._full.clear()
            self._segment, self._num_segments = mark.segment, mark.num_segments
            if self._segment is not None and mark.inside is not None:
                self._segment.roll_back(mark.inside)
        except OSError as error:
            self._lines.give_up(error)
        self._lines.roll_back(mark.index_size)

    def _sync_names(self, run: Path) -> None:
        for path in (run / MANIFEST, self._dir, run, run.parent):
            if path.exists():
                self._disk.sync_path(path)
