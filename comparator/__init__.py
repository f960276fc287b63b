"""Compare two runs and find the first module that diverges.

::

    from tapscope.comparator import CompareOptions, compare

    report = compare("base", "target", CompareOptions(skip=("*:in[*]",)))
    print(report)  # the answer in four lines
    print(report.exit_code, report.first_divergence)
"""

from tapscope.comparator.compare import Comparison, compare, compare_open_runs
from tapscope.comparator.facts import ErrorMetrics, Place, RowCounts, Side, StepResult
from tapscope.comparator.options.options import CompareOptions
from tapscope.comparator.pair_analysis.token_view import TokenView
from tapscope.comparator.report.report import Header, Report
from tapscope.comparator.verdict.coverage import Coverage
from tapscope.comparator.verdict.finding import Finding, Verdict
from tapscope.comparator.verdict.localise import Divergence

__all__ = [
    "CompareOptions",
    "Comparison",
    "Coverage",
    "Divergence",
    "ErrorMetrics",
    "Finding",
    "Header",
    "Place",
    "Report",
    "RowCounts",
    "Side",
    "StepResult",
    "TokenView",
    "Verdict",
    "compare",
    "compare_open_runs",
]
