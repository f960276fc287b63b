"""Attention: values that are weighted means over token rows, and the effect of the mean on the errors of their
inputs."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from tapscope.comparator.metrics.elementwise import larger
from tapscope.comparator.metrics.error_columns import ELEMENT
from tapscope.comparator.metrics.error_distribution import QUANTILES, root_mean_square
from tapscope.comparator.noise_floor.effect import Effect, Unit
from tapscope.comparator.noise_floor.graph import Graph

Array = np.ndarray[Any, Any]

_ATTENTION = re.compile(r"(?i)attention|attn")
_MIXES = frozenset({"enclosing_module", "submodules", "preceding"})


class AttentionModules:
    """The attention modules of a graph, and the values that they compute."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._paths = {node.path for node in graph.nodes if _ATTENTION.search(node.cls)}
        self._of = [self._module(node) if self._paths else None for node in range(len(graph.nodes))]

    def module_of(self, node: int) -> str | None:
        """Return the attention module whose weighted mean over rows a value may be (in the backward, a gradient).

        This is the module that returned the value if it has no parameters, or the module between whose submodules the
        value was computed. None for any other value, such as the queries and keys that the module receives.
        """
        return self._of[node]

    def mixes(self, node: int) -> bool:
        """Return whether a row may be computed from several input rows: by attention, or by a function that was not
        captured."""
        source = self._graph.inputs(node).source
        return source in _MIXES or self.module_of(node) is not None or self.convolves(node)

    def convolves(self, node: int) -> bool:
        """Return whether a convolution or a similar module mixed the rows of an image."""
        return self._graph.nodes[node].convolves and self._graph.inputs(node).source == "captured"

    def is_mean(self, node: int) -> bool:
        """Return whether the node is a value, not a gradient, that may be a weighted mean over rows."""
        return not self._graph.is_backward[node] and self.module_of(node) is not None

    def _module(self, node: int) -> str | None:
        this, source = self._graph.nodes[node], self._graph.inputs(node).source
        if this.is_input and this.path in self._paths:
            return None
        if source == "captured":
            path = None if this.has_params else this.path
        else:
            path = self._graph.enclosing(node) if source == "enclosing_module" else None
        return path if path in self._paths else None


class AttentionMean(Effect[float]):
    """Weighted mean over rows, which propagates the error of one row to every row that attends to it. The typical row
    therefore receives the root mean square of the errors of all rows, ``sqrt(mean(e_i^2))``, not their median."""

    name = "attention_mean"
    unit = Unit.FACTOR

    def find(self) -> Mapping[int, float]:
        """Compute node -> 1; the actual factor depends on the errors, see :meth:`apply`."""
        attention = self.inputs.attention
        return {n: 1.0 for n in self.inputs.nodes if attention.is_mean(n) or attention.convolves(n)}

    def apply(self, given: Array) -> Array:
        """Return the errors of the inputs, [kinds, cases], with the error of the typical row after the mean."""
        at = [self.inputs.case_of[node] for node in self.values]
        if not at:
            return given
        given = given.copy()
        typical = given[0, at]
        mean = larger(typical, root_mean_square(given[: len(QUANTILES), at]))
        given[ELEMENT, at] *= np.divide(mean, typical, out=np.ones_like(mean), where=typical > 0.0)
        given[0, at] = mean
        factors = np.divide(mean, typical, out=np.ones_like(mean), where=typical > 0.0).tolist()
        self.values = dict(zip(self.values, factors, strict=True))
        return given

    def explain(self, node: int) -> str:
        """Explain the effect on ``node``; see :meth:`.Effect.explain`."""
        where = self.inputs.attention.module_of(node) or self.inputs.graph.nodes[node].path
        return f"{where} mixes token rows: the typical row receives the root mean square of the errors of all rows"
