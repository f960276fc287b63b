"""Two runs in, the culprit out.

from tapscope import open_run
from tapscope.comparator import CompareOptions, compare

report = compare(open_run("base"), open_run("target"), CompareOptions(skip=("*:in[*]",)))
print(report.exit_code, report.divergences[:1])
"""

from tapscope.comparator.closeup import Closeup
from tapscope.comparator.compare import Comparison, compare, compare_closely
from tapscope.comparator.coverage import Coverage
from tapscope.comparator.finding import Finding, Numbers, Place, RowCounts, Side, StepResult, Verdict
from tapscope.comparator.localise import Divergence
from tapscope.comparator.options import CompareOptions
from tapscope.comparator.outcome import Header, Report

__all__ = [
    "Closeup",
    "CompareOptions",
    "Comparison",
    "Coverage",
    "Divergence",
    "Finding",
    "Header",
    "Numbers",
    "Place",
    "Report",
    "RowCounts",
    "Side",
    "StepResult",
    "Verdict",
    "compare",
    "compare_closely",
]
