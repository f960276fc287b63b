"""Large rows: the float32 rounding of the largest row, as it appears in the typical row."""

from collections.abc import Mapping

from tapscope.comparator.metrics.error_distribution import ErrorDistribution
from tapscope.comparator.noise_floor.effect import Effect
from tapscope.comparator.noise_floor.local_rounding import rounding_error
from tapscope.core.formatting import number


def large_row_error(spread: ErrorDistribution) -> float:
    """Return the float32 rounding of the largest row, relative to the typical row; 0 if the row sizes are unknown."""
    return (
        rounding_error("float32", "float32", 1) * spread.row_sizes.max_to_median
        if spread.row_sizes is not None
        else 0.0
    )


class LargeRowRounding(Effect[float]):
    """Float32 rounding of the largest row in the typical one: gradients of logits add up to zero over a row, and
    gradients of experts that no token chose are differences of larger ones. The typical row therefore carries the
    rounding of the largest one.
    """

    name = "large_row_rounding"

    def find(self) -> Mapping[int, float]:
        """Compute node -> error."""
        spreads = ((node, self.inputs.pairs[node].values.distribution) for node in self.inputs.nodes)
        return {
            n: large_row_error(spread) for n, spread in spreads if spread is not None and spread.row_sizes is not None
        }

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        spread = self.inputs.pairs[node].values.distribution
        reach = spread.row_sizes.max_to_median if spread is not None and spread.row_sizes is not None else 1.0
        return f"the largest row of the gradient is {number(reach)} times the typical one, which carries its rounding"
