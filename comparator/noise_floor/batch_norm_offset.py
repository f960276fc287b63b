"""Batch norm: the effect of rounding in sums over the batch on the gradient of the weight before the norm."""

import math
import re
from collections.abc import Mapping

from msgspec import structs

from tapscope.comparator.metrics.error_distribution import NO_ERROR, ErrorDistribution
from tapscope.comparator.noise_floor.constants import FLOAT32_STEP, MATRIX_NDIM, ROUND_TO_NEAREST, TWO_SIDES
from tapscope.comparator.noise_floor.effect import Effect
from tapscope.core.formatting import number

_BATCH_NORM = re.compile(r"(Lazy|Sync)?BatchNorm([123]d)?")


class BatchNormOffset(Effect[list[ErrorDistribution]]):
    """Rounding of batch means: the backward of a batch norm subtracts the mean over the batch from each channel. The
    rounding of this sum of n values, ``0.2 sqrt(2) 2^-23 sqrt(n)``, is the same at every position. It adds up in the
    gradient of the weight before the norm, which is a sum over the same positions. Independent terms grow there as
    ``sqrt(n)``; relative to these, it is another ``sqrt(n)`` times as large.
    """

    name = "batch_norm_offset"

    def find(self) -> Mapping[int, list[ErrorDistribution]]:
        """Compute gradient of a weight -> errors that enter it."""
        graph = self.inputs.graph
        offsets = {}
        for node in graph.gradients:
            if not graph.nodes[node].is_summed or len(self.inputs.parameter_shape(node)) < MATRIX_NDIM:
                continue
            path = graph.nodes[node].path
            outputs = [i for i in graph.inputs(node).nodes if graph.nodes[i].path == path and graph.is_backward[i]]
            places = max((self._places(i, node) for i in outputs if self._is_of_batch_norm(i)), default=0)
            if places:
                error = ROUND_TO_NEAREST * TWO_SIDES * FLOAT32_STEP * places
                offsets[node] = [structs.replace(NO_ERROR, errors=(error,) * 4, element=error, peak=error)]
        return offsets

    def _is_of_batch_norm(self, gradient: int) -> bool:
        graph = self.inputs.graph
        inputs = graph.inputs(gradient)
        first = inputs.nodes[0] if inputs.source == "aliased" else gradient  # the site that recorded it first
        return any(_BATCH_NORM.fullmatch(cls) for cls in graph.consumer_classes(first))

    def _places(self, gradient: int, node: int) -> int:
        """Return the number of positions over which the norm takes a mean: all positions of a channel."""
        shape, num_channels = self.inputs.shape(gradient), self.inputs.parameter_shape(node)[0]
        return math.prod(shape) // num_channels if num_channels and not math.prod(shape) % num_channels else 0

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        error = number(self.contribution(node))
        return f"the batch norm after it subtracts means, whose rounding adds up over the batch to {error}"
