"""`tapscope bench --baseline FILE`: compare a result with an earlier one."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapscope.core.errors import DataError, UsageError

if TYPE_CHECKING:
    from tapscope.dashboard.model.bench_result import BenchResult


def read(file: Path) -> "BenchResult":
    """Read the result in ``file``, as written by ``tapscope bench -o``; raises DataError."""
    try:
        stored = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{file} is not JSON: {error}") from None
    return _result(stored, str(file))


def compare(baseline: "BenchResult", result: Mapping[str, Any], file: Path, tolerance: float) -> dict[str, Any]:
    """Compare every metric present in both results and return JSON values.

    A metric is a regression if it is worse by more than ``tolerance``, relative to the baseline. p99 metrics are
    skipped, because few requests determine them. Raises UsageError if the configurations differ.
    """
    from tapscope.dashboard.model.bench_result import METRICS

    measured = _result(result, "the result")
    theirs, ours = asdict(baseline.config), asdict(measured.config)
    different = [f"{name} {theirs[name]!r}, not {ours[name]!r}" for name in ours if theirs[name] != ours[name]]
    if different:
        raise UsageError(f"{file} measured {'; '.join(different)}; --baseline needs the same configuration")
    metrics = []
    for metric in METRICS:
        before, now = baseline.metrics.get(metric.name), measured.metrics.get(metric.name)
        if not before or now is None or metric.name.endswith("_p99"):
            continue
        change = now / before - 1
        worse = -change if metric.higher_is_better else change
        verdict = "regression" if worse > tolerance else "improvement" if worse < -tolerance else "within tolerance"
        values = {"baseline": before, "value": now, "change": change, "verdict": verdict}
        metrics.append({"name": metric.name, "label": metric.label, "unit": metric.unit} | values)
    worse_ones = [metric for metric in metrics if metric["verdict"] == "regression"]
    return {"file": str(file), "tolerance": tolerance, "num_regressions": len(worse_ones), "metrics": metrics}


def lines(compared: Mapping[str, Any]) -> list[str]:
    """Format the comparison as lines of text."""
    count = compared["num_regressions"]
    summary = f"{count} of {len(compared['metrics'])} metrics are worse by more than {compared['tolerance']:.3g}"
    text = ["", f"baseline  {compared['file']}: {summary}"]
    for metric in compared["metrics"]:
        values = f"{metric['baseline']:>12,.2f}{metric['value']:>12,.2f} {metric['unit']:<11}{metric['change']:>+8.1%}"
        text.append(f"  {metric['verdict']:<17}{metric['label']:<19}{values}")
    return text


def _result(stored: Any, name: str) -> "BenchResult":
    from tapscope.dashboard.model.bench_result import bench_results

    results = bench_results(stored)
    if len(results) != 1:
        raise DataError(f"{name} is not one benchmark result, as `tapscope bench -o` writes it")
    return results[0]
