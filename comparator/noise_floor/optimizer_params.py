"""Optimizer parameters: the effect of gradient errors on parameters from step to step."""

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import numpy as np
from msgspec import structs

from tapscope.comparator.metrics.elementwise import hypot
from tapscope.comparator.metrics.error_columns import ErrorColumns, LargestErrors
from tapscope.comparator.metrics.error_distribution import NO_ERROR, QUANTILES, ErrorDistribution, Quantiles
from tapscope.comparator.metrics.updates import UNKNOWN_SHARE, error_of_updates
from tapscope.comparator.noise_floor.bounds import SiteTerms, local_bound, path_bound
from tapscope.comparator.noise_floor.constants import MAX_ROW_ERROR, PARAMETER_CONDITION
from tapscope.comparator.noise_floor.effect import Effect
from tapscope.comparator.noise_floor.floor_table import FloorTable
from tapscope.core.formatting import number, plural

_NO_UPDATES: Quantiles = (0.0,) * len(QUANTILES)
Array = np.ndarray[Any, Any]


class OptimizerUpdates(Effect[ErrorDistribution]):
    """Errors of gradients in a parameter: their effect on each update, added up over the steps
    (:mod:`..metrics.updates`), and the rounding of each new value."""

    name = "optimizer_updates"
    parameters: Sequence[int] = ()
    """Nodes of parameters that an optimizer updates."""

    def find(self) -> Mapping[int, ErrorDistribution]:
        """Compute parameter -> effect of its gradients' errors over all steps."""
        self.parameters = [n for n, node in enumerate(self.inputs.graph.nodes) if node.is_trained]
        return {node: self.updated(node) for node in self.parameters}

    def updated(self, node: int, num_steps: int | None = None) -> ErrorDistribution:
        """Return the effect of the gradients' errors on a parameter over the first ``num_steps`` steps, or over all."""
        pairs = self.inputs.pairs
        sensitivities = [pairs[i].extras.update_sensitivity for i in self.inputs.graph.inputs(node).nodes]
        drifts, moves = pairs[node].extras.parameter_updates[:num_steps], []
        flipped = _NO_UPDATES if sensitivities else UNKNOWN_SHARE
        for drift in drifts:  # if no gradient of a step differs, earlier ones still move the parameter
            flipped = sensitivities[0].get(drift.step, flipped) if sensitivities else flipped
            moves.append((flipped, drift))
        return error_of_updates(moves)

    def modelled(self, node: int, local: float) -> float:
        """Return the modelled error of the last parameter value that another step uses; ``local`` is the rounding of
        one value."""
        return math.hypot(self.updated(node, -1).errors[-1], local)

    @cached_property
    def propagated(self) -> Mapping[int, ErrorDistribution]:
        """Parameter -> its errors as they propagate to other sites.

        Each row of an output is computed from all rows of a weight, and each channel from one row or element.
        """
        propagated_errors = {}
        for node in self.parameters:
            before = [drift.distribution for drift in self.inputs.pairs[node].extras.parameter_updates[:-1]]
            spread = max(before, key=lambda each: each.errors[-1], default=NO_ERROR)
            propagated_errors[node] = structs.replace(spread.worst_everywhere(), channel=spread.peak, channel_noise=0.0)
        return propagated_errors

    def judged(self, terms: SiteTerms) -> tuple[list[int], Array, FloorTable, FloorTable]:
        """Return (cases, tests, local bounds, both bounds) of parameters that differ; ``terms`` are those of all cases.

        The step with the largest error relative to what the gradients up to that step explain decides: a wrong
        parameter makes the gradients of the next step wrong.
        """
        pairs, case_of = self.inputs.pairs, self.inputs.case_of
        steps = [
            (node, num, drift.distribution)
            for node in (n for n in self.parameters if case_of[n] >= 0)
            for num, drift in enumerate(pairs[node].extras.parameter_updates, 1)
            if not drift.distribution.is_zero
        ]
        cases = [case_of[node] for node, _, _ in steps]
        given = LargestErrors.of([(self.updated(node, num),) for node, num, _ in steps])
        local = np.array([self._rounded(node, num, terms.local.item(case_of[node])) for node, num, _ in steps])
        spreads = ErrorColumns.of([spread for _, _, spread in steps])
        # A parameter initialized to zero is the sum of its updates, and may differ by the whole sum.
        limit = np.maximum(MAX_ROW_ERROR, given.errors[0])
        own = SiteTerms(spreads, local, terms.eps[cases], limit, given.errors[-1], widens_narrow=terms.widens_narrow)
        by_inputs = local_bound(given, own, PARAMETER_CONDITION).for_one_row(spreads.num_rows)
        by_path = path_bound(hypot(given.errors[-1], local), own).for_one_row(spreads.num_rows)
        by_both = by_inputs.smaller(by_path)
        ratios = by_both.worst(spreads.tests).ratios.tolist()
        worst = [max(group, key=ratios.__getitem__) for _, group in groupby(range(len(cases)), cases.__getitem__)]
        return [cases[i] for i in worst], spreads.tests[:, worst], by_inputs.at(worst), by_both.at(worst)

    def _rounded(self, node: int, num_steps: int, local: float) -> float:
        """Return the rounding of the initial value and of each step; an update below half a step between numbers is
        lost each time."""
        moved = self.inputs.pairs[node].extras.parameter_updates[:num_steps]
        return local + sum(min(local, each.update_size.errors[0]) for each in moved)

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        steps = plural(len(self.inputs.pairs[node].extras.parameter_updates), "optimizer step")
        return f"the errors of its gradients move it by up to {number(self.contribution(node))} in {steps}"
