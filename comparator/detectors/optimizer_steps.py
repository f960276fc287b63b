"""Optimizer steps: each step of a training run depends on the previous one, so a wrong step widens all later floors.

The floor of a site depends on the errors of its inputs. Once a weight is wrong, everything downstream is wrong too and
explains itself. A training run is therefore judged by its beginning: the first step alone, then twice as many, and so
on until a difference appears. The verdict is then that of the smallest number of steps with a difference.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence

from msgspec import structs

from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.verdict.finding import Finding
from tapscope.comparator.verdict.localise import Divergence

Judged = tuple[list[Finding], list[Divergence]]
"""Findings, and the divergences among them."""


def trained_steps(examined: Sequence[PairResult]) -> list[int]:
    """Return the baseline's steps after which parameters updated by an optimizer were recorded; empty if there are
    none."""
    return sorted({drift.step for one in examined for drift in one.extras.parameter_updates})


def with_parameter_updates(first: Sequence[PairResult], whole: Sequence[PairResult], last: int) -> list[PairResult]:
    """Return the results of the first steps, with parameter updates from all steps: a single step does not show
    updates."""
    known = {one.site: one.extras.parameter_updates for one in whole if one.extras.parameter_updates}
    return [
        one.replace(parameter_updates=tuple(d for d in known[one.site] if d.step <= last)) if one.site in known else one
        for one in first
    ]


def beginning(steps: Sequence[int], judge: Callable[[int], Judged]) -> Judged:
    """Return the verdicts of the smallest number of steps with a difference; empty if only the last step has one, or
    none.

    ``judge`` returns the verdicts of all steps up to and including a given one.
    """
    known: dict[int, Judged] = {}

    def is_off(step: int) -> bool:
        if step not in known:
            known[step] = judge(step)
        return bool(known[step][1])

    clean, count = 0, 1
    while count < len(steps) and not is_off(steps[count - 1]):
        clean, count = count, 2 * count
    if count >= len(steps):
        count = len(steps)
    at = bisect_left(steps, True, clean, count, key=is_off) if clean < len(steps) - 1 else len(steps) - 1
    return ([], []) if at >= len(steps) - 1 else known[steps[at]]


def merged(findings: Sequence[Finding], early: Judged, later: Sequence[Divergence] = ()) -> Judged:
    """Correct the findings of all steps by those of the first steps.

    A site that differs in the first steps is the origin. Every other site that differs is downstream, except the
    divergences in ``later``.
    """
    begun = {(f.site, f.matched_by): f for f in early[0] if f.verdict.is_bad}
    merged_findings = [_with_early_verdict(f, begun.get((f.site, f.matched_by))) for f in findings]
    places = {(f.site, f.matched_by): i for i, f in enumerate(merged_findings)}
    known = {d.module for d in early[1]}
    divergences = []
    for each in (*early[1], *(d for d in later if d.module not in known)):
        at = places[each.finding.site, each.finding.matched_by]
        merged_findings[at] = structs.replace(merged_findings[at], role="producer")
        divergences.append(structs.replace(each, finding=merged_findings[at]))
    return merged_findings, divergences


def _with_early_verdict(finding: Finding, early: Finding | None) -> Finding:
    if early is None:
        return structs.replace(finding, role="downstream") if finding.verdict.is_bad else finding
    names = (
        *("verdict", "error", "floor", "row_floor", "test", "added_error_ratio"),
        *("inputs", "role", "judged_by", "notes", "floor_effects"),
    )
    return structs.replace(finding, **{name: getattr(early, name) for name in names})
