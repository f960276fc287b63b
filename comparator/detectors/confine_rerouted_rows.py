"""Confined rows: a token that went to other experts changes later rows of its own request alone.

Attention passes the error of such a row on (:mod:`.exclude_rerouted_rows`), and the floors of all later sites allow for
it in every row. Rows of other requests never attend to it, nor do rows of steps before its own, whatever the attention
mask. In a causal model, neither do earlier tokens of its own request. Compared without the rows that may depend on it,
a site has the floor of rounding alone.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from msgspec import structs

from tapscope.comparator.alignment.row_map import RowMap
from tapscope.comparator.detectors.detector import Detector, Evidence, Stage
from tapscope.comparator.pair_analysis.pair_analyzer import PairAnalyzer
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.comparator.runs.grids import SideRows
from tapscope.comparator.verdict.choice_change import ChoiceChange
from tapscope.core.formatting import plural
from tapscope.core.site import is_parameter
from tapscope.run_format.run import Run

Array = np.ndarray[Any, Any]


_CAUSAL = "ForCausalLM"


class ConfineReroutedRows(Detector):
    """Compares sites downstream of rerouted token rows without the rows that may depend on these, up to the first site
    that differs anyway."""

    name = "confine_rerouted_rows"
    stage = Stage.CONFINE

    def detect(self, evidence: Evidence) -> Evidence:
        """See :class:`.Detector`."""
        known = {finding.site for finding in evidence.findings if finding.verdict.is_bad}
        first = next((i for i, one in enumerate(evidence.pairs) if one.site in known), len(evidence.pairs))
        confined = unaffected(evidence.pairs[:first], evidence.changes, evidence.analyzer)
        if not confined:
            return evidence
        return structs.replace(evidence, pairs=[confined.get(i, one) for i, one in enumerate(evidence.pairs)])


def unaffected(
    pairs: Sequence[PairResult], changes: Mapping[str, ChoiceChange], analyzer: PairAnalyzer
) -> dict[int, PairResult]:
    """Index -> the pair without the rows that a rerouted row upstream may have changed, for values of the forward with
    such rows and others. ``pairs`` in execution order; the analyzer's preparer leaves these rows out from then on."""
    dependents = Dependents(analyzer.preparer.row_map, is_causal=_is_causal(analyzer.preparer.baseline))
    rows, results = frozenset[int](), dict[int, PairResult]()
    for i, one in enumerate(pairs):
        change = changes.get(one.site)
        if change is not None and change.rerouted:
            if change.num_rows:  # rows without tokens: no request is known
                break
            rows |= dependents.of(change.rerouted)
            if len(rows) == analyzer.preparer.row_map.num_pairs:
                break
        if rows and _has_values_of_rows(one):
            rest = _without(one, rows, analyzer)
            if rest is not None:
                results[i] = rest
    return results


def _is_causal(run: Run) -> bool:
    """Whether the model is a decoder whose tokens attend to no later ones, by the name of its class in transformers."""
    return any((each.parent or each.cls).endswith(_CAUSAL) for each in run.sites.values())


def _has_values_of_rows(result: PairResult) -> bool:
    return (
        not (result.is_exact or result.problem or result.exclusion_reason)
        and (result.basis == "values" and result.rows.num_compared > 0)
        and not (result.site.endswith(".grad") or is_parameter(result.site))
    )


def _without(result: PairResult, rows: frozenset[int], analyzer: PairAnalyzer) -> PairResult | None:
    """The pair without these rows; None where it has none of them, or no others."""
    analyzer.preparer.leave_out(result.pair, rows)
    rest = analyzer.analyze(result.pair)
    count = result.rows.num_compared - rest.rows.num_compared
    if rest.problem or rest.exclusion_reason or not count or rest.basis != "values":
        return None
    why = "that may depend on a token that went to other experts: the others exceed their own floor"
    return rest.replace(notes=(f"compared without {plural(count, 'token row')} {why}", *rest.notes))


class Dependents:
    """Which row pairs may depend on a row pair, by way of attention or a recurrence."""

    def __init__(self, rows: RowMap, *, is_causal: bool = False) -> None:
        """``is_causal``: no row depends on later positions of its request."""
        self._rows = rows
        self._is_causal = is_causal

    def of(self, pairs: frozenset[int]) -> frozenset[int]:
        """All rows of the same requests in the same or later steps of either run; of a causal model only those from
        the same position on. A request that does not begin at position 0 may attend to cached rows of any other."""
        at = np.array(sorted(pairs), np.int64)
        is_dependent = np.zeros(self._rows.num_pairs, bool)
        for steps in self._steps:
            begun = self._first(steps, at)
            begun[self._is_continued] = begun.min()
            is_dependent |= steps >= begun[self._rows.pair_request]
        if self._is_causal:
            begun = self._first(self._rows.pair_position, at)
            begun[self._is_continued] = 0
            is_dependent &= self._rows.pair_position >= begun[self._rows.pair_request]
        return frozenset(np.flatnonzero(is_dependent).tolist())

    def _first(self, values: Array, at: Array) -> Array:
        """[requests]: the smallest of ``values`` [pairs] among the rows ``at``; the largest integer without any."""
        first = np.full(len(self._rows.requests), np.iinfo(np.int64).max)
        np.minimum.at(first, self._rows.pair_request[at], values[at])
        return first

    @cached_property
    def _steps(self) -> tuple[Array, Array]:
        """[pairs]: the step of each row pair in the baseline, and in the target."""
        return _steps_of(self._rows.baseline, self._rows.num_pairs), _steps_of(self._rows.target, self._rows.num_pairs)

    @cached_property
    def _is_continued(self) -> Array:
        """[requests]: whether no row of position 0 is compared."""
        is_first = self._rows.pair_position == 0
        return ~np.isin(np.arange(len(self._rows.requests)), self._rows.pair_request[is_first])


def _steps_of(side: SideRows, num_pairs: int) -> Array:
    steps = np.zeros(num_pairs, np.int64)
    for step, grids in side.by_step().items():
        for rows in grids:
            steps[rows.pairs[rows.pairs >= 0]] = step
    return steps
