"""`tapscope bench history`: results across commits as text, JSON or HTML."""

import argparse
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tapscope.cli import diagnostics, output, report_files
from tapscope.cli.diagnostics import ExitCode
from tapscope.core.errors import DataError

if TYPE_CHECKING:
    from tapscope.dashboard.model.bench_history import BenchComparison, BenchHistory, ComparedMetric

SCHEMA = "tapscope.bench-history/1"
SHOWN_COMMITS = 10


def run(args: argparse.Namespace) -> int:
    """Print the commits and the comparison. Exit code 1 for a regression."""
    from tapscope.dashboard.bench_source import BenchSource
    from tapscope.dashboard.model.bench_history import BenchTable

    table = BenchTable(BenchSource([Path(path) for path in args.target]).read())
    history = table.history()
    for problem in history.problems:
        diagnostics.warn(problem)
    if not history.commits:
        raise DataError(f"no benchmark result in {', '.join(args.target)}: {history.summary}")
    compared = None
    if len(history.commits) > 1 or args.baseline or args.target_commit:
        last, before = history.commits[-1], history.commits[-2:][0]
        compared = table.compare(args.baseline or before.commit, args.target_commit or last.commit)
    if args.json:
        _print_json(history, compared)
    else:
        for line in lines(history, compared, everything=args.all):
            output.write_line(line)
    if args.html is not None:
        _write(args.html, history, compared)
    return ExitCode.DIFFERENT if compared is not None and compared.num_regressions else ExitCode.OK


def write_result(file: Path, result: dict[str, Any]) -> None:
    """Write the HTML report of a single `tapscope bench` result; raises OutputError."""
    from tapscope.dashboard.model.bench_history import BenchTable
    from tapscope.dashboard.model.bench_result import BenchFiles, StoredResult, bench_results

    results = (replace(each, commit=each.commit or "this result") for each in bench_results(result))
    stored = tuple(StoredResult("", each) for each in results)
    _write(file, BenchTable(BenchFiles(stored, (), 1, 0, datetime.now(UTC))).history(), None)


def lines(history: "BenchHistory", compared: "BenchComparison | None", *, everything: bool) -> list[str]:
    """Format the history and the comparison as lines of text; ``everything`` includes changes within the noise band."""
    shown = history.commits[-SHOWN_COMMITS:]
    width = max(len(each.label) for each in shown) + 2
    text = [history.summary, "", f"{'commit':<{width}}{'date':<22}{'results':>8}  branch"]
    text += [f"{each.label:<{width}}{each.date[:19]:<22}{each.num_results:>8,}  {each.branch}" for each in shown]
    if len(history.commits) > len(shown):
        text.append(f"({len(history.commits) - len(shown):,} earlier commits not shown)")
    if compared is None:
        return text
    text += ["", f"{compared.baseline.label} to {compared.target.label}: {compared.summary}"]
    rows = [row for row in compared.rows if everything or row.verdict in ("regression", "improvement")]
    configs = list(dict.fromkeys(row.config for row in rows))
    for config in configs:
        parts = (config.model, config.hardware, config.variant, config.load, config.workload, config.tool)
        text += ["", ", ".join(part for part in parts if part)]
        text += [_row(row) for row in rows if row.config == config]
    return text


def _row(row: "ComparedMetric") -> str:
    values = f"{row.baseline.text:>12}{row.target.text:>12} {row.metric.unit:<11}"
    return f"  {row.verdict:<15}{row.metric.label:<19}{values}{row.change.text:>9}  {row.band.text:<9} ({row.noise})"


def _print_json(history: "BenchHistory", compared: "BenchComparison | None") -> None:
    output.write_json({"type": "history", "schema": SCHEMA, **asdict(history)})
    if compared is not None:
        output.write_json({"type": "comparison", "schema": SCHEMA, **asdict(compared)})


def _write(file: Path, history: "BenchHistory", compared: "BenchComparison | None") -> None:
    from tapscope.dashboard.report.bench import bench_report

    report_files.save(file, bench_report(history, compared))
    diagnostics.note(f"written: {file}")
