"""Sharp softmax: a softmax turns absolute errors of its scores into relative errors of its weights.

Its condition is the scatter of the scores (:mod:`..metrics.softmax_condition`). The scatter follows from the weights
that either run recorded, even if the other run has a fused kernel that never writes them.
"""

from collections.abc import Mapping

import numpy as np

from tapscope.comparator.metrics.error_distribution import Quantiles, root_mean_square
from tapscope.comparator.metrics.near_zero_rows import NO_AMPLIFICATION
from tapscope.comparator.metrics.softmax_condition import excess_condition
from tapscope.comparator.noise_floor.constants import DEFAULT_CONDITION
from tapscope.comparator.noise_floor.effect import Effect, Unit
from tapscope.core.formatting import number


class SharpSoftmax(Effect[Quantiles]):
    """Large condition number of a softmax: attention weights, and the means computed with them, differ by up to
    ``condition of the softmax / DEFAULT_CONDITION`` times the usual error."""

    name = "sharp_softmax"
    unit = Unit.FACTOR
    by_module: Mapping[str, Quantiles] = {}
    """Path of an attention module -> factor at each quantile over rows."""

    def find(self) -> Mapping[int, Quantiles]:
        """Compute value -> factor at each quantile over rows."""
        nodes, pairs, graph = self.inputs.graph.nodes, self.inputs.pairs, self.inputs.graph
        sharp = {**self.inputs.facts.softmax_conditions}
        sharp |= {
            nodes[n].path: one.extras.softmax_condition for n, one in enumerate(pairs) if one.extras.softmax_condition
        }
        self.by_module = {path: excess_condition(DEFAULT_CONDITION, factors) for path, factors in sharp.items()}
        factors: dict[int, Quantiles] = {}
        if not self.by_module:
            return factors
        for node, one in enumerate(pairs):
            if graph.is_backward[node]:
                continue
            module = self.inputs.attention.module_of(node)
            if one.extras.softmax_condition:
                factor = excess_condition(DEFAULT_CONDITION, one.extras.softmax_condition)
            else:
                factor = NO_AMPLIFICATION if module is None else self.by_module.get(module, NO_AMPLIFICATION)
            if factor is not NO_AMPLIFICATION:
                factors[node] = factor
        return factors

    def factor(self, node: int) -> Quantiles:
        """Return the factor on the errors of rows at each quantile."""
        return self.values.get(node, NO_AMPLIFICATION)

    def passed(self, node: int, upstream: float) -> float:
        """Return the sum of all roundings upstream after the softmax, multiplied by its root mean square factor over
        all rows."""
        if node not in self.values:
            return upstream
        return upstream * float(root_mean_square(np.array(self.values[node])))

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        return f"the softmax has a condition number of up to {number(DEFAULT_CONDITION * max(self.values[node]))}"
