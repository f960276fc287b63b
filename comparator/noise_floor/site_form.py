"""Form of a site: effects of its weights, channels and width."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tapscope.comparator.metrics.error_columns import CHANNELS
from tapscope.comparator.metrics.near_zero_rows import normalises_rows
from tapscope.comparator.noise_floor.constants import NARROW_PATH_WIDTH, OFFSET_WEIGHT_ROUNDING
from tapscope.comparator.noise_floor.effect import Effect, Unit
from tapscope.core.formatting import number, plural

Array = np.ndarray[Any, Any]


class OffsetWeight(Effect[float]):
    """Rounding of offset weights: Gemma's norms multiply by 1 + w, where w is rounded relative to itself. A channel
    with a small 1 + w differs by several epsilons in every row."""

    name = "offset_weight"
    unit = Unit.FACTOR

    def find(self) -> Mapping[int, float]:
        """Compute node -> factor on the rounding of a channel's weight."""
        graph = self.inputs.graph
        return {n: OFFSET_WEIGHT_ROUNDING for n in self.inputs.nodes if graph.nodes[n].has_offset_weight}

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        cls = self.inputs.graph.nodes[node].cls
        return f"{cls} multiplies by 1 + weight; a weight near -1 is rounded relative to itself"


class NarrowRows(Effect[float]):
    """Variation of narrow rows: rows of w < 5 elements vary like a few normal numbers, and their tail is ``5 / w``
    times as wide. Along a path, the tail of rows of w < 20 elements is ``20 / w`` times as wide."""

    name = "narrow_rows"
    unit = Unit.FACTOR

    def find(self) -> Mapping[int, float]:
        """Compute node -> factor on the errors of single rows along a path."""
        width = self.inputs.spreads.width
        cases = np.flatnonzero((width > 0) & (width < NARROW_PATH_WIDTH)).tolist()
        return {self.inputs.nodes[case]: NARROW_PATH_WIDTH / width.item(case) for case in cases}

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        width = self.inputs.spreads.width.item(self.inputs.case_of[node])
        return f"a row has {plural(width, 'element')}: the ratio of its error to its size varies widely"


class PointwiseChannel(Effect[float]):
    """Systematic error of a channel in a pointwise function, which multiplies it where the function is flat or near
    zero. The whole gain of its input's channels therefore counts, not only the part above their noise. A norm keeps the
    gain of a channel and makes rows equally large, so their scatter hides less of it: the whole gain of that input
    channel counts as well.
    """

    name = "pointwise_channel"

    def find(self) -> Mapping[int, float]:
        """Compute node -> largest gain of a channel of its inputs."""
        graph, pairs, case_of = self.inputs.graph, self.inputs.pairs, self.inputs.case_of
        channels = {}
        for node in self.inputs.nodes:
            this, own = graph.nodes[node], pairs[node].distribution
            is_norm = this.port.startswith("out") and normalises_rows(this.cls)
            if own is None or not (this.is_pointwise or is_norm) or this.is_backward:
                continue
            spreads = (pairs[i].distribution for i in graph.inputs(node).nodes if case_of[i] >= 0)
            known = [s for s in spreads if s is not None and (s.channel_index == own.channel_index or not is_norm)]
            if known or not is_norm:
                channels[node] = max((abs(spread.channel) for spread in known), default=0.0)
        return channels

    def apply(self, given: Array) -> Array:
        """Return the errors of the inputs, [kinds, cases], with these channel gains."""
        for node, channel in self.values.items():
            case = self.inputs.case_of[node]
            given[CHANNELS, case] = max(channel, given[CHANNELS, case])
        return given

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        error = number(self.values[node])
        if self.inputs.graph.nodes[node].is_pointwise:
            return f"a pointwise function receives channels that differ by up to {error}, their noise included"
        return f"a norm receives the channel that stands out with a difference of {error}, its noise included"
