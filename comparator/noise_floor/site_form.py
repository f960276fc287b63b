"""Form of a site: effects of its weights, channels and width that no error of its inputs enters."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tapscope.comparator.metrics.error_columns import CHANNELS
from tapscope.comparator.noise_floor.constants import NARROW_PATH_WIDTH, OFFSET_WEIGHT_ROUNDING
from tapscope.comparator.noise_floor.effect import Effect, Unit
from tapscope.core.formatting import number, plural

Array = np.ndarray[Any, Any]


class OffsetWeight(Effect[float]):
    """Gemma's norms multiply by 1 + w, where w is rounded relative to itself: a channel whose 1 + w is small differs by
    several epsilons in every row."""

    name = "offset_weight"
    unit = Unit.FACTOR

    def find(self) -> Mapping[int, float]:
        """Node -> factor on the rounding of a channel's weight."""
        graph = self.inputs.graph
        return {n: OFFSET_WEIGHT_ROUNDING for n in self.inputs.nodes if graph.nodes[n].has_offset_weight}

    def explain(self, node: int) -> str:
        """See :class:`.Effect`."""
        cls = self.inputs.graph.nodes[node].cls
        return f"{cls} multiplies by 1 + weight; a weight near -1 is rounded relative to itself"


class NarrowRows(Effect[float]):
    """Rows of w < 5 elements vary like a few normal numbers: their tail is ``5 / w`` times as wide. Along a path, the
    tail of rows of w < 20 elements is ``20 / w`` times as wide."""

    name = "narrow_rows"
    unit = Unit.FACTOR

    def find(self) -> Mapping[int, float]:
        """Node -> factor on the errors of single rows along a path."""
        width = self.inputs.spreads.width
        cases = np.flatnonzero((width > 0) & (width < NARROW_PATH_WIDTH)).tolist()
        return {self.inputs.nodes[case]: NARROW_PATH_WIDTH / width.item(case) for case in cases}

    def explain(self, node: int) -> str:
        """See :class:`.Effect`."""
        width = self.inputs.spreads.width.item(self.inputs.case_of[node])
        return f"a row has {plural(width, 'element')}: the ratio of its error to its size varies widely"


class PointwiseChannel(Effect[float]):
    """A pointwise function multiplies the systematic error of a channel where it is flat or near zero: all of the gain
    of its input's channels counts, not only what exceeds their noise."""

    name = "pointwise_channel"

    def find(self) -> Mapping[int, float]:
        """Node -> largest gain of a channel of its inputs."""
        graph, pairs, case_of = self.inputs.graph, self.inputs.pairs, self.inputs.case_of
        found = {}
        for node in self.inputs.nodes:
            if not graph.nodes[node].is_pointwise or graph.is_backward[node]:
                continue
            spreads = (pairs[i].distribution for i in graph.inputs(node).nodes if case_of[i] >= 0)
            found[node] = max((abs(spread.channel) for spread in spreads if spread is not None), default=0.0)
        return found

    def apply(self, given: Array) -> Array:
        """The errors of the inputs, [kinds, cases], with these gains of channels."""
        for node, channel in self.values.items():
            given[CHANNELS, self.inputs.case_of[node]] = channel
        return given

    def explain(self, node: int) -> str:
        """See :class:`.Effect`."""
        error = number(self.values[node])
        return f"a pointwise function receives channels that differ by up to {error}, their noise included"
