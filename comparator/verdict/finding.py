"""Finding: what is known of one site after comparing it, and the verdict on it."""

from enum import StrEnum

from msgspec import Struct

from tapscope.comparator.facts import ErrorMetrics, Place, RowCounts, Side, StepResult
from tapscope.comparator.metrics.detail import Detail
from tapscope.comparator.noise_floor.error_model import FloorEffect
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.core.formatting import number


class Verdict(StrEnum):
    """The outcome for one site; every one has a glyph for screens."""

    SAME = "same"
    """Equal: bit for bit, or as numbers where the dtypes differ."""
    CLOSE = "close"
    """Apart by no more than rounding explains, or than the tolerance allows."""
    DIFFERS = "differs"
    """Apart by more than that."""
    SHAPE = "shape"
    """Cannot be laid over each other: shapes, layouts, shards or values do not fit or are missing; never a pass."""
    NONFINITE = "nonfinite"
    """NaN or infinity on one side where the other has something else."""
    ONLY_BASELINE = "only-baseline"
    ONLY_TARGET = "only-target"

    @property
    def glyph(self) -> str:
        """One character for tables."""
        return _GLYPHS[self]

    @property
    def is_bad(self) -> bool:
        """Whether it speaks against the target."""
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


class Finding(Struct, frozen=True, gc=False):
    """One matched pair of sites, or an orphan, over all steps and firings: what was seen of it, and what is said of
    that."""

    seen: PairResult
    verdict: Verdict
    order: int = 0
    """Place in execution order, from 0."""
    error: float = 0.0
    """The error that decided, see :attr:`test`."""
    floor: float = 0.0
    """What rounding explains of it."""
    row_floor: float = 0.0
    """What rounding explains of the worst row: a step's or a token's error is to be seen beside it; 0 where it has no
    say."""
    test: str = ""
    """Which test decided: ``typical``, ``tail``, ``row``, ``gain``, ``element``, ``exact``, ``tolerance``,
    ``permuted``, ``absent`` (a gradient that one run has not), ``identity`` (one that is not what its run made it of,
    in units of rounding), ``grid`` (rows of 8-bit numbers in the target alone), ``function`` (an activation that is
    another one in either run, told by each run's own values)."""
    growth: float = 0.0
    """error / floor of the site alone, given the errors of its own inputs; above 1 it adds error of its own."""
    inputs: str = ""
    """How that was known: ``captured``, ``inside``, ``before`` (the sites that fired before it), or empty."""
    role: str = ""
    """``producer``, ``downstream`` or empty."""
    judged_by: str = ""
    """What decided: ``rounding`` (the model), ``twin``, ``rule REGEX=EXPR``, ``tolerance``, ``identity`` or
    ``equality``."""
    floor_effects: tuple[FloorEffect, ...] = ()
    """The effects that made the floor, where ``explain_floor`` asks for them; empty otherwise."""
    notes: tuple[str, ...] = ()
    """What is to be said of it."""

    def __repr__(self) -> str:
        over = f", error {number(self.error)} / floor {number(self.floor)}" if self.floor > 0.0 else ""
        return f"<Finding {self.site} {self.verdict}{over}>"

    @property
    def site(self) -> str:
        """The baseline's name; the target's for what only it has."""
        return self.seen.site

    @property
    def matched_by(self) -> str:
        """The pass that made the pair, or ``absent``; empty for an orphan."""
        return self.test if self.test == "absent" else self.seen.pair.matched_by

    @property
    def baseline(self) -> Side | None:
        """The baseline's part, where it has the site."""
        return self.seen.baseline

    @property
    def target(self) -> Side | None:
        """The target's part, where it has the site."""
        return self.seen.target

    @property
    def basis(self) -> str:
        """What was compared: ``values``, ``hash``, ``stats``, ``value`` (no tensor), ``tokens`` (those that came next,
        beside the logits), or ``none``."""
        return self.seen.read.basis

    @property
    def layout(self) -> str:
        """How token rows were found: ``annotated``, ``inferred`` or ``whole``; the weaker of the two sides."""
        return self.seen.about.layout

    @property
    def rows(self) -> RowCounts:
        """What became of its token rows."""
        return self.seen.about.rows

    @property
    def numbers(self) -> ErrorMetrics | None:
        """Global measures, where values were compared."""
        return self.seen.numbers

    @property
    def worst(self) -> Place | None:
        """The row that is furthest off for its size."""
        return self.seen.more.replica_place if self.test == "replicas" else self.seen.read.worst

    @property
    def steps(self) -> tuple[StepResult, ...]:
        """One result a target step, in order; steps whose hashes are equal have none."""
        return self.seen.steps

    @property
    def detail(self) -> Detail | None:
        """What was measured on demand; None unless the values differ and it was asked for."""
        return self.seen.more.detail

    @property
    def ratio(self) -> float:
        """error / floor; above 1 is more than rounding."""
        if self.error == 0.0:
            return 0.0
        return self.error / self.floor if self.floor > 0.0 else float("inf")


MEMBERS = (
    *("site", "verdict", "matched_by", "baseline", "target", "order", "basis", "layout", "rows", "numbers", "worst"),
    *("error", "floor", "row_floor", "test", "growth", "inputs", "role", "steps", "notes", "detail", "judged_by"),
    "floor_effects",
)
"""Of a finding, as JSON has them."""
