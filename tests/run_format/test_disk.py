"""The writer when the disk fails: a batch is there whole or not at all, and what is synced is synced in order."""

import errno
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paths import SUPPORT
from safetensors import safe_open
from safetensors.numpy import load_file
from small_disk import lines_and_payloads
from small_disk import small_disk as small_disk

from tapscope.core.errors import RecorderError
from tapscope.run_format import record
from tapscope.run_format.directory import create_run
from tapscope.run_format.io_syscalls import Disk
from tapscope.run_format.jsonl_writer import LineWriter
from tapscope.run_format.record import Key, Record
from tapscope.run_format.segment import SegmentWriter, read_header
from tapscope.run_format.writer import PackedPayloads, RankWriter
from tapscope.sources import open_run


def check(path: Path, num_records: int) -> None:
    """Exactly the first ``num_records`` are there, every byte of them, and every line is whole."""
    with open_run(path) as run:
        assert run.problems == []
        assert [rec.seq for rec in run.records] == list(range(num_records))
        for rec in run.records:
            assert (run.array(rec) == rec.seq % 256).all()
    assert all(json.loads(line) for line in (path / "rank-00000/records.jsonl").read_bytes().splitlines())


class FailingDisk(Disk):
    """Fails the n-th call that changes the disk, after doing part of a write, as a full disk does."""

    def __init__(self, fail_at: int) -> None:
        self.calls = 0
        self.fail_at = fail_at

    def _count(self, path: Path) -> None:
        self.calls += 1
        if self.calls == self.fail_at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def create(self, path, flags):
        self._count(path)
        return super().create(path, flags)

    def write(self, fd, path, parts, offset):
        self.calls += 1
        if self.calls == self.fail_at:
            blob = b"".join(bytes(part) for part in parts)
            super().write(fd, path, [blob[: len(blob) // 2]], offset)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        super().write(fd, path, parts, offset)

    def sync(self, fd, path):
        self._count(path)
        super().sync(fd, path)

    def reserve(self, fd, path, size, begin=0):
        self._count(path)
        super().reserve(fd, path, size, begin)


@given(
    batches=st.lists(st.lists(st.integers(0, 300), min_size=1, max_size=5), min_size=1, max_size=4),
    fail_at=st.integers(3, 20),
    fsync=st.sampled_from(["never", "batch"]),
)
@settings(max_examples=60)
def test_writer_rolls_back_a_failed_batch_and_continues(tmp_path_factory, batches, fail_at, fsync):
    path = tmp_path_factory.mktemp("fault") / "run"
    create_run(path, {"world_size": 1})
    disk = FailingDisk(fail_at)
    writer = RankWriter(path, 0, segment_bytes=700, fsync=fsync, disk=disk)
    done = 0
    for sizes in batches:
        if (error := failure_of(writer.batch, *lines_and_payloads(done, sizes))) is not None:
            assert error.errno == errno.ENOSPC
            assert Path(str(error.filename)).parent == path / "rank-00000"
            check(path, done)
            writer.batch(*lines_and_payloads(done, sizes))  # a call fails once: the same batch now goes through
        done += len(sizes)
        check(path, done)
    if failure_of(writer.close) is None and disk.calls < disk.fail_at:
        for segment in (path / "rank-00000").glob("seg-*"):
            with safe_open(segment, "np") as file:
                assert list(file.keys())
    check(path, done)


def _rows_of(first: int, names: Sequence[str], nbytes: int) -> tuple[list[bytes], PackedPayloads]:
    """A batch of equal sizes, each filled with its number, and one more line that shares the bytes of the last."""
    numbers = range(first, first + len(names) + 1)
    lines = [record.encode(Record(Key("m:out", n), n, "uint8", (nbytes,))) for n in numbers]
    data = b"".join(bytes([n % 256]) * nbytes for n in numbers[:-1])
    count = len(names)
    return lines, PackedPayloads(range(count), names, "uint8", [nbytes], data, [(count, count - 1)])


@pytest.mark.parametrize("nbytes", [64, 128, 100])
def test_writer_puts_rows_of_payloads_where_it_puts_single_ones(tmp_path: Path, nbytes: int) -> None:
    """Into several segments, after a gap, and with names that must be changed."""
    for kind in ("rows", "single"):
        create_run(tmp_path / kind, {"world_size": 1})
        writer = RankWriter(tmp_path / kind, 0, segment_bytes=2000)
        for first in range(0, 77, 11):
            names = [f"{first + n}/ü{'x' * 990 * (first == 22)}" for n in range(10)]
            if first == 33:
                names = ["a", "b", "a", *names[3:]]
            if first == 44:
                names = ["0/ü", "__pad0", *names[2:]]
            lines, row = _rows_of(first, names, nbytes)
            if kind == "rows":
                written = writer.batch(lines, [], packed=[row])
            else:
                parts = [row.data[n * nbytes : (n + 1) * nbytes] for n in range(10)]
                payloads = [(n, n, names[n], "uint8", [nbytes], part) for n, part in enumerate(parts)]
                written = writer.batch(lines, payloads, [(10, 9)])
            assert len(written) == 11
            if first == 0:  # the next payload begins after a gap
                writer.record(b'{"type":"event"}', "odd", "uint8", [3], b"odd")
        assert (writer.bytes_written, writer.records_written) == (70 * nbytes + 3, 77)
        writer.close()
    files = [
        {path.name: path.read_bytes() for path in (tmp_path / kind / "rank-00000").iterdir()}
        for kind in ("rows", "single")
    ]
    assert files[0] == files[1]
    assert len(files[0]) > 3


def test_writer_refuses_rows_of_payloads_that_are_not_what_they_say(tmp_path: Path) -> None:
    create_run(tmp_path / "run", {"world_size": 1})
    writer = RankWriter(tmp_path / "run", 0)
    writer.batch(*lines_and_payloads(0, [64]))
    lines, row = _rows_of(1, ["a", "b"], 64)
    with pytest.raises(RecorderError, match="2 payloads of 64 bytes came as 127"):
        writer.batch(lines, [], packed=[row._replace(data=row.data[:-1])])
    writer.close()
    check(tmp_path / "run", 1)


@pytest.mark.parametrize("fail_at", range(3, 14))
@pytest.mark.parametrize("fsync", ["never", "batch"])
def test_writer_rolls_back_failed_rows_of_payloads(tmp_path: Path, fail_at: int, fsync: Any) -> None:
    create_run(tmp_path / "run", {"world_size": 1})
    writer = RankWriter(tmp_path / "run", 0, segment_bytes=1000, fsync=fsync, disk=FailingDisk(fail_at))
    for first in range(0, 25, 5):
        lines, row = _rows_of(first, [f"{first + n}" for n in range(4)], 64)
        lines[4] = record.encode(Record(Key("m:out", first + 4), first + 4, "uint8", (64,)))
        row = row._replace(shared=())
        extra = [(4, 9, "last", "uint8", [64], bytes([(first + 4) % 256]) * 64)]
        if failure_of(writer.batch, lines, extra, (), -1, [row]) is not None:
            check(tmp_path / "run", first)
            writer.batch(lines, extra, packed=[row])
        check(tmp_path / "run", first + 5)
    failure_of(writer.close)
    check(tmp_path / "run", 25)


class ReservingDisk(Disk):
    """Notes what is reserved."""

    def __init__(self) -> None:
        self.spans: list[tuple[int, int]] = []

    def reserve(self, fd, path, size, begin=0):
        self.spans.append((begin, size))
        super().reserve(fd, path, size, begin)


def test_line_writer_reserves_each_byte_once(tmp_path):
    """tmpfs visits every page of a reserved range: reserving all of the file again would be quadratic."""
    disk = ReservingDisk()
    lines = LineWriter(tmp_path / "records.jsonl", disk, "rank 0")
    for _ in range(40):
        lines.append([b"x" * 50_000 + b"\n"])
    size = lines.size
    lines.append([b"y" * 300_000 + b"\n"])
    lines.roll_back(size)
    for _ in range(10):
        lines.append([b"z" * 50_000 + b"\n"])
    lines.close()
    ends = [end for _, end in disk.spans]
    assert disk.spans[0][0] == 0
    assert all(begin in (before, size) for (begin, _), before in zip(disk.spans[1:], ends, strict=False))
    assert (tmp_path / "records.jsonl").stat().st_size == size + 10 * 50_001


def failure_of(work: Callable[..., object], *args: object) -> OSError | None:
    try:
        work(*args)
    except OSError as error:
        return error
    return None


class WatchingDisk(Disk):
    """Knows what a power cut would leave: bytes are safe when their file was synced, names when their directory was."""

    def __init__(self) -> None:
        self.safe: dict[Path, bytes] = {}
        self.names: set[Path] = set()
        self.lines = b""
        self.early: list[str] = []

    def write(self, fd, path, parts, offset):
        super().write(fd, path, parts, offset)
        if path.name == "records.jsonl":  # the kernel may bring these to the medium at once
            self._check(path, b"".join(bytes(part) for part in parts))

    def sync(self, fd, path):
        super().sync(fd, path)
        self.safe[path] = path.read_bytes()

    def sync_path(self, path):
        super().sync_path(path)
        if path.is_dir():
            self.names |= set(path.iterdir())
        else:
            self.safe[path] = path.read_bytes()

    def _check(self, path: Path, blob: bytes) -> None:
        for line in blob.splitlines():
            if (entry := json.loads(line).get("entry")) is not None:
                file, offset, nbytes = entry
                content = self.safe.get(path.parent / file, b"")
                known = path.parent / file in self.names
                if not known or len(content) < offset + nbytes:
                    self.early.append(file)


def write_with(path: Path, fsync: str) -> WatchingDisk:
    create_run(path, {"world_size": 1})
    disk = WatchingDisk()
    writer = RankWriter(path, 0, segment_bytes=1000, fsync=fsync, disk=disk)
    done = 0
    for sizes in ([10, 400], [900, 5], [300], [300, 300, 300, 300]):
        writer.batch(*lines_and_payloads(done, sizes))
        done += len(sizes)
        if fsync == "batch":
            index = path / "rank-00000/records.jsonl"
            assert disk.safe[index] == index.read_bytes(), "acknowledged, and not on the medium"
    writer.close()
    check(path, done)
    return disk


def test_writer_fsync_batch_syncs_payloads_before_index_lines(tmp_path: Path) -> None:
    disk = write_with(tmp_path / "run", "batch")
    assert disk.early == []
    assert {tmp_path / "run", tmp_path / "run/rank-00000/records.jsonl"} <= disk.names


@pytest.mark.parametrize("fsync", ["close", "segment", "batch"])
def test_writer_close_syncs_under_every_policy(tmp_path: Path, fsync: str) -> None:
    disk = write_with(tmp_path / "run", fsync)
    files = set((tmp_path / "run/rank-00000").iterdir())
    assert files <= disk.names
    assert {file: file.read_bytes() for file in files} == {file: disk.safe[file] for file in files}


def test_writer_fsync_never_syncs_nothing(tmp_path: Path) -> None:
    disk = write_with(tmp_path / "run", "never")
    assert (disk.safe, disk.names) == ({}, set())


def test_writer_fsync_segment_syncs_a_full_segment_before_the_index(tmp_path: Path) -> None:
    order: list[str] = []

    class Order(Disk):
        def sync(self, fd, path):
            super().sync(fd, path)
            order.append(path.name)

    create_run(tmp_path, {"world_size": 1})
    writer = RankWriter(tmp_path, 0, segment_bytes=1000, fsync="segment", disk=Order())
    writer.batch(*lines_and_payloads(0, [900]))
    assert order == []
    writer.batch(*lines_and_payloads(1, [900]))
    assert order == ["seg-000000.safetensors", "records.jsonl"]
    writer.close()


def test_writer_on_a_full_disk_keeps_acknowledged_records_and_resumes(small_disk: Path) -> None:
    path = small_disk / "run"
    create_run(path, {"world_size": 1})
    writer = RankWriter(path, 0)
    done = 0
    with pytest.raises(OSError, match=r"No space left on device: '.*seg-000000.safetensors'") as failure:
        while True:
            writer.batch(*lines_and_payloads(done, [100_000] * 3))
            done += 3
    assert failure.value.errno == errno.ENOSPC
    assert done > 0
    check(path, done)
    writer.batch(*lines_and_payloads(done, [10]))  # smaller, and it fits
    writer.event("lost", reason="disk full")
    writer.close()
    check(path, done + 1)
    with safe_open(path / "rank-00000/seg-000000.safetensors", "np") as file:
        assert sum(not name.startswith("__") for name in file.keys()) == done + 1  # noqa: SIM118 - no mapping


@pytest.mark.parametrize("leave", [0, 1, 4096, 4097, 20_000, 40_000])
def test_writer_reserves_room_for_the_event_about_a_full_disk(small_disk: Path, leave: int) -> None:
    path = small_disk / "run"
    create_run(path, {"world_size": 1})
    writer = RankWriter(path, 0)
    writer.batch(*lines_and_payloads(0, [3000] * 7))
    free = os.statvfs(small_disk)
    (small_disk / "filler").write_bytes(bytes(max(free.f_bavail * free.f_bsize - leave, 0)))
    done = 7
    with pytest.raises(OSError, match="No space left on device"):
        for _ in range(10_000):
            writer.batch(*lines_and_payloads(done, [2000]))
            done += 1
    check(path, done)
    for n in range(20):
        writer.event("lost", reason="x" * 100, n=n)
    writer.close()
    with open_run(path) as run:
        assert [event.fields["n"] for event in run.events()] == list(range(20))
    index = path / "rank-00000/records.jsonl"
    assert index.stat().st_blocks * 512 <= index.stat().st_size + 4096


def test_writer_of_statistics_reserves_room_for_the_last_event(small_disk: Path) -> None:
    path = small_disk / "run"
    create_run(path, {"world_size": 1})
    writer = RankWriter(path, 0)
    done = 0
    with pytest.raises(OSError, match=r"No space left on device: '.*records.jsonl'"):
        while True:
            lines, _ = lines_and_payloads(done, [0] * 50)
            writer.batch(lines, [])
            done += 50
    writer.event("lost", reason="disk full")
    writer.close()
    assert done * 80 > 500_000
    check_lines = open_run(path)
    assert (len(check_lines.records), check_lines.events()[0].kind, check_lines.problems) == (done, "lost", [])


def in_child(program: str, path: Path, before: Callable[[], None] | None = None) -> str:
    """Standard output of a Python program that has this module's helpers."""
    folders = [str(Path(__file__).parent), str(SUPPORT)]
    prelude = f"import sys, os\nsys.path[:0] = {folders}\nfrom test_disk import *\n"
    done = subprocess.run(
        [sys.executable, "-c", prelude + program, str(path)], capture_output=True, text=True, preexec_fn=before
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


GROW = """
import signal
from pathlib import Path
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
path = Path(sys.argv[1])
writer, done = RankWriter(path, 0, segment_bytes=250_000), 0
try:
    while True:
        writer.batch(*lines_and_payloads(done, [50_000] * 2))
        done += 2
except OSError as error:
    print(done, error.errno, Path(error.filename).name)
writer.event("lost", reason="it failed")
writer.close()
"""


def test_writer_reports_a_file_size_limit_and_keeps_whole_batches(tmp_path: Path) -> None:
    create_run(tmp_path, {"world_size": 1})
    limit = 200_000
    out = in_child(GROW, tmp_path, lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)))
    done, number, name = out.split()
    assert (int(number), name) == (errno.EFBIG, "seg-000000.safetensors")
    check(tmp_path, int(done))


def test_writer_out_of_file_descriptors_fails_one_batch_and_names_the_file(tmp_path: Path) -> None:
    create_run(tmp_path, {"world_size": 1})
    hold = "hold = [os.open('/', 0) for _ in range(65 - len(os.listdir('/proc/self/fd')))]"
    program = GROW.replace("while True:", f"while True:\n        if done == 4: {hold}")
    limit = (64, 64)
    out = in_child(program, tmp_path, lambda: resource.setrlimit(resource.RLIMIT_NOFILE, limit))
    done, number, name = out.split()
    assert (int(done), int(number), name) == (4, errno.EMFILE, "seg-000001.safetensors")
    check(tmp_path, 4)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user")
def test_writer_fails_at_the_next_segment_of_a_read_only_directory(tmp_path: Path) -> None:
    path = tmp_path / "run"
    create_run(path, {"world_size": 1})
    os.chown(path, 65534, 65534)
    for parent in path.parents:
        if parent != Path("/") and not parent.stat().st_mode & 0o001:
            parent.chmod(parent.stat().st_mode | 0o011)
    program = GROW.replace(
        "while True:", "while True:\n        if done == 4: os.chmod(path / 'rank-00000', 0o500)"
    ).replace("writer, done", "os.setuid(65534)\nwriter, done")
    done, number, name = in_child(program, path).split()
    assert (int(done), int(number), name) == (4, errno.EACCES, "seg-000001.safetensors")
    check(path, 4)


def test_writer_notices_a_removed_directory_at_the_next_batch(tmp_path: Path) -> None:
    path = tmp_path / "run"
    create_run(path, {"world_size": 1})
    writer = RankWriter(path, 0)
    writer.batch(*lines_and_payloads(0, [10]))
    for file in (path / "rank-00000").iterdir():
        file.unlink()
    (path / "rank-00000").rmdir()
    with pytest.raises(FileNotFoundError, match="it was removed while it was being written"):
        writer.batch(*lines_and_payloads(1, [10]))
    with pytest.raises(FileNotFoundError, match=r"removed.*records\.jsonl"):
        writer.event("lost", reason="gone")
    writer.close()


def test_writer_refuses_a_payload_of_the_wrong_size_and_its_batch(tmp_path: Path) -> None:
    create_run(tmp_path, {"world_size": 1})
    writer = RankWriter(tmp_path, 0)
    lines, payloads = lines_and_payloads(0, [10, 20])
    payloads[1] = (*payloads[1][:4], [21], payloads[1][5])
    with pytest.raises(RecorderError, match=r"came with 20 bytes; uint8 of shape \[21\] has 21"):
        writer.batch(lines, payloads)
    check(tmp_path, 0)
    writer.batch(*lines_and_payloads(0, [10, 20]))
    writer.close()
    check(tmp_path, 2)


def test_writer_stores_shared_bytes_once_and_reports_missing_ones(tmp_path: Path) -> None:
    create_run(tmp_path, {"world_size": 1})
    writer = RankWriter(tmp_path, 0)
    lines, payloads = lines_and_payloads(0, [10])
    more = [record.encode(Record(Key("n:out", 0), n, "uint8", (10,))) for n in (1, 2)]
    writer.batch(lines + more[:1], payloads, [(1, 0)], sharing=7)
    writer.batch(more[1:], [], [(0, 0)], sharing=7)
    lost = record.encode(Record(Key("n:out", 1), 3, "uint8", (10,)))
    writer.batch([lost], [], [(0, 0)], sharing=8)
    writer.close()
    with open_run(tmp_path) as run:
        entries = [rec.entry for rec in run.records]
        assert entries[0] == entries[1] == entries[2] is not None
        assert entries[3] is None
        assert (run.array(run.records[2]) == 0).all()
        event = run.events()[0]
        assert (event.kind, event.fields["where"], event.fields["step"]) == ("failed", "n:out", 1)
        assert event.fields["reason"] == "it shares the bytes of payload 0, which never arrived"


def test_segment_is_valid_with_long_strange_and_duplicate_names(tmp_path: Path) -> None:
    create_run(tmp_path, {"world_size": 1})
    writer = RankWriter(tmp_path, 0)
    names = ["x" * 5000, "x" * 5001, "__metadata__", "__pad64", 'quo"te\\ü\n', "same", "same", ""]
    for n, name in enumerate(names):
        line = record.encode(Record(Key("m:out", n), n, "uint8", (n + 1,)))
        writer.record(line, name, "uint8", [n + 1], bytes([n]) * (n + 1))
    writer.close()
    check(tmp_path, len(names))
    with safe_open(tmp_path / "rank-00000/seg-000000.safetensors", "np") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys() if not name.startswith("__pad")}  # noqa: SIM118
    assert sorted(array.size for array in tensors.values()) == list(range(1, 9))
    assert {'quo"te\\ü\n', "same", "same~2", ""} <= set(tensors)


def test_segment_header_grows_for_many_small_payloads(tmp_path: Path) -> None:
    create_run(tmp_path, {"world_size": 1})
    writer = RankWriter(tmp_path, 0)
    for first in range(0, 6000, 1000):
        writer.batch(*lines_and_payloads(first, [8] * 1000))
    writer.close()
    check(tmp_path, 6000)
    headers = []
    for segment in sorted((tmp_path / "rank-00000").glob("seg-*")):
        with safe_open(segment, "np") as file:
            assert list(file.keys())
        headers.append(int.from_bytes(segment.read_bytes()[:8], "little") + 8)
    assert headers[:2] == [128 * 1024, 256 * 1024]


def test_writer_takes_numpy_and_shared_memory_views_without_copies(tmp_path: Path) -> None:
    create_run(tmp_path, {"world_size": 1})
    writer = RankWriter(tmp_path, 0)
    array = np.arange(24, dtype=np.float32).reshape(4, 6)
    line = record.encode(Record(Key("m:out", 0), 0, "float32", (4, 6)))
    writer.record(line, "a", "float32", [4, 6], array)
    writer.close()
    with open_run(tmp_path) as run:
        np.testing.assert_array_equal(run.array(run.records[0]), array)


@pytest.mark.parametrize("flush", [True, False])
def test_sealed_segment_is_valid_without_a_flush(tmp_path: Path, flush: bool) -> None:
    segment = SegmentWriter(tmp_path / "seg.safetensors")
    segment.place("one", "uint8", [3], b"abc")
    if flush:
        segment.flush()
    segment.place("two", "uint8", [5], b"defgh")
    segment.seal()
    found = load_file(tmp_path / "seg.safetensors")
    assert (bytes(found["one"]), bytes(found["two"])) == (b"abc", b"defgh")


def test_sealed_segment_is_valid_after_a_failed_rollback(tmp_path: Path) -> None:
    class Stuck(Disk):
        """Writes half of what it is given and fails; cannot truncate at first."""

        fails = False

        def write(self, fd: int, path: Path, parts: Sequence[Any], offset: int | None) -> None:
            if self.fails and path.suffix == ".safetensors" and offset != 8:
                os.pwrite(fd, bytes(parts[-1])[: len(parts[-1]) // 2], offset or 0)
                raise OSError(errno.ENOSPC, "full", str(path))
            super().write(fd, path, parts, offset)

        def truncate(self, fd: int, path: Path, size: int) -> None:
            if self.fails:
                raise OSError(errno.EIO, "stuck", str(path))
            super().truncate(fd, path, size)

    disk = Stuck()
    writer = RankWriter(tmp_path, 0, disk=disk)
    writer.record(b'{"n":0}', "one", "uint8", [3], b"abc")
    disk.fails = True
    with pytest.raises(OSError, match="full"):
        writer.record(b'{"n":1}', "two", "uint8", [100], bytes(100))
    disk.fails = False
    writer.close()
    assert list(load_file(tmp_path / "rank-00000/seg-000000.safetensors")) == ["one"]


def test_segment_with_missing_bytes_is_not_sealed(tmp_path: Path) -> None:
    segment = SegmentWriter(tmp_path / "seg.safetensors")
    segment.place("one", "uint8", [300], bytes(300))
    segment.flush()
    os.truncate(tmp_path / "seg.safetensors", segment.header_bytes + 10)
    with pytest.raises(OSError, match="were written"):
        segment.seal()
    assert read_header((tmp_path / "seg.safetensors").read_bytes()[8 : segment.header_bytes]) is None


@pytest.mark.parametrize("head", [b'{"a":1,!', b'{"a":{"data_offsets":"x"},"b', b"[[[", b"[1]", b"   "])
def test_header_that_is_not_a_json_object_is_unsealed(head: bytes) -> None:
    assert read_header(head) is None


def test_header_with_invalid_offsets_gives_empty_spans() -> None:
    assert read_header(b'{"a":{"data_offsets":[0,4]},"b":1}') == {"a": (0, 4), "b": (0, 0)}


def test_run_that_cannot_be_created_leaves_no_directory(small_disk: Path) -> None:
    (small_disk / "run").mkdir()
    create_run(small_disk / "run", {})
    with (small_disk / "filler").open("wb", buffering=0) as filler, pytest.raises(OSError, match="No space"):
        while True:
            filler.write(bytes(4096))
    with pytest.raises(OSError, match="No space left on device"):
        create_run(small_disk / "next", {})
    assert {path.name for path in small_disk.iterdir()} == {"run", "filler"}
