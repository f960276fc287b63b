"""Shape class: the part of an analysis that is common to all pairs with one shape key."""

from functools import lru_cache

from msgspec import Struct, field

from tapscope.comparator.alignment.prepare import PreparedPair
from tapscope.comparator.facts import Place
from tapscope.comparator.matching.match import Pair
from tapscope.comparator.metrics.batched_pairs import BatchedPairs
from tapscope.comparator.metrics.measure import batched_form
from tapscope.comparator.pair_analysis.pair_result import PairMeta, are_exact
from tapscope.comparator.runs.series import side_of
from tapscope.core.dtypes import COMPLEX


class ShapeClass(Struct, frozen=True):
    """A prepared pair, used as a template for other pairs with its shape key."""

    prepared: PreparedPair
    meta: PairMeta
    is_exact: bool
    batched: BatchedPairs | None
    """How to read the pairs in a batch; None if each pair is prepared and read individually."""
    places: dict[tuple[int, int | None, int | None], Place] = field(default_factory=dict)
    """Cache for batched pairs: (row, column, rank) -> place. Small tensors are many but have few places."""


def shape_class_of(pair: Pair, ready: PreparedPair, *, is_shared: bool) -> ShapeClass:
    """Return the class of a prepared pair; ``is_shared``: whether other pairs may have the same class."""
    baseline, target = pair.sides
    names = baseline.first.dtype or "", target.first.dtype or ""
    broken, missing = ready.num_broken, ready.plan.num_missing
    about = PairMeta(
        baseline=side_of(baseline, ready.left[0].shape),
        target=side_of(target, ready.right[0].shape),
        problem=ready.problem or _unlike(*names),
        exclusion_reason=ready.plan.exclusion_reason,
        layout=_weaker(ready.layouts[0].source, ready.layouts[1].source),
        rows=ready.plan.counts,
        num_missing=(broken[0] + missing[0], broken[1] + missing[1]),
        notes=ready.notes,
        warnings=ready.warnings,
    )
    together = batched_form(ready) if is_shared and not about.problem and not about.exclusion_reason else None
    return ShapeClass(ready, about, are_exact(*names), together)


def _unlike(baseline: str, target: str) -> str:
    """Return a problem if exactly one side is complex, because complex and real values cannot be compared; otherwise
    empty."""
    if (baseline in COMPLEX) == (target in COMPLEX):
        return ""
    return f"{baseline} against {target}: complex and real values cannot be compared"


@lru_cache
def _weaker(*sources: str) -> str:
    return next(s for s in ("inferred", "annotated", "whole") if s in sources)
