"""LocalError: the error that one pass through a module adds by itself, with all effects combined."""

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import numpy as np

from tapscope.comparator.noise_floor.constants import DEFAULT_CONDITION, MAX_ROW_ERROR
from tapscope.comparator.noise_floor.effect import Effect
from tapscope.comparator.noise_floor.float16_underflow import Float16Underflow
from tapscope.comparator.noise_floor.inherited_attention_error import InheritedAttention
from tapscope.comparator.noise_floor.large_rows import LargeRowRounding
from tapscope.comparator.noise_floor.local_rounding import DtypeRounding, OpsInSequence, RankSum, ReductionOrder
from tapscope.comparator.noise_floor.rope_error import RopeAngle
from tapscope.comparator.noise_floor.time_embedding_error import TimeEmbedding

Array = np.ndarray[Any, Any]


class LocalError(Effect[float]):
    """Error that the module adds. Variances of independent errors add up: ``sqrt(ops × ranks) hypot(rounding, order of
    sums, underflow, …)``."""

    name = "local_error"
    is_optional = False
    is_sum = True

    def find(self) -> Mapping[int, float]:
        """Compute node -> error."""
        rounding, order = self.effects[DtypeRounding].values, self.effects[ReductionOrder].values
        angle, time = self.effects[RopeAngle].values, self.effects[TimeEmbedding].values
        attention = self.effects[InheritedAttention].values
        ops, ranks = self.effects[OpsInSequence].values, self.effects[RankSum].values
        errors = {}
        for node in self.inputs.nodes:
            once = math.hypot(
                rounding[node],
                order.get(node, 0.0),
                self.of_small_rows(node),
                angle.get(node, 0.0),
                time.get(node, 0.0),
                attention.get(node, 0.0),
            )
            errors[node] = once * math.sqrt(ops.get(node, 1.0) * ranks.get(node, 1.0))
        return errors

    def of_small_rows(self, node: int) -> float:
        """Return the part that is an absolute error, which relative to a small row may exceed any limit."""
        underflow, rest = self.effects[Float16Underflow].values, self.effects[LargeRowRounding].values
        return math.hypot(underflow.get(node, 0.0), rest.get(node, 0.0))

    @cached_property
    def column(self) -> Array:
        """[cases]: local error."""
        return np.array([self.values[node] for node in self.inputs.nodes])

    @cached_property
    def limits(self) -> Array:
        """[cases]: maximum error of the typical row."""
        received, attention = self.effects[TimeEmbedding].received, self.effects[InheritedAttention].values
        k = DEFAULT_CONDITION
        each = (
            max(MAX_ROW_ERROR, k * max(self.of_small_rows(n), received(n), attention.get(n, 0.0)))
            for n in self.inputs.nodes
        )
        return np.fromiter(each, np.float64, len(self.inputs.nodes))

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        return "error of the module itself: the errors above added in quadrature"
