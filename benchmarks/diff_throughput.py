"""Speed and memory of comparing two runs, relative to a naive loop in torch and to reading alone.

    python benchmarks/diff_throughput.py [--layers 24] [--rounds 3] [--dir /dev/shm] [--only kernel,large]
    python benchmarks/diff_throughput.py --only tiny --tiny 100000x1,2000x50,100x1000   # 100,000 pairs, minutes

*kernel*: the output of measure_ceiling.py: the C++ measure alone, relative to reading the same arrays, with and without
64-byte vectors. *large*: 24 layers x 20 sites x 2 TP ranks, float32 against bfloat16, 1 to 4 MiB per shard, 4.5 GB in
total, read once to warm the page cache. ``diff`` is the command in its own process, from start to exit; ``compare`` is
the same in this process. Rounds are interleaved and medians shown, because other work on the machine then slows all
alike. *tiny*: milliseconds of CPU time per pair of tensors of 64 values, for ``diff`` including start-up, ``compare``,
and opening both runs; and the peak anonymous memory of ``diff``. *memory*: the peak anonymous resident memory (without
mapped files) while one pair of tensors of about 1 GB is compared, and one of a million token rows.

Predicted before the first run, from kernels at 10 GB/s, 0.25 s of start-up and 0.4 ms of Python per site: 2.2 GB/s on
one thread, 3.5 with two threads over sites. Tiny: 0.15 ms at first, three quarters of it for reading lines and creating
findings.
"""

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import diff_runs
import numpy as np

from tapscope.comparator import compare
from tapscope.kernels.native import backend
from tapscope.sources import open_run

TINY = "2000x1,100x20"
"""Sites x steps."""
HUGE = ((32_768, 4_096, "t h"), (32_768, 4_096, "t h[tp]"), (32_768, 4_096, "t h[tp:partial]"), (1_000_000, 8, "t h"))
"""(token rows of one step, features, dims)"""


def read_everything(root: Path) -> None:
    """Read every payload byte once, as 64-bit integers: the ceiling."""
    for name in ("base", "target"):
        with open_run(root / name) as run:
            for rec in run.records:
                run.array(rec).reshape(-1).view(np.int64).sum()


def compare_naively(root: Path) -> None:
    """Compare naively in torch: full tensors as float32, shard by shard, four metrics."""
    import torch

    warnings.filterwarnings("ignore", "The given NumPy array is not writable")
    with open_run(root / "base") as one, open_run(root / "target") as two:
        for a, b in zip(one.records, two.records, strict=True):
            x = torch.from_numpy(one.array(a))
            y = torch.from_numpy(two.array(b).view(np.int16)).view(torch.bfloat16).float()
            delta = (x - y).abs()
            delta.max().item(), delta.mean().item(), (delta.norm() / x.norm()).item()
            torch.nn.functional.cosine_similarity(x.reshape(-1), y.reshape(-1), 0).item()


def compare_runs(root: Path) -> None:
    """Compare both runs in this process."""
    with open_run(root / "base") as one, open_run(root / "target") as two:
        compare(one, two)


def diff(root: Path) -> None:
    """Run the command, including start-up."""
    _finish(_start(root))


def _start(root: Path) -> "subprocess.Popen[bytes]":
    """Start the command, with cached bytecode as in an installed package."""
    command = [sys.executable, "-m", "tapscope", "diff", str(root / "base"), str(root / "target")]
    env = {**os.environ, "PYTHONPYCACHEPREFIX": str(root.parent / "bytecode")}
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, env=env)


def _finish(process: "subprocess.Popen[bytes]") -> None:
    if process.wait() not in (0, 1):
        raise SystemExit(f"tapscope diff ended with {process.returncode}")


class Cost(NamedTuple):
    """Median seconds."""

    wall: float
    cpu: float
    """CPU time of this process and its children, all threads."""


def medians(calls: dict[str, Callable[[Path], None]], root: Path, rounds: int) -> dict[str, Cost]:
    """Return the median time of each call over interleaved rounds."""
    costs: dict[str, list[Cost]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            wall, cpu = time.perf_counter(), _cpu_seconds()
            call(root)
            costs[name].append(Cost(time.perf_counter() - wall, _cpu_seconds() - cpu))
    return {name: Cost(*map(statistics.median, zip(*found, strict=True))) for name, found in costs.items()}


def _cpu_seconds() -> float:
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def measure_large(root: Path, layers: int, rounds: int) -> None:
    """Print the table of throughputs."""
    nbytes = diff_runs.large(root, layers)
    for _ in range(2):
        read_everything(root)
    diff(root)
    calls = {"read": read_everything, "diff": diff, "compare": compare_runs, "naive torch": compare_naively}
    costs = medians(calls, root, rounds)
    print(f"large: {nbytes / 1e9:.2f} GB in both runs, kernels: {backend()[0]}, median of {rounds} rounds")
    for name, cost in costs.items():
        read, naive = (costs[other].wall / cost.wall for other in ("read", "naive torch"))
        speed = f"{nbytes / cost.wall / 1e9:6.2f} GB/s {cost.wall:6.2f} s, {cost.cpu:6.2f} s of processor"
        print(f"  {name:<12} {speed}  {read:5.0%} of reading {naive:6.1f} x naive", flush=True)


def measure_tiny(root: Path, num_sites: int, steps: int, rounds: int) -> None:
    """Print one row of the table of tiny tensors."""
    diff_runs.tiny(root, num_sites, steps)
    diff(root)
    pairs = num_sites * steps
    costs = medians({"diff": diff, "compare": compare_runs, "open": _open}, root, rounds)
    cells = ", ".join(f"{name} {cost.cpu / pairs * 1e3:.3f}" for name, cost in costs.items())
    peak = peak_memory(_start(root)) / 2**20
    print(f"tiny: {num_sites:,} sites x {steps} steps: {cells} ms of processor a pair; {peak:.0f} MiB", flush=True)


def _open(root: Path) -> None:
    for name in ("base", "target"):
        open_run(root / name).close()


def measure_memory(root: Path, rows: int, width: int, dims: str) -> None:
    """Print the anonymous memory of a diff of one huge pair, minus that of a minimal diff."""
    peaks = []
    for size in (8, rows):
        with tempfile.TemporaryDirectory(dir=root) as name:
            nbytes = diff_runs.huge(Path(name), size, width, dims)
            start = time.perf_counter()
            peaks.append(peak_memory(_start(Path(name))))
            elapsed = time.perf_counter() - start
    extra = (peaks[1] - peaks[0]) / 2**20
    print(
        f"memory: {rows:9,} x {width:5,} {dims:<18} {nbytes / 1e9:5.2f} GB {elapsed:6.2f} s "
        f"{extra:7.1f} MiB in addition to the mapping",
        flush=True,
    )


def peak_memory(process: "subprocess.Popen[bytes]") -> int:
    """Return the peak RssAnon of a process in bytes, sampled every millisecond until exit."""
    peak = 0
    ended = threading.Event()
    waiter = threading.Thread(target=lambda: (_finish(process), ended.set()))
    waiter.start()
    while not ended.wait(0.001):
        try:
            status = Path(f"/proc/{process.pid}/status").read_text()
        except OSError:
            continue
        found = [line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")]
        peak = max(peak, *(int(value) << 10 for value in found), 0)
    waiter.join()
    return peak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", type=Path, help="directory of the runs (default: the temporary directory)")
    parser.add_argument("--tiny", default=TINY, metavar="SITESxSTEPS,...", help=f"which runs (default {TINY})")
    parser.add_argument("--only", default="kernel,large,tiny,memory", help="parts to measure, separated by commas")
    args = parser.parse_args()
    parts = set(args.only.split(","))
    if "kernel" in parts:
        subprocess.run([sys.executable, str(Path(__file__).with_name("measure_ceiling.py"))], check=True)
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        root = Path(name)
        if "large" in parts:
            measure_large(root / "large", args.layers, args.rounds)
        for size in args.tiny.split(",") if "tiny" in parts else ():
            sites, steps = map(int, size.split("x"))
            measure_tiny(root / f"tiny{size}", sites, steps, args.rounds)
        for rows, width, dims in HUGE if "memory" in parts else ():
            measure_memory(root, rows, width, dims)


if __name__ == "__main__":
    main()
