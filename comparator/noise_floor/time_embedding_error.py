"""Time embeddings: the effect of rounding a diffusion time on its sines and cosines."""

from collections.abc import Mapping

from tapscope.comparator.noise_floor.effect import Effect
from tapscope.core.formatting import number


class TimeEmbedding(Effect[float]):
    """Rounding of a time t, which is a relative error; the error of the angle t × frequency is absolute and grows with
    t. Near t = 1000 in bfloat16, an angle differs by up to 2 radians. :mod:`..detectors.time_embeddings` checks that
    each run's values are the sinusoids of its own time, and measures their distance.
    """

    name = "time_embedding"

    def find(self) -> Mapping[int, float]:
        """Compute node -> error."""
        known = self.inputs.facts.time_embeddings
        candidates = ((n, known.get(self.inputs.site(n), 0.0)) for n in self.inputs.nodes) if known else ()
        return {node: error for node, error in candidates if error}

    def received(self, node: int) -> float:
        """Return the largest such error among the inputs that a module received; for any other value, its own error."""
        graph = self.inputs.graph
        inputs = graph.inputs(node).nodes if graph.nodes[node].is_input else ()
        return max((self.values.get(i, 0.0) for i in inputs), default=self.values.get(node, 0.0))

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        error = number(self.values[node])
        return f"each run's values are the sinusoids of its own time; the rounding of the time moves them by {error}"
