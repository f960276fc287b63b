"""Float16 underflow: rounding to multiples of the smallest number, which is large only in float16."""

from collections.abc import Mapping, Sequence

from msgspec import structs

from tapscope.comparator.metrics.error_distribution import NO_ERROR, ErrorDistribution
from tapscope.comparator.noise_floor.compute_dtype import ComputeDtype
from tapscope.comparator.noise_floor.constants import FLOAT32_STEP
from tapscope.comparator.noise_floor.effect import Effect
from tapscope.comparator.noise_floor.local_rounding import rounding_error
from tapscope.comparator.noise_floor.rerouted_rows import ReroutedRows
from tapscope.core import dtypes
from tapscope.core.formatting import number

_MIN_VISIBLE_UNDERFLOW = 1e-30
"""Smallest number of a format below which underflow has no effect: bfloat16 and float32 reach down to 1e-38."""


def underflow_error(names: Sequence[str], spread: ErrorDistribution) -> float:
    """Return the error that rounding to multiples of the smallest number adds to the typical row, relative to the
    row."""
    if spread.row_sizes is None or spread.row_sizes.median_rms <= 0.0:
        return 0.0
    steps = rounding_error("float32", "float32", 1) / FLOAT32_STEP
    return steps * max(map(dtypes.smallest, names)) / spread.row_sizes.median_rms


class Float16Underflow(Effect[float]):
    """Underflow in float16: gradients below its normal range are rounded to multiples of its smallest number, 6e-8.
    This is an absolute error, which is large relative to a small row."""

    name = "float16_underflow"

    def find(self) -> Mapping[int, float]:
        """Compute node -> error."""
        names, pairs = self.effects[ComputeDtype].names, self.inputs.pairs
        spreads = ((node, pairs[node].values.distribution) for node in self.inputs.nodes)
        candidates = ((node, underflow_error(names(node), spread)) for node, spread in spreads if spread is not None)
        return {node: error for node, error in candidates if error > 0.0}

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        smallest = max(map(dtypes.smallest, self.effects[ComputeDtype].names(node)))
        return f"rounding to multiples of {number(smallest)}, the smallest number of the coarser dtype"


class FlushedElement(Effect[list[ErrorDistribution]]):
    """Possible flush to zero of the largest element in the smallest row: an error of ``smallest number / element``."""

    name = "flushed_element"

    def find(self) -> Mapping[int, list[ErrorDistribution]]:
        """Compute gradient -> errors that enter it."""
        flushed, names, errors = {}, self.effects[ComputeDtype].names, self.effects[ReroutedRows].errors
        for node in self.inputs.graph.gradients:
            spread = errors[node]
            sizes, smallest = spread.row_sizes if spread is not None else None, max(map(dtypes.smallest, names(node)))
            if sizes is not None and sizes.min_rms > 0.0 and smallest >= _MIN_VISIBLE_UNDERFLOW:
                flushed[node] = [structs.replace(NO_ERROR, peak=min(smallest / sizes.min_rms, 1.0))]
        return flushed

    def contribution(self, node: int) -> float:
        """Return the error of the largest element."""
        return self.values[node][0].peak

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        smallest = max(map(dtypes.smallest, self.effects[ComputeDtype].names(node)))
        return f"the largest element of the smallest row is about {number(smallest)} and may be flushed to zero"
