"""Excluded rows: token rows routed to other experts at a near tie are not comparable downstream of these experts.

Top-k is discontinuous: a tiny error can route a token to another expert, whose output is unrelated to that of the
first. In the module around the router, such rows are excluded and counted. Downstream of the module, their error
propagates like any other (:class:`~.rerouted_rows.ReroutedRows`).
"""

import math
from collections.abc import Mapping, Sequence

import numpy as np
from msgspec import structs

from tapscope.comparator.detectors.detector import Detector, Evidence, Stage
from tapscope.comparator.pair_analysis.pair_analyzer import PairAnalyzer
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.runs.grids import SideRows
from tapscope.comparator.runs.modules import parent
from tapscope.comparator.verdict.choice_change import ChoiceChange
from tapscope.comparator.verdict.finding import Finding
from tapscope.comparator.verdict.localise import onset
from tapscope.core.formatting import plural
from tapscope.core.site import is_parameter, module_of, port_of

_HAS_REROUTED_ROWS = "it holds token rows that went to other experts at a near tie of"


class ExcludeReroutedRows(Detector):
    """Excludes token rows that were routed to other experts, in the module around their router."""

    name = "exclude_rerouted_rows"
    stage = Stage.EXCLUDE

    def detect(self, evidence: Evidence) -> Evidence:
        """Run this detector; see :meth:`.Detector.detect`."""
        pairs = set_aside(evidence.pairs, evidence.changes, evidence.analyzer)
        return structs.replace(evidence, pairs=pairs)


def set_aside(
    examined: Sequence[PairResult], changes: Mapping[str, ChoiceChange], analyzer: PairAnalyzer
) -> list[PairResult]:
    """Return all results, without the rerouted token rows of sites around a router."""
    analyzer.preparer.leave_out_only({})
    moved: dict[str, ChoiceChange] = {}
    routers = {module_of(site): change for site, change in changes.items() if change.changed}
    back = {module_of(one.site) for one in examined if _has_all_rows(one) and _is_output_gradient(one.site)}
    results: list[PairResult] = []
    for one in examined:
        change = changes.get(one.site)
        block = (change.block or parent(module_of(one.site))) if change is not None and change.changed else ""
        if change is not None and block:
            moved[block] = _both(moved.get(block), change)
        known = next((moved[b] for b in moved if _is_within(one.site, b)), None)
        routed = routers.get(module_of(one.site))  # expert weights may be recorded before expert indices
        if known is None and routed is not None and _is_of_choices(one, routed):
            known = routed
        is_choice = change is not None and (one.is_exact or bool(change.block))
        if known is not None and known.rerouted and _is_parameter_gradient(one) and module_of(one.site) not in back:
            reason = f"it adds up token rows that went to other experts at a near tie of {known.scores}"
            one = one.replace(exclusion_reason=reason)
        elif known is not None and not is_choice:
            one = _without(one, known, analyzer)
        results.append(one)
    return results


def _both(one: ChoiceChange | None, other: ChoiceChange) -> ChoiceChange:
    if one is None:
        return other
    return structs.replace(other, rerouted=one.rerouted | other.rerouted, changed=one.changed | other.changed)


def supported_changes(
    changes: Mapping[str, ChoiceChange], findings: Sequence[Finding], target: SideRows
) -> dict[str, ChoiceChange]:
    """Return the changes whose scores are within their floor; otherwise, a bug may have changed the choice.

    ``target`` contains the row pairs of the target's steps. If scores exceed their floor only from some step on, the
    changes of earlier steps remain near ties.
    """
    scores = {change.scores for change in changes.values()}
    begun = {each.site: onset(each) for each in findings if each.site in scores and each.verdict.is_bad}
    supported: dict[str, ChoiceChange] = {}
    for site, change in changes.items():
        if change.scores not in begun:
            supported[site] = change
            continue
        early = _rows_before(target, begun[change.scores])
        if change.changed & early:
            supported[site] = structs.replace(change, rerouted=change.rerouted & early, changed=change.changed & early)
    return supported


def _rows_before(side: SideRows, step: int) -> frozenset[int]:
    """Return the row pairs of the steps before ``step``."""
    pairs = [rows.pairs for number, grids in side.by_step().items() if number < step for rows in grids]
    return frozenset(np.concatenate(pairs).tolist()) if pairs else frozenset()


def _without(result: PairResult, change: ChoiceChange, analyzer: PairAnalyzer) -> PairResult:
    # A tensor with one entry per choice is also not comparable if only the order of the choices differs.
    is_of_choices = _is_of_choices(result, change)
    rows, scores = change.changed if is_of_choices else change.rerouted, change.scores
    if not rows or result.is_exact or not result.has_distribution or result.basis != "values":
        return result
    if not result.rows.num_compared and not _has_rows_of(result, change):
        return _without_places(result, scores)
    before = result.rows.num_compared
    analyzer.preparer.leave_out(result.pair, rows)
    rest = analyzer.analyze(result.pair)
    if rest.problem:  # no row is left
        return result.replace(exclusion_reason=f"every token row went to other experts at a near tie of {scores}")
    count = before - rest.rows.num_compared if before else len(rows)
    if not count:
        return result
    what = "to other experts, or to the same in another order," if is_of_choices else "to other experts"
    note = f"{plural(count, 'token row')} left out that went {what} at a near tie of {scores}"
    return rest.replace(propagated=result.distribution, notes=(note, *rest.notes))


def _has_all_rows(result: PairResult) -> bool:
    """Return whether both runs have all token rows of the site; an expert has rows that only one run routed there."""
    return result.is_matched and not result.rows.num_absent


def _is_output_gradient(site: str) -> bool:
    return port_of(site).startswith("out") and site.endswith(".grad")


def _is_parameter_gradient(result: PairResult) -> bool:
    """Return whether the site is a sum over token rows, from which single rows cannot be excluded."""
    return result.is_matched and result.has_distribution and is_parameter(result.site) and result.site.endswith(".grad")


def _has_rows_of(result: PairResult, change: ChoiceChange) -> bool:
    """Return whether a tensor compared as a whole has the same rows as a choice without token rows."""
    if is_parameter(result.site) or result.baseline is None or not change.num_rows:
        return False
    return math.prod(result.baseline.shape[:-1]) == change.num_rows


def _without_places(result: PairResult, scores: str) -> PairResult:
    """Exclude a value whose rows cannot be assigned to tokens; parameters have no rows."""
    if is_parameter(result.site) or result.distribution is None or result.distribution.is_zero:
        return result
    return result.replace(exclusion_reason=f"{_HAS_REROUTED_ROWS} {scores}")


def _is_of_choices(result: PairResult, change: ChoiceChange) -> bool:
    return result.baseline is not None and result.baseline.shape[-1:] == (change.num_choices,)


def _is_within(site: str, block: str) -> bool:
    """Return whether a site belongs to the module or its submodules, and is not an input of the module."""
    path, _, port = site.rpartition(":")
    return path.startswith(f"{block}.") or (path == block and not port.startswith("in["))
