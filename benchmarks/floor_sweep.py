"""False positives and missed faults of the noise floor, over random models that were not used for tuning.

    python benchmarks/floor_sweep.py [--seeds 0-11] [--only benign|damage] [--dtypes fp32,bf16] [--json FILE]

Each seed is a random architecture with weights that look trained (floor_models.py). Benign: other attention code, split
batches, chunked prefill, sums in two parts, bf16 and fp16 against fp32 (floor_cases.py); a run that does not exit 0 is
a false positive. Damage: one module of one layer is damaged; detected means exit 1, named means that the first
divergence is that module. Prints one line per failed case, then the rates.
"""

import argparse
import json
import logging
import tempfile
import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from floor_cases import BENIGN, DAMAGE, Benign, capture, changed, damaged
from floor_models import make_model

from tapscope.comparator import Report, compare
from tapscope.core.site import parse_ranges
from tapscope.sources import open_run

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def judged(baseline: Path, target: Path) -> Report:
    """Return the comparison report of two runs."""
    with open_run(baseline) as one, open_run(target) as two:
        return compare(one, two)


def benign(what: str, model: Any, seed: int, root: Path, only: str) -> list[dict[str, Any]]:
    """Return one row per benign change."""
    rows, bases = [], {}
    for case in BENIGN:
        if only not in case.name:
            continue
        dtype = case.dtypes[0]
        if dtype not in bases:
            bases[dtype] = capture(changed(model, Benign("", (dtype, dtype))), root / f"base-{dtype}", seed=seed)
        report = judged(bases[dtype], capture(changed(model, case), root / "target", case.schedule, seed))
        bad = [f for f in report.findings if f.verdict.is_bad]
        passing = [f.ratio for f in report.findings if not f.verdict.is_bad and f.floor]
        row = {"kind": "benign", "model": what, "case": case.name, "bad": len(bad), "exit": report.exit_code}
        row |= {"closest": max(passing, default=0.0)}
        if bad:
            worst = max(bad, key=lambda f: f.ratio)
            row |= {"first": bad[0].site, "test": bad[0].test, "ratio": bad[0].ratio, "worst": worst.ratio}
        elif report.exit_code:
            row |= {"partial": list(report.coverage.partial)}
        rows.append(row)
    return rows


def damage(what: str, model: Any, seed: int, root: Path, dtypes: list[str], only: str) -> list[dict[str, Any]]:
    """Return one row per kind of damage and target dtype."""
    base, rows = capture(model, root / "base", seed=seed), []
    for each in DAMAGE:
        if only not in each.name or (made := damaged(model, each, seed)) is None:
            continue
        path, other = made
        for dtype in dtypes:
            report = judged(base, capture(other.to(_DTYPES[dtype]), root / "target", seed=seed))
            first = report.first_divergence
            row = {"kind": "damage", "model": what, "case": f"{each.name}, fp32/{dtype}", "at": path}
            row |= {"subtle": each.subtle, "detected": bool(report.num_bad), "named": first.module if first else ""}
            row |= {"right": first is not None and first.module == path, "also": len(report.divergences) - 1}
            row |= {"test": first.finding.test, "ratio": first.finding.ratio} if first else {}
            rows.append(row)
    return rows


def summary(rows: list[dict[str, Any]]) -> list[str]:
    """Return the rates, by case."""
    piles: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        piles[row["kind"], row["case"]].append(row)
        piles[row["kind"], "all"].append(row)
    lines = []
    for (kind, case), pile in sorted(piles.items()):
        n = len(pile)
        if kind == "benign":
            flagged = sum(row["exit"] != 0 for row in pile)
            closest = max(row["closest"] for row in pile)
            lines.append(f"benign  {case:40} {flagged:4}/{n} flagged, closest call {closest:.2f} of the floor")
        else:
            found, right, alone = (
                sum(map(bool, column))
                for column in zip(
                    *((r["detected"], r["right"], r["right"] and not r["also"]) for r in pile), strict=True
                )
            )
            lines.append(f"damage  {case:40} {found:4}/{n} detected, {right}/{n} named, {alone}/{n} alone")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=parse_ranges, default=parse_ranges("0-11"))
    parser.add_argument("--only", choices=("benign", "damage"))
    parser.add_argument("--case", default="", help="only cases whose name contains this")
    parser.add_argument("--dtypes", default="fp32,bf16", help="dtypes of the damaged target")
    parser.add_argument("--json", type=Path, help="append every row to this file")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in sorted(args.seeds):
            what, model = make_model(seed)
            found: list[dict[str, Any]] = []
            if args.only != "damage":
                found += benign(what, model, seed, Path(folder), args.case)
            if args.only != "benign":
                found += damage(what, model, seed, Path(folder), args.dtypes.split(","), args.case)
            for row in found:
                if row.get("exit") or row.get("right") is False:
                    print(" ".join(f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()))
            rows += found
            if args.json:
                with args.json.open("a") as file:
                    file.writelines(json.dumps(row) + "\n" for row in found)
    print("\n".join(summary(rows)))


if __name__ == "__main__":
    main()
