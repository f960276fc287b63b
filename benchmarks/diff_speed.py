"""How fast two runs are compared, in bytes of both sides per second, beside a naive numpy loop and mere reading.

    python benchmarks/diff_speed.py [--layers 12] [--rows 2048] [--hidden 1024] [--dir DIR]

Makes a float32 run on one rank and a bfloat16 run on two (column shards, summands, replicas) in a temporary directory,
reads both once so that the files are warm, then measures. ``compare`` includes opening the runs and judging them.
Predicted before the first run, from kernels at about 6 GB/s on bf16 against fp32 and 1 ms of Python for each of some
hundred sites: 2.5 GB/s of wall time on one thread, the summed partials being the slowest part; target 1.5.
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from tapscope import ledger, record
from tapscope.comparator import compare
from tapscope.directory import create_run
from tapscope.kernels.native import backend, summarize_array
from tapscope.observe import RowRun, StepInfo
from tapscope.record import Key, Record
from tapscope.run import open_run
from tapscope.writer import RankWriter

Array = np.ndarray[Any, Any]
SITES = {"q_proj:out": "t h[tp]", "o_proj:out": "t h", "o_proj.partial:out": "t h[tp:partial]", "mlp:out": "t h"}


def write_rank(path: Path, rank: int, size: int, layers: int, rows: int, hidden: int, kind: Any) -> int:
    """One rank's share of the run, two steps; returns its bytes."""
    writer, seq, nbytes = RankWriter(path, rank), 0, 0
    writer.event("open", rank=rank, world_size=size, mesh={"tp": size}, coords={"tp": rank})
    for step in range(2):
        info = StepInfo(
            step=step, grid=(rows,), rows=(RowRun("0", step * rows, rows, 0, 0),), token_ids=tuple(range(rows))
        )
        writer.line(ledger.begin_line(info, 0))
        counts = ledger.StepCounts()
        for layer in range(layers):
            whole = np.random.default_rng(step * layers + layer).standard_normal((rows, hidden), np.float32)
            for site, dims in SITES.items():
                if size == 1 and "partial" in site:
                    continue
                values = share(whole, dims, rank, size).astype(kind)
                name = f"model.layers.{layer}.{site}"
                put(writer, Key(name, step, rank), seq, values, dims if "[" in dims else f"{dims} # tp:replicated")
                seq, nbytes = seq + 1, nbytes + values.nbytes
                counts.seen, counts.sent = counts.seen + 1, counts.sent + 1
        writer.line(ledger.end_line(step, counts))
    writer.event("close", never_fired=[])
    writer.close()
    return nbytes


def share(whole: Array, dims: str, rank: int, size: int) -> Array:
    """What one rank holds of a value."""
    if "partial" in dims:
        return whole / size
    return np.array_split(whole, size, axis=1)[rank] if "[tp]" in dims else whole


def put(writer: RankWriter, key: Key, seq: int, values: Array, dims: str) -> None:
    values = np.ascontiguousarray(values)
    summary = summarize_array(values)
    item = Record(key, seq, values.dtype.name, values.shape, dims, None, *summary)
    payload = values.reshape(-1).view(np.uint8)
    writer.record(json.dumps(record.to_json(item)).encode(), key.tensor_name, values.dtype.name, values.shape, payload)


def make_runs(root: Path, layers: int, rows: int, hidden: int) -> int:
    nbytes = 0
    for name, size, kind in (("base", 1, np.float32), ("target", 2, ml_dtypes.bfloat16)):
        create_run(root / name, {"world_size": size, "mesh": {"tp": size}, "dtype": np.dtype(kind).name})
        for rank in range(size):
            nbytes += write_rank(root / name, rank, size, layers, rows, hidden, kind)
    return nbytes


def read_everything(root: Path) -> None:
    """Every payload byte once, as 64-bit integers: the ceiling."""
    for name in ("base", "target"):
        with open_run(root / name) as run:
            for rec in run.records:
                int(run.array(rec).reshape(-1).view(np.int64).sum())


def compare_naively(root: Path) -> None:
    """What one writes by hand: whole arrays as float64, three numbers, ranks taken as they come."""
    with open_run(root / "base") as one, open_run(root / "target") as two:
        index = {(r.key.site, r.key.step): r for r in one.records}
        sums: dict[tuple[str, int], list[Array]] = {}
        for rec in two.records:
            site = rec.key.site.replace(".partial", "")
            sums.setdefault((rec.key.site, rec.key.step), []).append(two.array(rec).astype(np.float64))
            parts = sums[rec.key.site, rec.key.step]
            if len(parts) < 2:
                continue
            dims = rec.dims or ""
            value = sum(parts) if "partial" in dims else np.concatenate(parts, 1) if "[tp]" in dims else parts[0]
            reference = one.array(index[site, rec.key.step]).astype(np.float64)
            delta = value - reference
            np.abs(delta).max(), np.linalg.norm(delta) / np.linalg.norm(reference), (value * reference).sum()
            parts.clear()


def compare_runs(root: Path) -> None:
    with open_run(root / "base") as one, open_run(root / "target") as two:
        report = compare(one, two)
    assert report.exit_code == 0, "the runs of this benchmark agree"


def timed(call: Callable[[Path], None], root: Path, rounds: int) -> tuple[float, float]:
    """(wall, CPU) seconds of the fastest round."""
    best = (float("inf"), float("inf"))
    for _ in range(rounds):
        start, cpu = time.perf_counter(), time.process_time()
        call(root)
        best = min(best, (time.perf_counter() - start, time.process_time() - cpu))
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="where to make the runs (default: the temporary directory)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        root = Path(name)
        nbytes = make_runs(root, args.layers, args.rows, args.hidden)
        print(f"{nbytes / 1e9:.2f} GB in both runs, kernels: {backend()[0]}; GB/s of both sides")
        read_everything(root)
        for label, call in (("read", read_everything), ("compare", compare_runs), ("naive numpy", compare_naively)):
            wall, cpu = timed(call, root, 1 if label == "naive numpy" else args.rounds)
            print(
                f"{label:<12} wall {nbytes / wall / 1e9:5.2f} GB/s   cpu {nbytes / cpu / 1e9:5.2f} GB/s   {wall:.2f} s"
            )
    print(
        f"peak resident memory {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6:.2f} GB, mapped files included"
    )


if __name__ == "__main__":
    main()
