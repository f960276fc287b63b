"""The engine of this tree against that of an earlier commit: same model and requests, all features off.

    python benchmarks/engine_before.py COMMIT [--case equal-1 equal-8 ragged] [--new 32] [--rounds 5]

Each engine runs in its own process, from its own tree and with its own C++ library, which is built here (minutes). The
requests are those of `engine_cpu.py`, which must exist in the commit; float32, one thread, prefix cache flushed. A
ratio is the earlier engine's CPU time over the current one's: above 1, the current one is faster. Median of rounds,
interleaved; the number of equal outputs is printed.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from engine_cpu import cases, save

_HERE = Path(__file__).resolve().parent.parent
_SHAPE, _VOCAB = "29m", 4096
_WORKER = """
import json, sys, time
import tapscope
import torch
from engine_cpu import by_engine, cases
from tapscope.engine import LLM

root, folder, vocab, new = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
assert tapscope.__file__.startswith(root), f"{tapscope.__file__} is not of {root}"
torch.set_num_threads(1)
every = cases(vocab, new)
with LLM(folder, dtype="float32", device="cpu") as llm:
    for line in sys.stdin:
        begin = time.process_time()
        ids = by_engine(llm, every[line.strip()])
        print(json.dumps([time.process_time() - begin, ids]), flush=True)
"""


class Worker:
    """An engine in its own process, from the tree ``root``."""

    def __init__(self, root: Path, model: Path, new: int) -> None:
        paths = os.pathsep.join(map(str, (root / "src", root, root / "benchmarks")))
        command = [sys.executable, "-c", _WORKER, str(root), str(model), str(_VOCAB), str(new)]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": paths}
        )

    def run(self, case: str) -> tuple[float, list[list[int]]]:
        """Return the CPU seconds and the outputs of a case of `engine_cpu.py`."""
        assert self._process.stdin is not None, "the worker is asked over a pipe"
        assert self._process.stdout is not None, "the worker answers over a pipe"
        self._process.stdin.write(f"{case}\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            sys.exit(f"the engine of {self._process.args} ended with exit code {self._process.wait()}")
        seconds, ids = json.loads(line)
        return seconds, ids

    def end(self) -> None:
        """Terminate the process by closing its input."""
        self._process.communicate()


def check_out(commit: str, folder: Path) -> None:
    """Check out ``commit`` in ``folder`` and build its C++ library."""
    packed = subprocess.run(["git", "-C", _HERE, "archive", commit], check=True, stdout=subprocess.PIPE).stdout
    folder.mkdir()
    subprocess.run(["tar", "-x", "-C", folder], check=True, input=packed)
    build = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    subprocess.run(build, check=True, cwd=folder, stderr=subprocess.DEVNULL)


def compare(case: str, workers: dict[str, Worker], rounds: int) -> None:
    """Print the median ratio of one case."""
    taken: dict[str, list[float]] = {name: [] for name in workers}
    answers: dict[str, Any] = {}
    names = list(workers)
    for turn in range(rounds + 1):  # the first round is warm-up
        for name in names[turn % 2 :] + names[: turn % 2]:
            seconds, answers[name] = workers[name].run(case)
            if turn:
                taken[name].append(seconds)
    ratios = [before / now for before, now in zip(taken["before"], taken["now"], strict=True)]
    same = sum(a == b for a, b in zip(answers["before"], answers["now"], strict=True))
    each = ", ".join(f"{ratio:.2f}" for ratio in ratios)
    now = 1e3 * statistics.median(taken["now"])
    print(
        f"{case:<9} {statistics.median(ratios):.2f}   ({each})   now {now:.0f} ms; {same}/{len(answers['now'])} "
        "answers equal",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("commit")
    parser.add_argument("--case", nargs="+", choices=list(cases(_VOCAB, 8)), default=["equal-1", "equal-8", "ragged"])
    parser.add_argument("--new", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        check_out(args.commit, folder / "before")
        save(_SHAPE, "float32", folder / "model")
        roots = {"before": folder / "before", "now": _HERE}
        workers = {name: Worker(root, folder / "model", args.new) for name, root in roots.items()}
        for case in args.case:
            compare(case, workers, args.rounds)
        for worker in workers.values():
            worker.end()


if __name__ == "__main__":
    main()
