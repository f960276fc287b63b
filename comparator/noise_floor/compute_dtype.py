"""ComputeDtype: the dtypes in which values were computed, if coarser than those in which they were returned."""

from collections.abc import Mapping

from tapscope.comparator.noise_floor.effect import Effect
from tapscope.core import dtypes

_FLOAT32 = dtypes.epsilon("float32")


class ComputeDtype(Effect[tuple[str, str]]):
    """Dtype in which values were computed: a module that receives 16-bit values computes in 16 bits even if it returns
    float32, as output heads do. The epsilon of the coarser dtype therefore counts."""

    name = "compute_dtype"

    def find(self) -> Mapping[int, tuple[str, str]]:
        """Compute node -> (baseline's dtype, target's dtype), if they differ from those of the value."""
        pairs = self.inputs.pairs
        dtypes = {node: self._computed_in(node) for node in range(len(pairs))}
        return {node: names for node, names in dtypes.items() if names != pairs[node].dtypes}

    def names(self, node: int) -> tuple[str, str]:
        """Return the dtypes in which a node was computed, on both sides."""
        return self.values.get(node) or self.inputs.pairs[node].dtypes

    def _computed_in(self, node: int) -> tuple[str, str]:
        graph, pairs = self.inputs.graph, self.inputs.pairs
        own, inputs = pairs[node].dtypes, graph.inputs(node)
        multiplies = inputs.source == "submodules" and graph.nodes[node].has_params  # by its own weights
        if inputs.source != "captured" and not multiplies:
            return own
        given = [pairs[i].dtypes for i in inputs.nodes if graph.nodes[i].numeric]
        baseline, target = (
            max([name, *(other for other in others if dtypes.epsilon(other) > _FLOAT32)], key=dtypes.epsilon)
            for name, *others in zip(own, *given, strict=True)
        )
        return baseline, target

    def contribution(self, node: int) -> float:
        """Return the epsilon of the coarser dtype."""
        return max(map(dtypes.epsilon, self.values[node]))

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        one, two = map(dtypes.short, self.values[node])
        return f"computed from {one} and {two} inputs, whatever dtype the output has"
