"""Ablation of the noise floor's effects and of the detectors: verdicts with and without each.

    python -m benchmarks.floor_ablation --cache DIR [--only GLOB] [--seeds 0-5] [--every N] [--jobs J]
    python -m benchmarks.floor_ablation --cache DIR --capture     # only record the runs

The pairs of runs are those of the verdict bench (every case that needs no GPU) and of the floor sweep (floor_sweep.py).
Runs are recorded once and kept in DIR, and so are outcomes (results.jsonl; delete it after changing the comparator).
Each pair is compared with the full model, and again without each effect and detector that applied to any of its sites:
no other part can change its verdicts.

The table has one row per effect or detector: the pairs it applied to; bugs that are no longer named without it (and of
those the missed ones: the runs agree); bugs that are named only without it; benign changes that are reported only
without it, and those reported only with it. A part that changes no verdict is a candidate for deletion.
"""

import argparse
import json
import logging
import os
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

from msgspec import structs

HERE = Path(__file__).resolve().parent
INDEX = "index.jsonl"


@dataclass
class Worth:
    """Effect of disabling one part, over all pairs."""

    pairs: int = 0
    lost: list[str] = field(default_factory=list)
    """Bugs that are no longer named."""
    missed: list[str] = field(default_factory=list)
    """Those of :attr:`lost` that pass."""
    found: list[str] = field(default_factory=list)
    """Bugs that are named only without the part."""
    alarms: list[str] = field(default_factory=list)
    """Benign changes that are reported only without the part."""
    calmed: list[str] = field(default_factory=list)
    """Benign changes that are reported only with the part."""


# ---- recording


def record_bench(root: Path, stem: str) -> list[dict[str, Any]]:
    """Record both runs of every case in one file of the verdict bench."""
    from benchmarks.verdict.bench import Bench

    folder, found = root / "bench" / stem, []
    folder.mkdir(parents=True)
    bench = Bench(folder)
    for case in bench_cases():
        if case.path.stem != stem:
            continue
        try:
            baseline = bench.clean(case.model, case.baseline)
            target = bench.clean(case.model, case.target) if case.patch is None else bench.patched(case)
        except Exception as error:  # noqa: BLE001 - a case that cannot run here is skipped with a message
            print(f"left out: {case.name}: {type(error).__name__}", flush=True)
            continue
        sides = {"baseline": str(baseline.relative_to(root)), "target": str(target.relative_to(root))}
        found.append({"kind": "bench", "name": case.name, "is_bug": case.is_bug, **sides})
    bench.close()
    return found


def record_sweep(root: Path, seed: int) -> list[dict[str, Any]]:
    """Record the runs of one seed of the floor sweep, with targets in float32 and bfloat16."""
    import torch

    from benchmarks.floor_cases import BENIGN, DAMAGE, Benign, capture, changed, damaged
    from benchmarks.floor_models import make_model

    what, model = make_model(seed)
    folder = root / "sweep" / str(seed)
    folder.mkdir(parents=True)
    found, bases = [], {}
    for number, case in enumerate(BENIGN):
        dtype = case.dtypes[0]
        if dtype not in bases:
            bases[dtype] = capture(changed(model, Benign("", (dtype, dtype))), folder / f"base-{dtype}", seed=seed)
        target = capture(changed(model, case), folder / f"benign-{number}", case.schedule, seed)
        found.append(_entry(root, f"{what}: {case.name}", bases[dtype], target))
    for number, each in enumerate(DAMAGE):
        if (made := damaged(model, each, seed)) is None:
            continue
        path, other = made
        for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            target = capture(other.to(dtype), folder / f"damage-{number}-{name}", seed=seed)
            entry = _entry(root, f"{what}: {each.name}, fp32/{name}", bases[torch.float32], target)
            found.append(entry | {"is_bug": True, "expect": path})
    return found


def _entry(root: Path, name: str, baseline: Path, target: Path) -> dict[str, Any]:
    sides = {"baseline": str(baseline.relative_to(root)), "target": str(target.relative_to(root))}
    return {"kind": "sweep", "name": name, "is_bug": False, **sides}


def bench_cases() -> list[Any]:
    """Return the cases of the verdict bench that need no GPU."""
    from benchmarks.verdict.catalogue import load

    folder = HERE / "verdict"
    cases = [*load(folder / "bugs", bugs=True), *load(folder / "benign", bugs=False)]
    return [case for case in cases if not case.needs_cuda]


def record(root: Path, only: str, seeds: Iterable[int], jobs: int) -> None:
    """Record the runs that are missing in DIR."""
    stems = sorted({case.path.stem for case in bench_cases() if fnmatchcase(case.path.stem, only)})
    tasks: list[tuple[Callable[..., list[dict[str, Any]]], Any]] = []
    tasks += [(record_bench, stem) for stem in stems if not (root / "bench" / stem).exists()]
    tasks += [(record_sweep, seed) for seed in seeds if not (root / "sweep" / str(seed)).exists()]
    with _pool(jobs) as pool, (root / INDEX).open("a") as index:
        for future in as_completed([pool.submit(task, root, what) for task, what in tasks]):
            index.writelines(json.dumps(entry) + "\n" for entry in future.result())
            index.flush()


# ---- comparing


@contextmanager
def observed(applied: set[str]) -> Iterator[None]:
    """Context manager: collect the names of effects and detectors that apply to comparisons of two runs.

    Pairs are measured once, and the search for causes is disabled.
    """
    from tapscope.comparator.detectors.table import DETECTORS
    from tapscope.comparator.noise_floor.error_model import ErrorModel

    made = ErrorModel.__init__

    def make(self: ErrorModel, *args: Any, **options: Any) -> None:
        made(self, *args, **options)
        applied.update(effect.name for effect in self.effects if effect.values)

    def watch(detect: Callable[[Any, Any], Any], name: str) -> Callable[[Any, Any], Any]:
        def run(self: Any, evidence: Any) -> Any:
            found = detect(self, evidence)
            if _differs(evidence, found):
                applied.add(name)
            return found

        return run

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(ErrorModel, "__init__", make))
        for detector in DETECTORS:
            kind = type(detector)
            stack.enter_context(mock.patch.object(kind, "detect", watch(kind.detect, detector.name)))
        stages = import_module("tapscope.comparator.compare")
        stack.enter_context(mock.patch.object(stages, "measure_pairs", _measured_once()))
        stack.enter_context(mock.patch("tapscope.comparator.explain.explain.explain", lambda found, context: found))
        yield


def _measured_once() -> Callable[..., Any]:
    """Return the measuring stage with a cache keyed by the compared steps; no effect or detector affects this stage."""
    from tapscope.comparator.pipeline.measure_pairs import measure_pairs

    known: dict[Any, Any] = {}

    def measure(matched: Any, progress: Any = None) -> Any:
        steps = matched.opened.options.steps
        if steps not in known:
            known[steps] = measure_pairs(matched, progress)
        known[steps].analyzer.preparer.leave_out_only({})
        return structs.replace(known[steps], matched=matched)

    return measure


def _differs(before: Any, after: Any) -> bool:
    """Return whether a detector changed the evidence; unchanged objects are identical."""
    for name in ("pairs", "findings"):
        old, new = getattr(before, name), getattr(after, name)
        if len(old) != len(new) or any(a is not b for a, b in zip(old, new, strict=True)):
            return True
    names = ("changes", "missing_gradients", "time_embeddings", "kink_crossings")
    return any(len(getattr(before, name)) != len(getattr(after, name)) for name in names)


def outcomes(root: Path, entry: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return (pair, disabled part -> outcome); the empty name is the full model."""
    from tapscope.comparator.detectors.table import NAMES
    from tapscope.comparator.noise_floor.error_model import OPTIONAL
    from tapscope.sources import open_run

    applied: set[str] = set()
    with observed(applied), open_run(root / entry["baseline"]) as one, open_run(root / entry["target"]) as two:
        found = {"": _outcome((one, two), entry, "")}
        for name in (*OPTIONAL, *NAMES):
            if name in applied:
                found[name] = _outcome((one, two), entry, name)
    return entry, found


def _outcome(runs: tuple[Any, Any], entry: dict[str, Any], disabled: str) -> str:
    """Return ``good`` for a named bug or an agreeing benign change, ``pass`` for a bug whose runs agree, else
    ``bad``."""
    from tapscope.comparator import CompareOptions, compare

    options = CompareOptions(disabled=frozenset({disabled} - {""}))
    report: Any
    try:
        report = compare(*runs, options)
    except Exception as error:  # noqa: BLE001 - a refusal is an outcome
        report = error
    if entry["kind"] == "bench":
        from benchmarks.verdict.outcome import Score, judged

        score = judged(_CASES[entry["name"]], report, 1.0).score
        return "good" if score.is_good else "pass" if score is Score.MISSED else "bad"
    if isinstance(report, Exception):
        return "bad"
    if not entry["is_bug"]:
        return "good" if report.exit_code == 0 else "bad"
    if not report.num_bad:
        return "pass"
    first = report.first_divergence
    return "good" if first is not None and first.module == entry["expect"] else "bad"


_CASES: dict[str, Any] = {}


def _prepare() -> None:
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    _CASES.update((case.name, case) for case in bench_cases())


def _pool(jobs: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_prepare)


def ablate(root: Path, entries: Sequence[dict[str, Any]], results: Path, jobs: int) -> None:
    """Compare the pairs that are missing in ``results``, and append each outcome."""
    done = {line["name"] for line in _read(results)}
    with _pool(jobs) as pool, results.open("a") as file:
        missing = [entry for entry in entries if entry["name"] not in done]
        for future in as_completed([pool.submit(outcomes, root, entry) for entry in missing]):
            entry, found = future.result()
            file.write(json.dumps({"name": entry["name"], "is_bug": entry["is_bug"], "outcomes": found}) + "\n")
            file.flush()


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def weigh(results: Sequence[dict[str, Any]]) -> tuple[dict[str, int], dict[str, Worth]]:
    """Return (outcomes of the full model, worth of each part)."""
    totals: dict[str, int] = defaultdict(int)
    worth: dict[str, Worth] = defaultdict(Worth)
    for result in results:
        name, is_bug, found = result["name"], result["is_bug"], result["outcomes"]
        full = found[""]
        totals[f"{'bug' if is_bug else 'benign'} {full}"] += 1
        for left_out, outcome in found.items():
            part = worth[left_out]
            part.pairs += 1
            if full == "good" and outcome != "good":
                (part.lost if is_bug else part.alarms).append(name)
                if outcome == "pass":
                    part.missed.append(name)
            elif full != "good" and outcome == "good":
                (part.found if is_bug else part.calmed).append(name)
    return totals, worth


def lines(totals: dict[str, int], worth: dict[str, Worth]) -> Iterator[str]:
    """Yield the lines of the table in Markdown."""
    from tapscope.comparator.detectors.table import NAMES
    from tapscope.comparator.noise_floor.error_model import OPTIONAL

    good, bad = totals["bug good"], totals["bug bad"] + totals["bug pass"]
    yield f"Full model: {good} of {good + bad} bugs named, {totals['bug pass']} missed; "
    yield f"{totals['benign bad']} of {totals['benign bad'] + totals['benign good']} benign changes reported."
    yield ""
    yield "| left out | pairs it applies to | bugs lost (missed) | bugs gained | false alarms gained (removed) |"
    yield "|---|---|---|---|---|"
    for title, names in (("effect", OPTIONAL), ("detector", NAMES)):
        for name in names:
            part = worth.get(name, Worth())
            lost = f"{len(part.lost)} ({len(part.missed)})"
            alarms = f"{len(part.alarms)} ({len(part.calmed)})"
            yield f"| {title} `{name}` | {part.pairs} | {lost} | {len(part.found)} | {alarms} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, metavar="DIR", help="where the runs are kept")
    parser.add_argument("--only", default="*", metavar="GLOB", help="files of the verdict bench (default: all)")
    parser.add_argument("--seeds", default="0-5", metavar="LIST", help="seeds of the floor sweep; empty for none")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="compare every N-th pair only")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, metavar="J", help="worker processes")
    parser.add_argument("--capture", action="store_true", help="only record the runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the names behind each number to this file")
    args = parser.parse_args()
    from tapscope.core.site import parse_ranges

    args.cache.mkdir(parents=True, exist_ok=True)
    record(args.cache, args.only, sorted(parse_ranges(args.seeds)) if args.seeds else (), args.jobs)
    if args.capture:
        return
    entries, results = _read(args.cache / INDEX), args.cache / "results.jsonl"
    chosen = [e for e in entries if e["kind"] == "sweep" or fnmatchcase(e["name"].partition("[")[0], args.only)]
    ablate(args.cache, chosen[:: args.every], results, args.jobs)
    totals, worth = weigh(_read(results))
    print("\n".join(lines(totals, worth)))
    if args.json:
        args.json.write_text(json.dumps({name: vars(part) for name, part in worth.items()}, indent=1))


if __name__ == "__main__":
    main()
