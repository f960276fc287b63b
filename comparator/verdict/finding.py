"""Finding: the result of comparing one site, with its verdict."""

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
    """The outcome for one site, with a glyph for screens."""

    SAME = "same"
    """Equal: bit for bit, or as numbers if the dtypes differ."""
    CLOSE = "close"
    """Different by no more than rounding explains, or the tolerance allows."""
    DIFFERS = "differs"
    """Different by more than that."""
    SHAPE = "shape"
    """Not comparable: shapes, layouts, shards or values do not fit or are missing; never a pass."""
    NONFINITE = "nonfinite"
    """NaN or infinity on one side where the other is different."""
    ONLY_BASELINE = "only-baseline"
    ONLY_TARGET = "only-target"

    @property
    def glyph(self) -> str:
        """One character for tables."""
        return _GLYPHS[self]

    @property
    def is_bad(self) -> bool:
        """Whether it fails the target."""
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
    """One matched pair of sites, or an orphan, over all steps and firings, with its verdict."""

    result: PairResult
    verdict: Verdict
    order: int = 0
    """Index in execution order."""
    error: float = 0.0
    """The error that decided, see :attr:`test`."""
    floor: float = 0.0
    """What rounding explains of it."""
    row_floor: float = 0.0
    """What rounding explains of the worst row, to relate the error of a step or token to; 0 if rounding does not
    apply."""
    test: str = ""
    """Which test decided: median_row, p90_p98_row, max_row, scale, channel, element, max_element (errors), exact,
    tolerance, rule, weights (a weight and its cast), quantization (a weight and its quantized form), permuted, shape,
    nonfinite, plain, replicas, recompute, missing_gradient (only one run has one), gradient_identity (not equal to what
    it is computed from), fp8_grid (8-bit values in the target only), activation (a different activation function),
    rotary_table (an element of RoPE's cosines or sines off by more than its rounding), attention (only one run's output
    is the attention of its own queries, keys and values)."""
    added_error_ratio: float = 0.0
    """error / floor of the site alone, given the errors of its own inputs; above 1 it adds an error of its own."""
    inputs: str = ""
    """Which sites stand for its inputs: captured, submodules, enclosing_module, preceding (fired before), aliased
    (holds the bytes of another site), none (the module was called without tensors), or empty."""
    role: str = ""
    """``producer``, ``downstream`` or empty."""
    judged_by: str = ""
    """What decided: rounding (the model), noise_run, rule REGEX=EXPR, tolerance, gradient_identity, equality, or
    --allow-differ GLOB."""
    floor_effects: tuple[FloorEffect, ...] = ()
    """The effects that made the floor, if ``explain_floor`` selects the site; empty otherwise."""
    notes: tuple[str, ...] = ()
    """Sentences about the site."""

    def __repr__(self) -> str:
        over = f", error {number(self.error)} / floor {number(self.floor)}" if self.floor > 0.0 else ""
        return f"<Finding {self.site} {self.verdict}{over}>"

    @property
    def site(self) -> str:
        """The baseline's name; the target's for a site that only it has."""
        return self.result.site

    @property
    def matched_by(self) -> str:
        """The pass that matched the pair, or ``missing_gradient``; empty for an orphan."""
        return self.test if self.test == "missing_gradient" else self.result.pair.matched_by

    @property
    def baseline(self) -> Side | None:
        """The baseline's side, if it has the site."""
        return self.result.baseline

    @property
    def target(self) -> Side | None:
        """The target's side, if it has the site."""
        return self.result.target

    @property
    def basis(self) -> str:
        """What was compared: ``values``, ``hash``, ``sketch`` (estimated), ``stats``, ``value`` (a plain value),
        ``tokens`` (the sampled ones, next to the logits), or ``none``."""
        return self.result.values.basis

    @property
    def layout(self) -> str:
        """How token rows were found: ``annotated``, ``inferred`` or ``whole``; the weaker of the two sides."""
        return self.result.meta.layout

    @property
    def rows(self) -> RowCounts:
        """What became of its token rows."""
        return self.result.meta.rows

    @property
    def metrics(self) -> ErrorMetrics | None:
        """Global error metrics, if values were compared; nan where a value is not finite in one run only."""
        metrics = self.result.metrics
        return metrics and metrics.over_all_values()

    @property
    def worst(self) -> Place | None:
        """The row with the largest error relative to its norm."""
        return self.result.extras.replica_place if self.test == "replicas" else self.result.values.worst

    @property
    def steps(self) -> tuple[StepResult, ...]:
        """One result per target step, in order; steps with equal hashes have none. Errors are nan where a value is not
        finite in one run only."""
        return tuple(step.over_all_values() for step in self.result.steps)

    @property
    def choices(self) -> ChoiceDifference | None:
        """How many chosen experts or keys differ; None where the values are equal, and for other sites."""
        return self.result.extras.choices

    @property
    def detail(self) -> Detail | None:
        """Detailed metrics; None unless the values differ and they were requested."""
        return self.result.extras.detail

    @property
    def ratio(self) -> float:
        """error / floor; above 1 is more than rounding."""
        if self.error == 0.0:
            return 0.0
        return self.error / self.floor if self.floor > 0.0 else float("inf")


def as_different(finding: Finding, test: str, note: str, **judged: Any) -> Finding:
    """The finding as one that differs by ``test``, which ``note`` explains: by equality and with an error of its own,
    unless the members in ``judged`` say otherwise."""
    members: dict[str, Any] = {"added_error_ratio": math.inf, "judged_by": "equality", **judged}
    return structs.replace(finding, verdict=Verdict.DIFFERS, test=test, notes=(note, *finding.notes), **members)


MEMBERS = (
    *("site", "verdict", "matched_by", "baseline", "target", "order", "basis", "layout", "rows", "metrics", "worst"),
    *("error", "floor", "row_floor", "test", "added_error_ratio", "inputs", "role", "steps", "notes", "detail"),
    *("judged_by", "floor_effects", "choices"),
)
"""Members of a finding in JSON."""
