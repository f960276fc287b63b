"""Rotary angles: the rounding of the cosine and sine tables of a rotary embedding.

The frequency, and its product with the position, are rounded relative to themselves. The error of an angle is therefore
one rounding of the angle, which grows with the position. Its cosine and sine stay between -1 and 1.
"""

import re
from collections.abc import Mapping

from tapscope.comparator.facts import Place
from tapscope.comparator.noise_floor.constants import ROPE_ROUNDING
from tapscope.comparator.noise_floor.effect import Effect

_ROTARY = re.compile(r"(?i)rotary|rope")


class RopeAngle(Effect[float]):
    """Rounding of rotary angles: cosines and sines of an angle near p radians differ by ``0.2 sqrt(2) 2^-24 p``, where
    p is the position, because the highest frequency is 1."""

    name = "rope_angle"

    def find(self) -> Mapping[int, float]:
        """Compute node -> error."""
        classes = {cls for cls in {node.cls for node in self.inputs.graph.nodes} if _ROTARY.search(cls)}
        nodes = (node for node in self.inputs.nodes if self.inputs.graph.nodes[node].cls in classes)
        positions = ((node, self._position(node)) for node in nodes if classes)
        return {node: ROPE_ROUNDING * position for node, position in positions if position}

    def _position(self, node: int) -> int:
        """Return the position of the row with the largest error."""
        worst: Place | None = self.inputs.pairs[node].values.worst
        if worst is None:
            return 0
        if worst.position is not None:
            return worst.position
        return worst.index[0] if len(worst.index) > 1 else 0  # a table compared as a whole, one row per position

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        return f"angles at position {self._position(node)} are rounded relative to their size in radians"
