"""Detector: the interface of checks that look at other evidence than the size of an error.

A noise floor judges how far values are off. A detector judges what the size does not show: which values occur, what a
run's own tensors say about each other, or why integers differ. It receives :class:`Evidence` and returns it with what
it found. :mod:`.table` has all of them in order.
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
    """When a detector runs."""

    SCREEN = "screen"
    """On measured pairs: which of them are comparable, and which mismatches of integers rounding explains."""
    EXPECT = "expect"
    """On comparable pairs: what the judge has to know in addition to their errors."""
    EXCLUDE = "exclude"
    """Takes out token rows that cannot be compared."""
    CONFINE = "confine"
    """On findings: compares pairs again where their floors are wide because of other rows."""
    REVIEW = "review"
    """On findings: changes verdicts."""


class Evidence(Struct, frozen=True, kw_only=True):
    """The evidence that detectors read, and their results so far."""

    runs: tuple[Run, Run]
    """Baseline and target."""
    analyzer: PairAnalyzer
    pairs: list[PairResult]
    """In execution order; those with :attr:`~.pair_result.PairMeta.exclusion_reason` are not judged."""
    changes: Mapping[str, ChoiceChange] = field(default_factory=dict)
    """Site of integers -> why they may differ."""
    missing_gradients: Mapping[str, str] = field(default_factory=dict)
    """Site of a gradient that one run lacks and should have -> what to report."""
    time_embeddings: Mapping[str, float] = field(default_factory=dict)
    """Site of a sinusoidal embedding -> the error that the rounding of its input explains."""
    kink_crossings: Mapping[str, KinkCrossings] = field(default_factory=dict)
    """Site of a gradient -> its elements that are zero in exactly one run."""
    records: tuple[Records, Records] = field(default_factory=lambda: (Records(), Records()))
    """The selected records of both runs, for :attr:`Stage.REVIEW`."""
    pointwise: frozenset[str] = frozenset()
    """Paths of the modules that compute each element from the same element of their input."""
    findings: list[Finding] = field(default_factory=list)
    """One a judged pair, in execution order, for :attr:`Stage.CONFINE` and :attr:`Stage.REVIEW`."""

    @property
    def preparer(self) -> PairPreparer:
        """Prepares pairs, to read their values again."""
        return self.analyzer.preparer

    @property
    def judged(self) -> list[PairResult]:
        """The pairs that get a verdict."""
        return [one for one in self.pairs if not one.exclusion_reason]


class Detector(ABC):
    """One detector. It is stateless: everything it uses is in the :class:`Evidence`."""

    name: ClassVar[str]
    stage: ClassVar[Stage]

    @abstractmethod
    def detect(self, evidence: Evidence) -> Evidence:
        """The evidence with what was found; the same object where nothing was."""
