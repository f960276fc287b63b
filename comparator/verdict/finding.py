"""Finding: the comparison result of one site, with its verdict."""

import math
from enum import StrEnum
from typing import Any

from msgspec import Struct, structs

from tapscope.comparator.facts import ChoiceDifference, ErrorMetrics, Place, RowCounts, Side, StepResult
from tapscope.comparator.metrics.detail import Detail
from tapscope.comparator.noise_floor.error_model import FloorEffect
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.core.deprecation import deprecated_attributes
from tapscope.core.formatting import number


class Verdict(StrEnum):
    """The outcome for one site."""

    SAME = "same"
    """Bitwise equal, or numerically equal if the dtypes differ."""
    CLOSE = "close"
    """Different, but by no more than rounding explains or the tolerance allows."""
    DIFFERS = "differs"
    """Different by more than rounding explains or the tolerance allows."""
    SHAPE = "shape"
    """Not comparable: shapes, layouts, shards or values do not fit or are missing; never a pass."""
    NONFINITE = "nonfinite"
    """NaN or infinity on one side, and a different value on the other."""
    ONLY_BASELINE = "only-baseline"
    ONLY_TARGET = "only-target"

    @property
    def glyph(self) -> str:
        """One-character symbol of the verdict for tables."""
        return _GLYPHS[self]

    @property
    def is_bad(self) -> bool:
        """Whether the verdict fails the target."""
        return self in _BAD

    @property
    def is_orphan(self) -> bool:
        """Whether only one run has the site."""
        return self in _ORPHANS


_BAD = frozenset({Verdict.DIFFERS, Verdict.SHAPE, Verdict.NONFINITE})
_ORPHANS = frozenset({Verdict.ONLY_BASELINE, Verdict.ONLY_TARGET})
_GLYPHS = {
    Verdict.SAME: "=",
    Verdict.CLOSE: "~",
    Verdict.DIFFERS: "!",
    Verdict.SHAPE: "#",
    Verdict.NONFINITE: "%",
    Verdict.ONLY_BASELINE: "<",
    Verdict.ONLY_TARGET: ">",
}


@deprecated_attributes({"growth": "added_error_ratio", "numbers": "metrics", "seen": "result"})
class Finding(Struct, frozen=True, gc=False):
    """Comparison result of one matched pair of sites, or of an orphan, over all steps and firings."""

    result: PairResult
    verdict: Verdict
    order: int = 0
    """Index in execution order."""
    error: float = 0.0
    """The error in the deciding test, see :attr:`test`."""
    floor: float = 0.0
    """The part of :attr:`error` that rounding explains."""
    row_floor: float = 0.0
    """The error of the worst row that rounding explains, as a reference for the error of a step or token; 0 if rounding
    does not apply."""
    test: str = ""
    """The deciding test.

    Tests of errors: median_row, p90_p98_row, max_row, scale, channel, element, max_element. Other tests: exact,
    tolerance, rule, weights (a weight and its cast), quantization (a weight and its quantized form), permuted, shape,
    nonfinite, plain, replicas, recompute, missing_gradient (only one run has the gradient), gradient_identity (not
    equal to the value that it is computed from), fp8_grid (8-bit values in the target only), activation (a different
    activation function), rotary_table (an element of RoPE's cosines or sines off by more than its rounding), attention
    (only one run's output is the attention of its own queries, keys and values).
    """
    added_error_ratio: float = 0.0
    """error / floor of the site's own module, given the errors of its inputs; above 1, the module adds an error of its
    own."""
    inputs: str = ""
    """Which sites stand in for the inputs: captured, submodules, enclosing_module, preceding (fired before), aliased
    (the site has the bytes of another site), none (the module was called without tensors), or empty."""
    role: str = ""
    """``producer``, ``downstream`` or empty."""
    judged_by: str = ""
    """The deciding standard: rounding (the model), noise_run, rule REGEX=EXPR, tolerance, quantization, cast,
    gradient_identity, equality, or --allow-differ GLOB."""
    floor_effects: tuple[FloorEffect, ...] = ()
    """The effects that make up the floor, if ``explain_floor`` selects the site; empty otherwise."""
    notes: tuple[str, ...] = ()
    """Sentences about the site."""

    def __repr__(self) -> str:
        over = f", error {number(self.error)} / floor {number(self.floor)}" if self.floor > 0.0 else ""
        return f"<Finding {self.site} {self.verdict}{over}>"

    @property
    def site(self) -> str:
        """The baseline's name of the site, or the target's name if only the target has the site."""
        return self.result.site

    @property
    def matched_by(self) -> str:
        """The matching pass that formed the pair, or ``missing_gradient``; empty for an orphan."""
        return self.test if self.test == "missing_gradient" else self.result.pair.matched_by

    @property
    def baseline(self) -> Side | None:
        """The baseline's side, or None if the baseline lacks the site."""
        return self.result.baseline

    @property
    def target(self) -> Side | None:
        """The target's side, or None if the target lacks the site."""
        return self.result.target

    @property
    def basis(self) -> str:
        """The compared data: ``values``, ``hash``, ``sketch`` (estimated), ``stats``, ``value`` (a plain value),
        ``tokens`` (sampled tokens, compared in addition to the logits), or ``none``."""
        return self.result.values.basis

    @property
    def layout(self) -> str:
        """The source of the token rows: ``annotated``, ``inferred`` or ``whole``; the weaker of the two sides."""
        return self.result.meta.layout

    @property
    def rows(self) -> RowCounts:
        """Counts of the site's token rows by outcome."""
        return self.result.meta.rows

    @property
    def metrics(self) -> ErrorMetrics | None:
        """Global error metrics, if values were compared; nan if a value is nonfinite in only one run."""
        metrics = self.result.metrics
        return metrics and metrics.over_all_values()

    @property
    def worst(self) -> Place | None:
        """The row with the largest error relative to its norm."""
        return self.result.extras.replica_place if self.test == "replicas" else self.result.values.worst

    @property
    def steps(self) -> tuple[StepResult, ...]:
        """One result per target step, in order, without steps whose hashes are equal. Errors are nan if a value is
        nonfinite in only one run."""
        return tuple(step.over_all_values() for step in self.result.steps)

    @property
    def choices(self) -> ChoiceDifference | None:
        """Differences between the chosen experts or keys; None if the values are equal, and for other sites."""
        return self.result.extras.choices

    @property
    def detail(self) -> Detail | None:
        """Detailed metrics; None unless they were requested and the values differ."""
        return self.result.extras.detail

    @property
    def ratio(self) -> float:
        """error / floor; above 1, the error exceeds rounding."""
        if self.error == 0.0:
            return 0.0
        return self.error / self.floor if self.floor > 0.0 else float("inf")


def as_different(finding: Finding, test: str, note: str, **judged: Any) -> Finding:
    """Return the finding with verdict ``differs`` by ``test`` and the explanation ``note``.

    Unless ``judged`` overrides it, the finding is judged by equality and has an error of its own.
    """
    members: dict[str, Any] = {"added_error_ratio": math.inf, "judged_by": "equality", **judged}
    return structs.replace(finding, verdict=Verdict.DIFFERS, test=test, notes=(note, *finding.notes), **members)


MEMBERS = (
    *("site", "verdict", "matched_by", "baseline", "target", "order", "basis", "layout", "rows", "metrics", "worst"),
    *("error", "floor", "row_floor", "test", "added_error_ratio", "inputs", "role", "steps", "notes", "detail"),
    *("judged_by", "floor_effects", "choices"),
)
"""Members of a finding in JSON, in order."""
