"""The verdict bench: seeded bugs that `tapscope diff` should name, and benign changes that it should not report.

    python -m benchmarks.verdict [--bugs DIR] [--benign DIR] [--only GLOB] [--device cuda] [--json]
    python -m benchmarks.verdict --generate SEED [--cases N] [--jobs J] [--only gen-SEED-NUMBER] [--json]
    python -m benchmarks.verdict --seeds-of COMMIT

Exits with 1 when a strong bug is missed or a benign change is flagged, and with 2 for a bad case file.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, closing
from dataclasses import asdict
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


def main(argv: list[str] | None = None) -> int:
    args = _arguments(argv)
    if args.seeds_of:
        print(*seeds_of(args.seeds_of))
        return 0
    from tapscope.core.errors import TapscopeError

    try:
        return _run(args) if args.generate is None else _run_generated(args)
    except TapscopeError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.verdict", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bugs", type=Path, metavar="DIR", help="directory of bug files that replace the catalogue's")
    parser.add_argument(
        "--benign", type=Path, metavar="DIR", help="directory of benign files that replace the catalogue's"
    )
    parser.add_argument(
        "--only", action="append", default=[], metavar="GLOB", help="run only cases whose name matches; repeatable"
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="run both sides of every case that fits one GPU on this device"
    )
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the recorded runs in this directory")
    parser.add_argument("--list", action="store_true", help="list the cases and run nothing")
    parser.add_argument(
        "--generate", type=int, metavar="SEED", help="run random cases of this seed instead of the catalogue"
    )
    parser.add_argument("--seeds-of", metavar="COMMIT", help="print the three seeds of a commit's full hash and exit")
    parser.add_argument("--cases", type=int, default=200, metavar="N", help="number of generated cases (default 200)")
    parser.add_argument(
        "--jobs", type=int, default=os.cpu_count() or 1, metavar="J", help="worker processes for generated cases"
    )
    parser.add_argument("--json", action="store_true", help="JSON Lines: the cases, then the score")
    return parser.parse_args(argv)


def seeds_of(commit: str) -> tuple[int, int, int]:
    """Return the seeds of a commit: the first 18 digits of its hash as three hexadecimal numbers of six digits."""
    first, second, third = (int(commit[i : i + 6], 16) for i in (0, 6, 12))
    return first, second, third


def _run(args: argparse.Namespace) -> int:
    cases = list(_chosen(args))
    if args.list:
        for case in cases:
            print(f"{case.name:<44} {case.family:<11} {case.visibility or 'benign':<8} {case.about}")
        return 0
    import torch

    from benchmarks.verdict.bench import Bench
    from benchmarks.verdict.report import exit_code, line, score_lines
    from tapscope.core.errors import UsageError

    torch.set_num_threads(1)
    outcomes = []
    cases, left_out = _placed(cases, args.device)
    if not cases:
        raise UsageError(f"no case is left to run; {'; '.join(left_out)}")
    with ExitStack() as stack:
        log = logging.getLogger("tapscope")
        stack.callback(log.setLevel, log.level)
        log.setLevel(logging.ERROR)  # warnings of taps that never fired are expected
        folder = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="verdict-")))
        bench = stack.enter_context(closing(Bench(folder)))
        for case in cases:
            outcomes.append(bench.run(case))
            print(json.dumps(_to_json(outcomes[-1])) if args.json else line(outcomes[-1]), flush=True)
    if args.json:
        lines = [*score_lines(outcomes), *left_out]
        print(json.dumps({"type": "score", "exit_code": exit_code(outcomes), "lines": lines}))
    else:
        print("", *score_lines(outcomes), *left_out, sep="\n")
    return exit_code(outcomes)


def _run_generated(args: argparse.Namespace) -> int:
    from benchmarks.verdict.generator.cases import described, groups, name_of
    from benchmarks.verdict.generator.summary import exit_code, line, summary
    from benchmarks.verdict.generator.workers import run_groups
    from tapscope.core.errors import UsageError

    if args.bugs or args.benign or args.device:
        raise UsageError("--generate draws its own cases: leave out --bugs, --benign and --device")
    if args.cases < 1 or args.jobs < 1:
        raise UsageError(f"--cases {args.cases} --jobs {args.jobs}: both must be at least 1")
    known = {name_of(args.generate, number): number for number in range(args.cases)}
    unmatched = [glob for glob in args.only if not any(fnmatchcase(name, glob) for name in known)]
    if unmatched:
        raise UsageError(
            f"no case matches {unmatched[0]!r}; the cases are {min(known)} to gen-{args.generate}-{args.cases - 1}"
        )
    numbers = [n for name, n in known.items() if not args.only or any(fnmatchcase(name, glob) for glob in args.only)]
    if args.list:
        print("\n".join(described(args.generate, number) for number in numbers))
        return 0
    found = []
    for judged in run_groups(groups(args.generate, numbers), args.jobs, args.keep):
        found.append(judged)
        print(json.dumps(judged.to_json()) if args.json else line(judged), flush=True)
    if args.json:
        print(json.dumps({"type": "score", "exit_code": exit_code(found), "lines": list(summary(found))}))
    else:
        print("", *summary(found), sep="\n")
    return exit_code(found)


def _chosen(args: argparse.Namespace) -> Iterator[Any]:
    """Yield the selected cases; --bugs or --benign alone replaces both parts of the catalogue."""
    from benchmarks.verdict.catalogue import load
    from tapscope.core.errors import UsageError

    own = args.bugs or args.benign
    cases = load(args.bugs or HERE / "bugs", bugs=True) if args.bugs or not own else []
    cases += load(args.benign or HERE / "benign", bugs=False) if args.benign or not own else []
    unmatched = [glob for glob in args.only if not any(_matches(case.name, glob) for case in cases)]
    if unmatched:
        raise UsageError(f"no case matches {unmatched[0]!r}; --list shows the {len(cases)} cases")
    for case in cases:
        if not args.only or any(_matches(case.name, glob) for glob in args.only):
            yield case


def _placed(cases: list[Any], device: str | None) -> tuple[list[Any], list[str]]:
    """Return (cases that this machine can run, notes on the others); both sides run on ``device`` if given."""
    import torch

    kept = [case for case in cases if device != "cuda" or case.fits_one_gpu]
    notes = [f"left out: {len(cases) - len(kept)} cases that do not fit one GPU"] if len(kept) < len(cases) else []
    placed = [case.on(device) for case in kept] if device else kept
    if torch.cuda.is_available():
        return placed, notes
    on_cpu = [case for case in placed if not case.needs_cuda]
    if len(on_cpu) < len(placed):
        notes.append(f"left out: {len(placed) - len(on_cpu)} cases that need CUDA, which is not available")
    return on_cpu, notes


def _matches(name: str, glob: str) -> bool:
    return glob in (name, name.partition("[")[0]) or fnmatchcase(name, glob)


def _to_json(outcome: Any) -> dict[str, Any]:
    case = outcome.case
    fields = {
        "type": "case",
        "name": case.name,
        "family": case.family,
        "model": asdict(case.model),
        "expected": list(case.expect),
    }
    fields |= {"visibility": case.visibility or "benign", "patches": case.patches, "about": case.about}
    fields |= {"baseline": asdict(case.baseline), "target": asdict(case.target), "where": dict(case.where)}
    measured = ("named", "site", "place", "others", "detail", "seconds", "ratio", "effect", "cause")
    return (
        fields
        | {"score": str(outcome.score), "cause_score": str(outcome.cause_score)}
        | {name: getattr(outcome, name) for name in measured}
    )


if __name__ == "__main__":
    sys.exit(main())
