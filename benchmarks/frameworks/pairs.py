"""Clean and buggy pairs of real frameworks on CPU: does `tapscope diff` pass the clean pairs and name the bugs?

    python -m benchmarks.frameworks.pairs [--suite SUITE ...] [--dtype float32 bfloat16] [--folder FOLDER]
                                          [--vllm-python VENV/bin/python]

Runs the suites whose packages are installed and prints a Markdown table. vLLM needs its own environment, see
vllm_cpu.py. The exit code is 0 if every answer is correct. Baselines are float32; no `--dims`, no map.
"""

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.frameworks import diffusers_cpu, megatron_cpu, transformers_cpu, vllm_cpu
from benchmarks.frameworks.pair import Suite, answer


def suites(vllm_python: str | None) -> list[Suite]:
    """Return all suites, including those whose packages are not installed."""
    found = [*megatron_cpu.SUITES, *transformers_cpu.SUITES, *diffusers_cpu.SUITES]
    return found + (vllm_cpu.suites(vllm_python) if vllm_python else [])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--suite", nargs="+", metavar="SUITE", help="suites whose names begin so (default: all)")
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--folder", type=Path, help="keep the runs in this directory (default: a temporary one)")
    parser.add_argument("--vllm-python", help="interpreter of an environment with vLLM for CPUs and tapscope")
    args = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    folder: Path = (args.folder or Path(tempfile.mkdtemp(prefix="pairs-"))).absolute()
    folder.mkdir(parents=True, exist_ok=True)
    wrong = asked = 0
    print("| framework | dtype | pair | exit | named | answer | s |\n|---|---|---|---|---|---|---|", flush=True)
    for suite in suites(args.vllm_python):
        if args.suite and not suite.name.lower().startswith(tuple(word.lower() for word in args.suite)):
            continue
        if missing := [name for name in suite.packages if importlib.util.find_spec(name.partition(".")[0]) is None]:
            print(f"{suite.name}: skipped, {', '.join(missing)} is not installed", file=sys.stderr)
            continue
        began = time.perf_counter()
        for pair in suite.pairs(folder, args.dtype):
            said = answer(pair)
            asked, wrong = asked + 1, wrong + (not said.is_right)
            took, began = time.perf_counter() - began, time.perf_counter()
            words = [pair.suite, pair.dtype, pair.bug, str(said.exit_code), said.what.replace("|", "\\|")]
            print(f"| {' | '.join(words)} | {'right' if said.is_right else 'WRONG'} | {took:.0f} |", flush=True)
    if not args.folder:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"\n{asked - wrong} of {asked} answers are right")
    return int(wrong > 0 or asked == 0)


if __name__ == "__main__":
    sys.exit(main())
