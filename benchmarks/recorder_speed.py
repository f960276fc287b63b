"""How fast the recorder's writer is: beside a raw append of the same bytes, and in small records a second.

    python benchmarks/recorder_speed.py [--out DIRECTORY] [--rounds 7] [--fsync never]

One process, one rank: `RankWriter.batch` as the recorder calls it, in batches of up to 8 MiB and 64 records, the lines
of ordinary length. A raw append is one `pwrite` of the same size after the other into one new file. Rounds alternate
between the two; printed are medians. Nothing is synced unless asked for, so a disk shows its page cache.
"""

import argparse
import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tapscope import record
from tapscope.record import Key, Record, Stats
from tapscope.writer import RankWriter

BATCH_BYTES = 8 << 20
BATCH_RECORDS = 64
SIZES = {"1 MiB": (1 << 20, 512), "64 KiB": (1 << 16, 4096), "2 KiB": (2048, 40_000)}
"""Name -> (bytes of one tensor, tensors in a round)."""


def lines_of(count: int, nbytes: int) -> list[bytes]:
    """Record lines as a real capture has them."""
    stats = Stats(nbytes // 4, 0, 0, 0, 3, 0, -3.1415927410125732, 2.7182817459106445, 3.1415927410125732, 1.5, 97.25)
    site = "model.layers.{}.self_attn.o_proj:out"
    return [
        record.encode(Record(_key(site, n), n, "float32", (nbytes // 4,), "t h", None, stats, "5a" * 16, "c3" * 8))
        for n in range(count)
    ]


def _key(site: str, n: int) -> Key:
    return Key(site.format(n % 32), n // 32)


def write(folder: Path, lines: list[bytes], nbytes: int, data: memoryview, fsync: str) -> float:
    """Seconds until the records are written and the rank is closed."""
    per_batch = max(min(BATCH_RECORDS, BATCH_BYTES // max(nbytes, 1)), 1)
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


def append(folder: Path, count: int, nbytes: int, data: memoryview) -> float:
    """Seconds of the raw append."""
    offsets = range(0, max(len(data) - nbytes, 1), nbytes)
    begun = time.perf_counter()
    fd = os.open(folder / "raw", os.O_RDWR | os.O_CREAT | os.O_EXCL)
    for n in range(count):
        at = offsets[n % len(offsets)]
        os.pwrite(fd, data[at : at + nbytes], n * nbytes)
    os.close(fd)
    return time.perf_counter() - begun


def timed(out: Path, work: Callable[[Path], float]) -> float:
    """Seconds of ``work`` in a fresh folder."""
    folder = Path(tempfile.mkdtemp(prefix="recorder-speed-", dir=out))
    try:
        return work(folder)
    finally:
        shutil.rmtree(folder)


def measure_size(name: str, out: Path, rounds: int, data: memoryview, fsync: str) -> str:
    """One line of the table."""
    nbytes, count = SIZES[name]
    lines = lines_of(count, nbytes)
    raw, ours = [], []
    for _ in range(rounds + 1):
        raw.append(timed(out, lambda folder: append(folder, count, nbytes, data)))
        ours.append(timed(out, lambda folder: write(folder, lines, nbytes, data, fsync)))
    raw, ours = raw[1:], ours[1:]  # the first round of a size finds cold pages
    ratio = statistics.median(a / b for a, b in zip(raw, ours, strict=True))
    total, raw_s, ours_s = nbytes * count / 1e9, statistics.median(raw), statistics.median(ours)
    return (
        f"{name:>6} tensors   raw append {total / raw_s:5.2f} GB/s   writer {total / ours_s:5.2f} GB/s   "
        f"ratio {ratio:.2f}   {count / ours_s:9,.0f} records/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(tempfile.gettempdir()), help="where to write")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--fsync", choices=("never", "close", "segment", "batch"), default="never")
    args = parser.parse_args()
    data = memoryview(os.urandom(1 << 20) * 64)
    print(f"writing to {args.out}, fsync {args.fsync}; medians of {args.rounds} rounds")
    for name in SIZES:
        print(measure_size(name, args.out, args.rounds, data, args.fsync), flush=True)
    lines = lines_of(100_000, 2048)
    times = [timed(args.out, lambda folder: write(folder, lines, 0, data, args.fsync)) for _ in range(args.rounds)]
    print(f"statistics only   {len(lines) / statistics.median(times):,.0f} records/s")


if __name__ == "__main__":
    main()
