"""Two runs in, the culprit out."""

from tapscope.comparator.compare import Header, Report, compare
from tapscope.comparator.coverage import Coverage
from tapscope.comparator.finding import Finding, Numbers, Place, RowCounts, Side, StepResult, Verdict
from tapscope.comparator.localise import Divergence
from tapscope.comparator.options import CompareOptions

__all__ = [
    "CompareOptions",
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
]
