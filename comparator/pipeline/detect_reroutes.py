"""Detect reroutes, the fourth stage: find discrete mismatches that rounding explains, and the rows that depend on them.

A sampled token or a choice of experts is discrete: at a near tie, an error far below any floor can change the choice.
Token rows that were routed to different experts are not comparable downstream of their router, and are excluded there.
"""

from collections.abc import Mapping

from msgspec import Struct, structs

from tapscope.comparator.alignment.prepare import PairPreparer
from tapscope.comparator.detectors.detector import Evidence, Stage
from tapscope.comparator.detectors.table import run_detectors
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.pipeline.measure_pairs import MeasuredRuns
from tapscope.comparator.verdict.choice_change import ChoiceChange


class ScreenedRuns(Struct, frozen=True):
    """Measured runs, with the mismatches of discrete values that rounding explains."""

    measured: MeasuredRuns
    results: list[PairResult]
    """One result per pair, plus one for the sampled tokens if no site recorded them."""
    changes: Mapping[str, ChoiceChange]
    """Site of integers -> why its values may differ."""

    @property
    def preparer(self) -> PairPreparer:
        """The preparer of the pairs of these runs."""
        return self.measured.analyzer.preparer

    @property
    def judged(self) -> list[PairResult]:
        """The results that get a verdict: those without an exclusion reason."""
        return [one for one in self.results if not one.exclusion_reason]

    @property
    def evidence(self) -> Evidence:
        """The input of the detectors."""
        runs = self.measured.matched.opened.runs
        return Evidence(runs=runs, analyzer=self.measured.analyzer, pairs=self.results, changes=self.changes)

    def detect(self, stage: Stage, evidence: Evidence) -> Evidence:
        """Run the detectors of one stage and return the updated evidence."""
        return run_detectors(stage, evidence, self.measured.matched.opened.options.disabled)

    def without_rerouted_rows(self, changes: Mapping[str, ChoiceChange] | None = None) -> "ScreenedRuns":
        """Return a copy without the token rows that ``changes`` (by default :attr:`changes`) routed to different
        experts."""
        changes = self.changes if changes is None else changes
        evidence = self.detect(Stage.EXCLUDE, structs.replace(self.evidence, changes=changes))
        return structs.replace(self, results=evidence.pairs, changes=changes)


def detect_reroutes(measured: MeasuredRuns) -> ScreenedRuns:
    """Check every mismatch of discrete values, and every gradient that belongs to a cast copy in one run only."""
    screened = ScreenedRuns(measured, measured.results, {})
    evidence = screened.detect(Stage.SCREEN, screened.evidence)
    return structs.replace(screened, results=evidence.pairs, changes=evidence.changes)
