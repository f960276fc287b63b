"""Confined rows: a token that was routed to other experts changes only later rows of its own request.

Attention propagates the error of such a row (:mod:`.exclude_rerouted_rows`), and the floors of all later sites allow
for that error in every row. Rows of other requests never attend to the token, nor do rows of earlier steps, whatever
the attention mask. In a causal model, neither do earlier tokens of its own request. Compared without the rows that may
depend on the token, a site has the floor of rounding alone.
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
    """Compares sites downstream of rerouted token rows again without the rows that may depend on these, up to the first
    bad site."""

    name = "confine_rerouted_rows"
    stage = Stage.CONFINE

    def detect(self, evidence: Evidence) -> Evidence:
        """Run this detector; see :meth:`.Detector.detect`."""
        known = {finding.site for finding in evidence.findings if finding.verdict.is_bad}
        first = next((i for i, one in enumerate(evidence.pairs) if one.site in known), len(evidence.pairs))
        confined = unaffected(evidence.pairs[:first], evidence.changes, evidence.analyzer)
        if not confined:
            return evidence
        return structs.replace(evidence, pairs=[confined.get(i, one) for i, one in enumerate(evidence.pairs)])


def unaffected(
    pairs: Sequence[PairResult], changes: Mapping[str, ChoiceChange], analyzer: PairAnalyzer
) -> dict[int, PairResult]:
    """Compare pairs again without the rows that a rerouted row upstream may have changed; return index -> new result.

    Only values of the forward that have both kinds of rows are compared. ``pairs`` must be in execution order. The
    analyzer's preparer excludes these rows from then on.
    """
    dependents = Dependents(analyzer.preparer.row_map, is_causal=_is_causal(analyzer.preparer.baseline))
    rows, results = frozenset[int](), dict[int, PairResult]()
    for i, one in enumerate(pairs):
        change = changes.get(one.site)
        if change is not None and change.rerouted:
            if change.num_rows:  # without token rows, the requests are unknown
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
    """Return whether the model is a decoder with causal attention, by the name of its transformers class."""
    return any((each.parent or each.cls).endswith(_CAUSAL) for each in run.sites.values())


def _has_values_of_rows(result: PairResult) -> bool:
    return (
        not (result.is_exact or result.problem or result.exclusion_reason)
        and (result.basis == "values" and result.rows.num_compared > 0)
        and not (result.site.endswith(".grad") or is_parameter(result.site))
    )


def _without(result: PairResult, rows: frozenset[int], analyzer: PairAnalyzer) -> PairResult | None:
    """Compare a pair again without ``rows``; None if the pair has none of these rows, or no other rows."""
    analyzer.preparer.leave_out(result.pair, rows)
    rest = analyzer.analyze(result.pair)
    count = result.rows.num_compared - rest.rows.num_compared
    if rest.problem or rest.exclusion_reason or not count or rest.basis != "values":
        return None
    why = "that may depend on a token that went to other experts: the others exceed their own floor"
    return rest.replace(notes=(f"compared without {plural(count, 'token row')} {why}", *rest.notes))


class Dependents:
    """Finds the row pairs that may depend on a given row pair through attention or recurrence."""

    def __init__(self, rows: RowMap, *, is_causal: bool = False) -> None:
        """Initialize for the row pairs of ``rows``; ``is_causal`` states that no row depends on later positions of its
        request."""
        self._rows = rows
        self._is_causal = is_causal

    def of(self, pairs: frozenset[int]) -> frozenset[int]:
        """Return all rows that may depend on ``pairs``.

        These are the rows of the same requests in the same or later steps of either run; in a causal model, only those
        from the same position on. A request that does not begin at position 0 may attend to cached rows of any other
        request.
        """
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
        """Return, for each request, the minimum of ``values`` [pairs] over the rows ``at``, or the largest int64
        without such rows."""
        first = np.full(len(self._rows.requests), np.iinfo(np.int64).max)
        np.minimum.at(first, self._rows.pair_request[at], values[at])
        return first

    @cached_property
    def _steps(self) -> tuple[Array, Array]:
        """[pairs] each: the step of each row pair in the baseline, and in the target."""
        return _steps_of(self._rows.baseline, self._rows.num_pairs), _steps_of(self._rows.target, self._rows.num_pairs)

    @cached_property
    def _is_continued(self) -> Array:
        """[requests]: whether the request has no compared row at position 0."""
        is_first = self._rows.pair_position == 0
        return ~np.isin(np.arange(len(self._rows.requests)), self._rows.pair_request[is_first])


def _steps_of(side: SideRows, num_pairs: int) -> Array:
    steps = np.zeros(num_pairs, np.int64)
    for step, grids in side.by_step().items():
        for rows in grids:
            steps[rows.pairs[rows.pairs >= 0]] = step
    return steps
