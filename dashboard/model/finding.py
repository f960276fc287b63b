"""View of one finding, formatted for the front ends."""

import math
from dataclasses import dataclass, replace

import numpy as np

from tapscope.comparator import Finding, Place, Side, Verdict
from tapscope.comparator.report.answer import share
from tapscope.core import dtypes
from tapscope.core.formatting import count, number, shape
from tapscope.core.observe import row_label
from tapscope.core.site import layer_of, module_of
from tapscope.dashboard.model.fact import Fact
from tapscope.dashboard.model.finding_grid import step_verdict
from tapscope.dashboard.model.number import MISSING, Number, fixed, magnitude, ratio
from tapscope.dashboard.model.permalink import Permalink
from tapscope.render.row_labels import Place as RowPlace
from tapscope.render.row_labels import row_map
from tapscope.run_format.run import Run

TESTS = {
    "median_row": "the typical row",
    "p90_p98_row": "the rows with the largest errors",
    "max_row": "the worst row",
    "scale": "a common scale",
    "channel": "one channel",
    "element": "the largest element of each row",
    "max_element": "single elements",
    "exact": "integers must be equal",
    "permuted": "the same elements in another order",
    "tolerance": "the tolerance",
    "rule": "the rule",
    "weights": "the rounding of the dtypes",
    "quantization": "the quantizer's error",
    "replicas": "replicas must be equal",
    "nonfinite": "NaN or infinity on one side",
    "plain": "a plain value",
    "attention": "the attention of the run's own queries, keys and values",
}
"""Test of the comparator -> description for the user."""


@dataclass(frozen=True, slots=True)
class SideView:
    """One side of a finding."""

    site: str
    dtype: str
    """Short dtype, e.g. ``bf16``; ``value`` for a value that is not a tensor."""
    shape: str
    dims: str
    ranks: tuple[int, ...]
    parts: tuple[str, ...]
    """Sites that this side was assembled from; empty if it is :attr:`site` alone."""


@dataclass(frozen=True, slots=True)
class FindingView:
    """A matched pair of sites, or a site that only one run has, over all steps."""

    order: int
    """Position in execution order, from 0."""
    site: str
    layer: int | None
    verdict: str
    glyph: str
    is_bad: bool
    role: str
    """``producer``, ``downstream`` or empty."""
    ratio: Number
    """error ÷ floor of the deciding test; ``exact`` if integers must be equal."""
    error: Number
    floor: Number
    max_abs: Number
    mean_abs: Number
    rel_l2: Number
    cosine: Number
    equal: Number
    """Percentage of equal elements."""
    where: str
    """Step and token, or step and index, of the row with the largest error."""
    matched_by: str
    judged_by: str
    decided_by: str
    """Description of the deciding test."""
    baseline: SideView | None
    target: SideView | None
    notes: tuple[str, ...]
    link: str
    """Permalink of the worst place in the target, or in the baseline if only the baseline has the site."""


@dataclass(frozen=True, slots=True)
class StepCells:
    """Table cells of a finding for one step."""

    verdict: Verdict
    max_abs: Number
    rel_l2: Number
    ratio: Number


def finding_view(finding: Finding, names: tuple[str, str] = ("baseline", "target")) -> FindingView:
    """Format a finding; ``names`` are the names of the baseline and target run."""
    numbers = finding.metrics
    return FindingView(
        order=finding.order,
        site=finding.site,
        layer=layer_of(module_of(finding.site)),
        verdict=str(finding.verdict),
        glyph=finding.verdict.glyph,
        is_bad=finding.verdict.is_bad,
        role=finding.role,
        ratio=_ratio(finding),
        error=magnitude(finding.error) if finding.floor > 0.0 or finding.error else MISSING,
        floor=magnitude(finding.floor) if finding.floor > 0.0 else MISSING,
        max_abs=magnitude(numbers.max_abs) if numbers else MISSING,
        mean_abs=magnitude(numbers.mean_abs) if numbers else MISSING,
        rel_l2=magnitude(numbers.rel_l2) if numbers else MISSING,
        cosine=fixed(numbers.cosine) if numbers else MISSING,
        equal=_equal(numbers.num_equal, numbers.num_elements) if numbers and numbers.num_elements else MISSING,
        where=place_text(finding),
        matched_by=finding.matched_by,
        judged_by=finding.judged_by,
        decided_by=TESTS.get(finding.test, finding.test),
        baseline=_side(finding.baseline),
        target=_side(finding.target),
        notes=finding.notes,
        link=str(link_of(finding, names)),
    )


def step_cells(finding: Finding, step: int) -> StepCells:
    """Return the table cells of a finding for one compared target step."""
    result = next((each for each in finding.steps if each.step == step), None)
    if result is None:  # steps with equal hashes are not measured
        return StepCells(Verdict.SAME, Number(0.0, "0"), Number(0.0, "0"), MISSING)
    of_row = ratio(result.error / finding.row_floor) if finding.row_floor > 0.0 else MISSING
    return StepCells(step_verdict(finding, result), magnitude(result.max_abs), magnitude(result.rel_l2), of_row)


def facts(finding: Finding) -> tuple[Fact, ...]:
    """Return the verdict, and how it was reached: error, floor, test, standard, matching, role."""
    items = [Fact("verdict", f"{finding.verdict.glyph} {finding.verdict}")]
    if finding.floor > 0.0:
        amounts = f"{number(finding.error)} ÷ {number(finding.floor)}"
        items.append(Fact("error ÷ floor", f"{share(finding.ratio)} ({amounts})"))
    if finding.test:
        items.append(Fact("decided by", TESTS.get(finding.test, finding.test)))
    for label, text in (("judged by", finding.judged_by), ("matched by", finding.matched_by), ("role", finding.role)):
        items += [Fact(label, text)] if text else []
    return tuple(items)


def metrics(finding: Finding) -> tuple[Fact, ...]:
    """Return the metrics over all compared values; empty if no values were compared."""
    numbers = finding.metrics
    if numbers is None:
        return ()
    items = [
        Fact("max |Δ|", number(numbers.max_abs)),
        Fact("mean |Δ|", number(numbers.mean_abs)),
        Fact("rel l2", number(numbers.rel_l2)),
        Fact("cosine", f"{numbers.cosine:.6f}"),
        Fact("equal", f"{count(numbers.num_equal)} of {count(numbers.num_elements)}"),
    ]
    bad = numbers.num_nonfinite_baseline, numbers.num_nonfinite_target
    return (*items, Fact("% non-finite", f"{count(bad[0])} → {count(bad[1])}")) if any(bad) else tuple(items)


def worst_place(finding: Finding) -> Fact | None:
    """Return step, token or index, and rank of the largest error over all steps; None if the finding is ``same``."""
    if finding.worst is None or finding.verdict is Verdict.SAME:
        return None
    rank = f", rank {finding.worst.rank}" if finding.worst.rank is not None else ""
    return Fact("worst of all steps", f"step {finding.worst.step}, {finding.worst.text()}{rank}")


def place_text(finding: Finding) -> str:
    """Return ``step 3 0:5`` for position 5 of request 0, or ``step 3 [5,17]``; ``-`` if there is no difference."""
    place = finding.worst
    if place is None or finding.verdict is Verdict.SAME:
        return "-"
    where = row_label(place.request or "", place.position, place.branch) if place.position is not None else place.text()
    return f"step {place.step} {where}"


def link_of(finding: Finding, names: tuple[str, str]) -> Permalink:
    """Return the permalink of the worst place in the target, or in the baseline if only the baseline has the site."""
    side = finding.target or finding.baseline
    is_target = finding.target is not None
    site = side.site if side else finding.site
    place = finding.worst
    if place is None:
        step = min((result.step for result in finding.steps), default=0)
        return Permalink(names[is_target], site, step, min(side.ranks, default=0) if side else 0)
    rank = place.rank if place.rank is not None else min(side.ranks, default=0) if side else 0
    step = place.step if is_target else place.baseline_step
    return Permalink(names[is_target], site, step, rank, place.in_shard or place.element or None)


def located(link: Permalink, place: Place | None, run: Run) -> Permalink:
    """Add the index of a token row's worst element in the recorded tensor to ``link``, if the row map is known."""
    if link.index is not None or place is None or place.position is None or not place.index:
        return link
    line = run.steps.get(link.step, {}).get(link.rank)
    records = run.select([link.site], steps=[link.step], ranks=[link.rank])
    record = next((record for record in records if record.key.site == link.site), None)
    rows = None if record is None else row_map(record, line)
    at = RowPlace(place.request or "", place.position, place.visit, place.branch)
    row = None if rows is None else rows.row_of(at)
    if record is None or rows is None or row is None:
        return link
    others = [axis for axis in range(len(record.shape)) if axis not in rows.axes]
    index = dict(zip(rows.axes, map(int, np.unravel_index(row, rows.sizes)), strict=True))
    if place.index[-1] >= math.prod(record.shape[axis] for axis in others):
        return link
    column = np.unravel_index(place.index[-1], tuple(record.shape[axis] for axis in others)) if others else ()
    index |= dict(zip(others, map(int, column), strict=True))
    return replace(link, index=tuple(index[axis] for axis in range(len(record.shape))))


def _side(side: Side | None) -> SideView | None:
    if side is None:
        return None
    dtype = dtypes.short(side.dtype) if side.dtype else "value"
    return SideView(side.site, dtype, shape(side.shape), side.dims or "", side.ranks, side.parts)


def _ratio(finding: Finding) -> Number:
    if finding.basis == "none" or finding.verdict.is_orphan or finding.verdict is Verdict.NONFINITE:
        return MISSING
    if finding.floor > 0.0:
        return ratio(finding.ratio)
    return Number(None, "exact") if finding.test == "exact" and finding.error else MISSING


def _equal(equal: int, total: int) -> Number:
    return Number(100 * equal / total, f"{100 * equal / total:.1f} %")
