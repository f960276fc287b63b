"""Inherited attention errors: the effect of errors of queries and keys on attention without recorded weights."""

from collections.abc import Mapping

from tapscope.comparator.noise_floor.effect import Effect
from tapscope.core.formatting import number


class InheritedAttention(Effect[float]):
    """Errors that attention inherits: a sharp softmax has a larger condition number than any module, and a fused kernel
    does not write the weights that would reveal it. If such an output differs, :mod:`..explain.recomputed_attention`
    checks that each run's values are the attention of its own queries, keys and values.
    """

    name = "inherited_attention"

    def find(self) -> Mapping[int, float]:
        """Compute node -> error."""
        known = self.inputs.facts.inherited_attention
        candidates = ((n, known.get(self.inputs.site(n), 0.0)) for n in self.inputs.nodes) if known else ()
        return {node: error for node, error in candidates if error}

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        error = number(self.values[node])
        return f"each run's values are the attention of its own queries, keys and values: these move them by {error}"
