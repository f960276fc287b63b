"""Comparison of two runs in a test; contains no tests."""

from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tapscope.comparator import CompareOptions, Finding, Report, compare
from tapscope.run_format.run import Run


def diff(
    baseline: Run | str | Path, target: Run | str | Path, options: CompareOptions | None = None, **settings: Any
) -> Report:
    """Return the comparison report of two runs, given by path or open; open runs are closed.

    ``settings`` are fields of CompareOptions, an alternative to ``options``.
    """
    assert not (options and settings), "give options or settings"
    with ExitStack() as stack:
        for run in (baseline, target):
            if isinstance(run, Run):
                stack.enter_context(run)
        return compare(baseline, target, options or CompareOptions(**settings))


def findings_by_site(report: Report) -> dict[str, Finding]:
    """Return the findings of a report by site."""
    return {finding.site: finding for finding in report.findings}
