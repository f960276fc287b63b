"""Comparison speed of `torch.save` dumps, relative to reading them and to comparing the same values as runs.

    python benchmarks/diff_dumps.py [--layers 4] [--rounds 3] [--tiny 1000] [--dir /dev/shm]

*large*: `--layers` × 10 sites × 2 TP ranks, float32 against bfloat16, 2 to 4 MiB per shard; a fifth of the sites are
partial sums. *tiny*: milliseconds per pair of files of 64 values. Rounds are interleaved and medians shown. CPU time is
printed next to wall time, because other work on the machine affects only wall time.

Predicted before hashes and statistics were computed on first use, partial sums were added row by row in the kernel, and
tiny files were read in batches: large 2.4 to 2.6 GB per CPU second (profile: statistics 21 %, sums in numpy 13 %), and
3 only with less Python per site; tiny 0.35 ms.
"""

import argparse
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests/support"))

from sglang_dumps import SglangDump

from tapscope.comparator import compare
from tapscope.sources import open_run

ROWS, WIDTH = 1024, 1024
"""Shape of a shard."""


def make_large(root: Path, layers: int) -> int:
    """Write two dumps of large tensors; return their payload bytes."""
    torch.manual_seed(3)
    nbytes = 0
    for name, dtype in (("base", torch.float32), ("target", torch.bfloat16)):
        torch.manual_seed(3)
        dump = SglangDump(root / name, tp=2)
        dump.step(input_ids=list(range(ROWS)), positions=list(range(ROWS)), seq_lens=[ROWS], rids=["a"])
        for layer in range(layers):
            for site in range(10):
                shards = [torch.randn(ROWS, WIDTH) for _ in range(2)]
                dims = "t h[tp:partial]" if site in (3, 7) else "t h[tp]"
                values = {rank: shard.to(dtype) for rank, shard in enumerate(shards)}
                nbytes += sum(value.nbytes for value in values.values())
                dump.dump(f"s{site}", values, dims=dims, layer_id=layer)
    return nbytes


def make_tiny(root: Path, count: int) -> None:
    """Write two dumps of ``count`` small files each."""
    for name in ("base", "target"):
        torch.manual_seed(3)
        dump = SglangDump(root / name)
        dump.step(input_ids=[1], positions=[0], seq_lens=[1], rids=["a"])
        for number in range(count):
            dump.dump(f"s{number}", torch.randn(1, 64), dims="t h")


def read_everything(root: Path) -> None:
    """Read every payload byte once."""
    for name in ("base", "target"):
        with open_run(root / name) as run:
            for record in run.records:
                if record.entry is not None:
                    run.array(record).reshape(-1).view("u1").sum(dtype="u1")


def compare_dumps(root: Path) -> None:
    """Compare both dumps."""
    with open_run(root / "base") as one, open_run(root / "target") as two:
        assert compare(one, two).exit_code == 0


def open_dumps(root: Path) -> None:
    """Open both dumps without comparing."""
    for name in ("base", "target"):
        with open_run(root / name):
            pass


def medians(calls: dict[str, Callable[[Path], None]], root: Path, rounds: int) -> dict[str, tuple[float, float]]:
    """Return the median wall and CPU seconds of each call."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for number in range(rounds + 1):
        for name, call in calls.items():
            wall, cpu = time.perf_counter(), _cpu()
            call(root)
            if number:
                found[name].append((time.perf_counter() - wall, _cpu() - cpu))
    return {
        name: (statistics.median(w for w, _ in all_), statistics.median(c for _, c in all_))
        for name, all_ in found.items()
    }


def _cpu() -> float:
    return sum(resource.getrusage(resource.RUSAGE_SELF)[:2])


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tiny", type=int, default=1000)
    parser.add_argument("--dir", default=None)
    args = parser.parse_args()
    calls = {"open": open_dumps, "compare": compare_dumps}
    with tempfile.TemporaryDirectory(dir=args.dir) as place:
        root = Path(place) / "large"
        root.mkdir()
        nbytes = make_large(root, args.layers)
        print(f"large: {nbytes / 1e9:.2f} GB")
        for name, (wall, cpu) in medians(calls, root, args.rounds).items():
            speeds = f"{nbytes / wall / 1e9:5.2f} GB/s {nbytes / cpu / 1e9:5.2f} GB per cpu second"
            print(f"  {name:<8} {wall:6.2f} s wall {cpu:6.2f} s cpu {speeds}")
        root = Path(place) / "tiny"
        root.mkdir()
        make_tiny(root, args.tiny)
        print(f"tiny: {args.tiny} pairs")
        for name, (wall, cpu) in medians(calls, root, args.rounds).items():
            print(f"  {name:<8} {wall / args.tiny * 1e3:6.3f} ms wall {cpu / args.tiny * 1e3:6.3f} ms cpu a pair")


if __name__ == "__main__":
    main()
