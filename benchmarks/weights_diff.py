"""`tapscope diff` of two equal bf16 checkpoints: CPU time, wall time and anonymous memory.

    python benchmarks/weights_diff.py [--gb 8] [--shards 4] [--rounds 3] [--dir DIR] [--changed] [--jobs 1]

Writes two checkpoints of `--gb` each below DIR (default: the directory for temporary files), which must fit the page
cache, and compares them in separate processes. GB/s are bytes of both sides per time. On a loaded machine, only the CPU
time is meaningful. *anonymous*: peak memory of the process and its children, sampled every 20 ms.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

_ROWS, _COLUMNS = 4096, 8192  # 64 MiB


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=8.0)
    for flag, default in (("--shards", 4), ("--rounds", 3), ("--jobs", 1)):
        parser.add_argument(flag, type=int, default=default)
    parser.add_argument("--dir", default=None)
    parser.add_argument("--changed", action="store_true", help="change one row of one tensor")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as name:
        baseline, target = Path(name, "baseline"), Path(name, "target")
        _write(baseline, args.gb, args.shards)
        shutil.copytree(baseline, target)
        if args.changed:
            _change(target)
        nbytes = sum(path.stat().st_size for side in (baseline, target) for path in side.glob("*.safetensors"))
        command = [sys.executable, "-m", "tapscope", "diff", str(baseline), str(target), "--jobs", str(args.jobs)]
        found = [_measured(command, int(args.changed)) for _ in range(args.rounds + 1)][1:]
        cpu, wall, memory = (statistics.median(column) for column in zip(*found, strict=True))
        print(
            f"{nbytes / 1e9:.1f} GB: CPU time {cpu:.2f} s ({nbytes / cpu / 1e9:.1f} GB/s), wall time {wall:.2f} s",
            end=" ",
        )
        print(f"({nbytes / wall / 1e9:.1f} GB/s), {memory / 2**20:.0f} MiB anonymous, load {os.getloadavg()[0]:.1f}")


def _write(folder: Path, gb: float, num_shards: int) -> None:
    folder.mkdir()
    torch.manual_seed(0)
    num_layers = max(num_shards, round(gb * 1e9 / (2 * _ROWS * _COLUMNS)))
    index = dict[str, str]()
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        names = [f"model.layers.{i}.mlp.up_proj.weight" for i in range(shard, num_layers, num_shards)]
        save_file({name: torch.empty(_ROWS, _COLUMNS, dtype=torch.bfloat16).normal_() for name in names}, folder / file)
        index |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def _change(folder: Path) -> None:
    path = min(folder.glob("*.safetensors"))
    with path.open("r+b") as file:
        file.seek(-2 * _COLUMNS, os.SEEK_END)
        row = file.read(2 * _COLUMNS)
        file.seek(-2 * _COLUMNS, os.SEEK_END)
        file.write(row[::-1])


def _measured(command: list[str], code: int) -> tuple[float, float, int]:
    """Return (CPU seconds, wall seconds, bytes of anonymous memory)."""
    before, began, most = os.times(), time.perf_counter(), 0
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        while process.poll() is None:
            most = max(most, sum(map(_anonymous, [process.pid, *_children(process.pid)])))
            time.sleep(0.02)
        wall, after = time.perf_counter() - began, os.times()
        assert process.stdout is not None
        assert process.returncode == code, process.stdout.read()
    return after.children_user + after.children_system - before.children_user - before.children_system, wall, most


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _anonymous(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:  # the process has ended
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon:"))


if __name__ == "__main__":
    main()
