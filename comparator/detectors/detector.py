"""Detector: the interface of checks that use other evidence than the size of an error.

A noise floor judges the size of an error. A detector judges properties that the size does not show: which values occur,
whether a run's own tensors are consistent, or why integers differ. A detector receives :class:`Evidence` and returns an
updated copy. :mod:`.table` lists all detectors in order.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from enum import StrEnum
from typing import ClassVar

from msgspec import Struct, field

from tapscope.comparator.alignment.prepare import PairPreparer
from tapscope.comparator.noise_floor.derivative_error import KinkCrossings
from tapscope.comparator.pair_analysis.pair_analyzer import PairAnalyzer
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.verdict.choice_change import ChoiceChange
from tapscope.comparator.verdict.finding import Finding
from tapscope.run_format.records import Records
from tapscope.run_format.run import Run


class Stage(StrEnum):
    """The stage of a comparison at which a detector runs."""

    SCREEN = "screen"
    """On measured pairs: determines which pairs are comparable, and which mismatches of integers rounding explains."""
    EXPECT = "expect"
    """On comparable pairs: determines facts that the judge needs in addition to the errors."""
    EXCLUDE = "exclude"
    """Excludes token rows that cannot be compared."""
    CONFINE = "confine"
    """On findings: compares pairs again whose floors are wide because of other rows."""
    REVIEW = "review"
    """On findings: changes verdicts."""


class Evidence(Struct, frozen=True, kw_only=True):
    """Input of the detectors, including the results of earlier detectors."""

    runs: tuple[Run, Run]
    """Baseline and target."""
    analyzer: PairAnalyzer
    pairs: list[PairResult]
    """Results in execution order; those with an :attr:`~.pair_result.PairMeta.exclusion_reason` are not judged."""
    changes: Mapping[str, ChoiceChange] = field(default_factory=dict)
    """Site of integers -> reason why its values may differ."""
    missing_gradients: Mapping[str, str] = field(default_factory=dict)
    """Site of a gradient that one run should have but lacks -> sentence for the report."""
    time_embeddings: Mapping[str, float] = field(default_factory=dict)
    """Site of a sinusoidal embedding -> the error that the rounding of its input explains."""
    kink_crossings: Mapping[str, KinkCrossings] = field(default_factory=dict)
    """Site of a gradient -> its elements that are zero in exactly one run."""
    records: tuple[Records, Records] = field(default_factory=lambda: (Records(), Records()))
    """The selected records of both runs, for :attr:`Stage.REVIEW`."""
    pointwise: frozenset[str] = frozenset()
    """Paths of the modules that compute each element from the same element of their input."""
    findings: list[Finding] = field(default_factory=list)
    """One finding per judged pair, in execution order, for :attr:`Stage.CONFINE` and :attr:`Stage.REVIEW`."""

    @property
    def preparer(self) -> PairPreparer:
        """The preparer, with which detectors read the values of pairs again."""
        return self.analyzer.preparer

    @property
    def judged(self) -> list[PairResult]:
        """The pairs that get a verdict: those without an exclusion reason."""
        return [one for one in self.pairs if not one.exclusion_reason]


class Detector(ABC):
    """One detector. It is stateless: its whole input is the :class:`Evidence`."""

    name: ClassVar[str]
    stage: ClassVar[Stage]

    @abstractmethod
    def detect(self, evidence: Evidence) -> Evidence:
        """Return the evidence updated with the results of this detector, or the same object if there are none."""
