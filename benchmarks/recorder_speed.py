"""Speed of the recorder's writer: relative to a raw append of the same bytes, and in small records per second.

    python benchmarks/recorder_speed.py [--out DIRECTORY] [--rounds 7] [--fsync never] [--recorder]

One process, one rank: `RankWriter.batch` as the recorder calls it, in batches of up to 8 MiB and 64 records, with lines
of typical length. A raw append is a sequence of `pwrite` calls of the same size into one new file. Rounds alternate
between the two; medians are printed. Nothing is synced unless requested, so a disk shows its page cache. ``--recorder``
also measures a real recorder process with payloads through its ring: wall time until everything is acknowledged.
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import zmq

from tapscope.core import wire
from tapscope.core.wire import Message
from tapscope.dumper.transport.shm_ring import ShmRing
from tapscope.run_format import record
from tapscope.run_format.directory import RECORDER_FILE
from tapscope.run_format.record import Key, Record, Stats
from tapscope.run_format.segment import SEGMENT_BYTES
from tapscope.run_format.writer import RankWriter

T = TypeVar("T")
BATCH_BYTES = 8 << 20
BATCH_RECORDS = 1024
SIZES = {"1 MiB": (1 << 20, 512), "64 KiB": (1 << 16, 4096), "2 KiB": (2048, 40_000)}
"""Name -> (bytes of one tensor, tensors per round)."""


def lines_of(count: int, nbytes: int) -> list[bytes]:
    """Return record lines like those of a real capture."""
    stats = Stats(nbytes // 4, 0, 0, 0, 3, 0, -3.1415927410125732, 2.7182817459106445, 3.1415927410125732, 1.5, 97.25)
    site = "model.layers.{}.self_attn.o_proj:out"
    return [
        record.encode(Record(_key(site, n), n, "float32", (nbytes // 4,), "t h", None, stats, "5a" * 16, "c3" * 8))
        for n in range(count)
    ]


def _key(site: str, n: int) -> Key:
    return Key(site.format(n % 32), n // 32)


def batch_size(nbytes: int) -> int:
    """Return the number of records per batch."""
    return max(min(BATCH_RECORDS, BATCH_BYTES // max(nbytes, 1)), 1)


def write(folder: Path, lines: list[bytes], nbytes: int, data: memoryview, fsync: str) -> float:
    """Return the seconds until the records are written and the rank is closed."""
    per_batch = batch_size(nbytes)
    heads = [(_key("layers.{}.mlp:out", n).tensor_name, [nbytes // 4]) for n in range(len(lines))]
    offsets = range(0, max(len(data) - nbytes, 1), max(nbytes, 1))
    begun = time.perf_counter()
    writer = RankWriter(folder, 0, fsync=fsync)
    for first in range(0, len(lines), per_batch):
        chunk = lines[first : first + per_batch]
        payloads = [
            (i, first + i, *_head(heads[first + i]), data[at : at + nbytes])
            for i in range(len(chunk))
            for at in (offsets[(first + i) % len(offsets)],)
        ]
        writer.batch(chunk, payloads if nbytes else ())
    writer.close()
    return time.perf_counter() - begun


def _head(head: tuple[str, list[int]]) -> tuple[str, str, list[int]]:
    return head[0], "float32", head[1]


def append(folder: Path, count: int, nbytes: int, data: memoryview) -> tuple[float, float]:
    """Return the wall and CPU seconds of the raw append."""
    offsets = range(0, max(len(data) - nbytes, 1), nbytes)
    begun, cpu = time.perf_counter(), time.process_time()
    fd = os.open(folder / "raw", os.O_RDWR | os.O_CREAT | os.O_EXCL)
    for n in range(count):
        at = offsets[n % len(offsets)]
        os.pwrite(fd, data[at : at + nbytes], n * nbytes)
    os.close(fd)
    return time.perf_counter() - begun, time.process_time() - cpu


def timed(out: Path, work: Callable[[Path], T]) -> T:
    """Return the result of ``work`` in a fresh directory."""
    folder = Path(tempfile.mkdtemp(prefix="recorder-speed-", dir=out))
    try:
        return work(folder)
    finally:
        shutil.rmtree(folder)


def measure_size(name: str, out: Path, rounds: int, data: memoryview, fsync: str) -> str:
    """Return one row of the table."""
    nbytes, count = SIZES[name]
    lines = lines_of(count, nbytes)
    raw, ours = [], []
    for _ in range(rounds + 1):
        raw.append(timed(out, lambda folder: append(folder, count, nbytes, data))[0])
        ours.append(timed(out, lambda folder: write(folder, lines, nbytes, data, fsync)))
    raw, ours = raw[1:], ours[1:]  # warm-up: the first round of a size has cold pages
    ratio = statistics.median(a / b for a, b in zip(raw, ours, strict=True))
    total, raw_s, ours_s = nbytes * count / 1e9, statistics.median(raw), statistics.median(ours)
    return (
        f"{name:>6} tensors   raw append {total / raw_s:5.2f} GB/s   writer {total / ours_s:5.2f} GB/s   "
        f"ratio {ratio:.2f}   {count / ours_s:9,.0f} records/s"
    )


class RealRecorder:
    """A separate recorder process, and one rank that sends batches through a ring, as the dumper does."""

    def __init__(self, run: Path, data: memoryview, fsync: str) -> None:
        run.mkdir()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tapscope.dumper.recorder", str(run)], stdin=subprocess.PIPE, start_new_session=True
        )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"segment_bytes": SEGMENT_BYTES, "fsync": fsync}).encode())
        self.process.stdin.close()
        while not (run / RECORDER_FILE).exists():
            time.sleep(0.01)
        self._ring = ShmRing(64 << 20)
        self._ring.memory[:] = data[: self._ring.nbytes]
        self._num_sent = 0
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.connect(json.loads((run / RECORDER_FILE).read_text())["address"])
        opening = {"world_size": 1, "mesh": {}, "coords": {}, "pid": os.getpid(), "host": socket.gethostname()}
        ring = {"path": str(self._ring.path), "nbytes": self._ring.nbytes}
        self._ask("joined", rank=0, manifest={}, opening=opening, ring=ring, config={"keep": "full"}, modules=[])

    def write(self, lines: list[bytes], nbytes: int) -> tuple[float, float]:
        """Return the wall seconds until all is acknowledged, with at most 8 batches in flight, and the recorder's CPU
        seconds."""
        per_batch = batch_size(nbytes)
        names = [_key("layers.{}.mlp:out", n).tensor_name for n in range(len(lines))]
        places = range(0, self._ring.nbytes - nbytes + 1, -(-nbytes // 64) * 64 or 64)
        cpu, begun, waiting = cpu_seconds(self.process.pid), time.perf_counter(), 0
        for first in range(0, len(lines), per_batch):
            chunk = range(first, min(first + per_batch, len(lines)))
            heads = [[n - first, n, names[n], "float32", [nbytes // 4], places[n % len(places)], nbytes] for n in chunk]
            fields = {"payloads": heads if nbytes else [], "shared": [], "sharing_step": 0}
            blob = b"\n".join(lines[chunk.start : chunk.stop])
            self._send(Message("batch", fields, [blob]))
            waiting += 1
            while waiting == 8:
                waiting -= self._acknowledged()
        while waiting:
            waiting -= self._acknowledged()
        return time.perf_counter() - begun, cpu_seconds(self.process.pid) - cpu

    def close(self) -> None:
        """Send the close message and wait for the process to exit."""
        self._send(Message("close"))
        self._socket.close()
        self.process.wait()

    def _send(self, message: Message) -> None:
        fields = message.fields | {"n": self._num_sent}
        self._num_sent += 1
        self._socket.send_multipart(wire.encode(Message(message.kind, fields, message.frames)))

    def _acknowledged(self) -> int:
        message = wire.decode(self._socket.recv_multipart())
        if message.kind == "heartbeat":
            position = {"current_step": 0, "sent": self._num_sent, "received": 0, "has_gap": False}
            self._socket.send_multipart(wire.encode(Message("position", position)))
        elif message.kind != "ack":
            raise SystemExit(f"the recorder answered {message}")
        return message.kind == "ack"

    def _ask(self, kind: str, **fields: object) -> None:
        self._socket.send_multipart(wire.encode(Message("join", fields)))
        answer = wire.decode(self._socket.recv_multipart())
        if answer.kind != kind or not answer["ring"]:
            raise SystemExit(f"the recorder answered {answer}")


def cpu_seconds(pid: int) -> float:
    """Return the user and system CPU seconds of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def measure_recorder(name: str, out: Path, rounds: int, data: memoryview, fsync: str) -> str:
    """Return one row: the recorder's cost relative to a raw append of the same bytes."""
    nbytes, count = SIZES[name]
    lines = lines_of(count, nbytes)
    raw, raw_cpu, walls, cpus = [], [], [], []
    for _ in range(rounds + 1):
        wall, cpu = timed(out, lambda folder: append(folder, count, nbytes, data))
        raw.append(wall)
        raw_cpu.append(cpu)
        folder = Path(tempfile.mkdtemp(prefix="recorder-speed-", dir=out))
        recorder = RealRecorder(folder / "run", data, fsync)
        wall, cpu = recorder.write(lines, nbytes)
        recorder.close()
        shutil.rmtree(folder)
        walls.append(wall)
        cpus.append(cpu)
    ratio, cpu_ratio = (
        statistics.median(a / b for a, b in zip(one[1:], other[1:], strict=True))
        for one, other in ((raw, walls), (raw_cpu, cpus))
    )
    wall_s, cpu_s = statistics.median(walls[1:]), statistics.median(cpus[1:])
    return (
        f"real recorder   {name:>6} tensors   {count * nbytes / 1e9 / wall_s:5.2f} GB/s, {ratio:.2f} of the raw append "
        f"({cpu_ratio:.2f} in CPU time)   {count / wall_s:7,.0f} records/s ({count / cpu_s:,.0f} a CPU second)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()), help="where to write")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--fsync", choices=("never", "close", "segment", "batch"), default="never")
    parser.add_argument("--recorder", action="store_true", help="measure a real recorder process as well")
    args = parser.parse_args()
    data = memoryview(os.urandom(1 << 20) * 64)
    print(f"writing to {args.out}, fsync {args.fsync}; medians of {args.rounds} rounds")
    for name in SIZES:
        print(measure_size(name, args.out, args.rounds, data, args.fsync), flush=True)
    lines = lines_of(100_000, 2048)
    times = [timed(args.out, lambda folder: write(folder, lines, 0, data, args.fsync)) for _ in range(args.rounds)]
    print(f"statistics only   {len(lines) / statistics.median(times):,.0f} records/s")
    for name in SIZES if args.recorder else ():
        print(measure_recorder(name, args.out, args.rounds, data, args.fsync), flush=True)


if __name__ == "__main__":
    main()
