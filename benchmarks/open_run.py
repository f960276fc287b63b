"""Time and peak memory of opening runs of many records, in fresh processes.

    python benchmarks/open_run.py [--records 100000 1000000] [--sites 10000] [--rounds 3] [--keep FOLDER]

Statistics and hashes in every record, one rank. `plain` reads all lines, `first` reads them and writes the record
index, `open` reads the index, and `table` builds a data frame from it. `view` does the same as the dashboard: it opens
the run and sorts its records; `compacted` is the same after `tapscope compact`.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from tapscope.run_format import record
from tapscope.run_format.record import Entry, Key, Record
from tapscope.run_format.stats import Stats

_MEASURE = """
import json, resource, sys, time
from tapscope.sources import open_run
begun, before = time.perf_counter(), time.process_time()
kind, *paths = sys.argv[1:]
if kind == "plain":
    from tapscope.run_format import index_limits
    index_limits.MIN_RECORDS = 1 << 60
for path in paths:
    run = open_run(path)
    if kind == "table":
        run.table()
    if kind in ("view", "compacted"):
        from tapscope.dashboard.browse_source import RunSource
        RunSource(run)
    count = len(run.records)
found = time.perf_counter() - begun, time.process_time() - before
print(json.dumps([*found, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024]))
"""


def make(folder: Path, num_records: int, num_sites: int = 10_000) -> Path:
    """Write a run of one rank."""
    rank = folder / "rank-00000"
    rank.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps({"version": 2, "format": "tapscope-run", "world_size": 1}))
    sites = [f"model.layers.{n // 100}.mlp.part{n % 100}:out" for n in range(num_sites)]
    with (rank / "records.jsonl").open("wb") as file:
        opened = {"type": "event", "kind": "open", "coords": {}, "mesh": {}}
        file.write(json.dumps(opened).encode() + b"\n")
        for site in sites:
            line = {"type": "site", "site": site, "class": "Linear", "params": {}, "parent": "MLP", "dims": "t h"}
            file.write(json.dumps(line).encode() + b"\n")
        for seq in range(num_records):
            number = float(seq % 977) + 0.25
            stats = Stats(4096, 0, 0, 0, 3, 0, -number, number, number, number / 3, number * number)
            hashed = f"{seq * 0x9E3779B97F4A7C15 % 2**128:032x}", f"{seq * 0x9E3779B97F4A7C15 % 2**64:016x}"
            one = Record(
                Key(sites[seq % num_sites], seq // num_sites), seq, "bfloat16", (4, 1024), "t h", None, stats, *hashed,
                Entry("seg.bin", 0, 8192),
            )  # fmt: skip
            file.write(record.encode(one) + b"\n")
        file.write(json.dumps({"type": "event", "kind": "close"}).encode() + b"\n")
    (rank / "seg.bin").write_bytes(bytes(8192))
    return folder


def measured(kind: str, *paths: Path) -> list[float]:
    """Return wall seconds, CPU seconds and MiB of a fresh process."""
    found = subprocess.run([sys.executable, "-c", _MEASURE, kind, *map(str, paths)], capture_output=True, check=True)
    return list(json.loads(found.stdout))


def timed(kind: str, path: Path) -> list[float]:
    """Measure opening a run, after removing its index or compacting it as ``kind`` requires."""
    index = path / "rank-00000" / "records.jsonl.index"
    if kind in ("plain", "first"):
        index.unlink(missing_ok=True)
    if kind == "compacted" and not (path / "rank-00000" / "records.parquet").exists():
        subprocess.run([sys.executable, "-m", "tapscope", "compact", str(path), "-q"], check=True)
    return measured(kind, path)


def main() -> None:
    """Print one line per run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--records", type=int, nargs="+", default=[100_000, 1_000_000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sites", type=int, default=10_000)
    parser.add_argument("--dir", default=None)
    parser.add_argument("--keep", type=Path, help="write the runs to this directory and keep them; none is compacted")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as place:
        runs = {count: make((args.keep or Path(place)) / str(count), count, args.sites) for count in args.records}
        for count, path in runs.items():
            for kind in ("plain", "first", "open", "table", "view", *(() if args.keep else ("compacted",))):
                rounds = [timed(kind, path) for _ in range(args.rounds)]
                wall, cpu, memory = (statistics.median(column) for column in zip(*rounds, strict=True))
                print(f"{count:>9,} {kind:<9} {wall:6.2f} s wall {cpu:6.2f} s cpu {memory:6.0f} MiB", flush=True)


if __name__ == "__main__":
    main()
