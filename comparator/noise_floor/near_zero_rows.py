"""Near-zero rows: row errors are measured relative to at least a fraction of the typical row.

Two effects correct what this measure (:mod:`..metrics.near_zero_rows`) hides, and a third covers norms that were not
compared.
"""

from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from tapscope.comparator.metrics.elementwise import largest_in
from tapscope.comparator.metrics.error_columns import ErrorColumns
from tapscope.comparator.metrics.error_distribution import QUANTILES, ErrorDistribution, Quantiles
from tapscope.comparator.metrics.near_zero_rows import NO_AMPLIFICATION
from tapscope.comparator.noise_floor.constants import MAX_ROW_ERROR
from tapscope.comparator.noise_floor.effect import Effect, Unit
from tapscope.comparator.noise_floor.optimizer_params import OptimizerUpdates
from tapscope.comparator.noise_floor.propagated_errors import PropagatedErrors
from tapscope.comparator.noise_floor.rerouted_rows import ReroutedRows
from tapscope.comparator.pair_analysis.pair_result import PairResult
from tapscope.core.formatting import number
from tapscope.kernels.native.aggregate import SMALL_ROW

Array = np.ndarray[Any, Any]

UNMATCHED = (1.0, *(1.0 / SMALL_ROW,) * (len(QUANTILES) - 1))
"""Factor of an uncompared norm, at :data:`~.error_distribution.QUANTILES`: the norm scales rows smaller than
``SMALL_ROW`` times the typical row, relative to which their errors are measured, up to the typical row's size."""


def unmatched_norms(everything: Sequence[PairResult], norms: Collection[str]) -> frozenset[str]:
    """Return the modules that contain a norm which both runs recorded and whose rows could not be aligned.

    An example is a norm over the heads of all tokens of a batch that differs between the runs.
    """
    paths = set()
    for one in everything:
        path, _, port = one.site.rpartition(":")
        if one.exclusion_reason and one.baseline and one.target and path in norms and port.startswith("out"):
            paths.add(path.rpartition(".")[0])
    return frozenset(paths)


class NormOfNearZeroRows(Effect[Quantiles]):
    """Near-zero rows that a norm receives: a norm divides each row by its own size. Its output differs by the row's
    error relative to the row itself, and a row of pure rounding becomes as large as any other."""

    name = "norm_of_near_zero_rows"
    unit = Unit.FACTOR
    noise: frozenset[int] = frozenset()
    """Nodes with a row that is pure rounding."""

    def find(self) -> Mapping[int, Quantiles]:
        """Compute input node of a norm -> factor on the errors of its rows, at each quantile."""
        errors, pairs = self.errors, self.inputs.pairs
        given = [
            (i, spread, one) for i, one in enumerate(pairs) if one.extras.row_relative_errors and (spread := errors[i])
        ]
        factors = {i: _factor(spread.errors, one.extras.row_relative_errors) for i, spread, one in given}
        amplified = {i: factor for i, factor in factors.items() if factor is not NO_AMPLIFICATION}
        lifted = ((i, spread.scaled(amplified[i])) for i in amplified if (spread := errors[i]))
        self.noise = frozenset(i for i, spread in lifted if spread.errors[-1] > MAX_ROW_ERROR)
        return amplified

    @cached_property
    def errors(self) -> PropagatedErrors:
        """Node -> the errors that it propagates, including those of parameters in optimizer steps."""
        moved = self.effects[OptimizerUpdates].propagated
        return PropagatedErrors(self.inputs.pairs, self.inputs.graph, {**self.effects[ReroutedRows].values, **moved})

    def factors(self, nodes: Sequence[int]) -> Array:
        """Return the factor on the errors of the inputs of ``nodes``, [quantiles, nodes]."""
        if not self.values:
            return np.broadcast_to(1.0, (len(QUANTILES), len(nodes)))
        factors = np.ones((len(QUANTILES), len(self.inputs.pairs)))
        factors[:, list(self.values)] = np.array(list(self.values.values())).T
        largest = largest_in(factors, [self.inputs.graph.inputs(node).nodes for node in nodes])
        return np.maximum(largest, 1.0)

    def received(self, node: int) -> float:
        """Return the largest factor among the inputs of a node; 1 if there is none."""
        origins = self.inputs.graph.inputs(node).nodes
        return max((max(self.values[i]) for i in origins if i in self.values), default=1.0)

    def applies(self, node: int) -> bool:
        """Return whether a node was computed from near-zero rows."""
        return self.received(node) > 1.0

    def contribution(self, node: int) -> float:
        """Return the factor on the errors of the worst rows."""
        return self.received(node)

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        factor = number(self.received(node))
        return f"near-zero input rows: relative to their size they differ {factor} times as much"


def _factor(errors: Sequence[float], own: Sequence[float]) -> Quantiles:
    factor = tuple(max(1.0, alone / error) if error > 0.0 else 1.0 for error, alone in zip(errors, own, strict=True))
    return factor if max(factor) > 1.0 else NO_AMPLIFICATION


class UnmatchedNorm(Effect[Quantiles]):
    """Norm inside a function that was not captured, which both runs recorded but which could not be compared. Its
    near-zero rows may differ by ``1 / SMALL_ROW`` times as much."""

    name = "unmatched_norm"
    unit = Unit.FACTOR

    def find(self) -> Mapping[int, Quantiles]:
        """Compute value -> factor on the errors of its rows, at each quantile."""
        norms, graph = self.inputs.facts.unmatched_norms, self.inputs.graph
        if not norms:
            return {}
        values = (
            n for n in self.inputs.nodes if graph.inputs(n).source == "enclosing_module" and not graph.is_backward[n]
        )
        return {node: UNMATCHED for node in values if graph.enclosing(node) in norms}

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        return f"a norm inside {self.inputs.graph.enclosing(node)} was recorded and could not be compared"


class UnevenRows(Effect[tuple[Quantiles, float]]):
    """Small rows of a function that was not captured, whose terms may cancel, such as a head of linear attention whose
    query matches nothing in the state. These rows carry the rounding of the other rows, and are judged relative to the
    typical one.
    """

    name = "uneven_rows"

    def find(self) -> Mapping[int, tuple[Quantiles, float]]:
        """Compute node -> (row errors relative to at least the typical row, error of the largest element)."""
        graph, pairs = self.inputs.graph, self.inputs.pairs
        return {
            node: (pairs[node].extras.errors_above_typical, pairs[node].extras.peak_above_typical)
            for node in self.inputs.nodes
            if pairs[node].extras.errors_above_typical
            and graph.inputs(node).source == "enclosing_module"
            and not graph.is_backward[node]
        }

    @cached_property
    def judged(self) -> ErrorColumns:
        """The error distributions to compare with floors, in columns."""
        spreads = self.inputs.spreads
        errors, peak = spreads.errors.copy(), spreads.peak.copy()
        for node, (even, even_peak) in self.values.items():
            case = self.inputs.case_of[node]
            errors[:, case], peak[case] = even, min(peak[case], even_peak)
        return spreads._replace(errors=errors, peak=peak)

    def contribution(self, node: int) -> float:
        """Return the error of the worst row as it is judged."""
        return self.values[node][0][-1]

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        spread: ErrorDistribution | None = self.inputs.pairs[node].distribution
        alone = number(spread.errors[-1]) if spread is not None else "-"
        return f"small rows of a function that was not captured: judged relative to the typical row, not by {alone}"
