"""ComputeDtype: the dtypes that values were computed in, where these are coarser than those they were returned in."""

from collections.abc import Mapping

from tapscope.comparator.noise_floor.effect import Effect
from tapscope.core import dtypes

_FLOAT32 = dtypes.epsilon("float32")


class ComputeDtype(Effect[tuple[str, str]]):
    """A module that receives 16-bit values computes in 16 bits even if it returns float32, as output heads do. So the
    coarser dtype's epsilon counts."""

    name = "compute_dtype"

    def find(self) -> Mapping[int, tuple[str, str]]:
        """Node -> (baseline's, target's), where they differ from the value's own."""
        pairs = self.inputs.pairs
        dtypes = {node: self._computed_in(node) for node in range(len(pairs))}
        return {node: names for node, names in dtypes.items() if names != pairs[node].dtypes}

    def names(self, node: int) -> tuple[str, str]:
        """The dtypes that a node was computed in, on both sides."""
        return self.values.get(node) or self.inputs.pairs[node].dtypes

    def _computed_in(self, node: int) -> tuple[str, str]:
        graph, pairs = self.inputs.graph, self.inputs.pairs
        own, inputs = pairs[node].dtypes, graph.inputs(node)
        multiplies = inputs.source == "submodules" and graph.nodes[node].has_params  # by weights of its own
        if inputs.source != "captured" and not multiplies:
            return own
        given = [pairs[i].dtypes for i in inputs.nodes if graph.nodes[i].numeric]
        baseline, target = (
            max([name, *(other for other in others if dtypes.epsilon(other) > _FLOAT32)], key=dtypes.epsilon)
            for name, *others in zip(own, *given, strict=True)
        )
        return baseline, target

    def contribution(self, node: int) -> float:
        """Epsilon of the coarser dtype."""
        return max(map(dtypes.epsilon, self.values[node]))

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        one, two = map(dtypes.short, self.values[node])
        return f"computed from {one} and {two} inputs, whatever dtype the output has"
