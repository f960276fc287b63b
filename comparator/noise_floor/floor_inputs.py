"""FloorInputs: the data from which the floors of one comparison are computed, before any effect."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tapscope.comparator.metrics.error_columns import ErrorColumns
from tapscope.comparator.metrics.error_distribution import Quantiles
from tapscope.comparator.noise_floor.attention import AttentionModules
from tapscope.comparator.noise_floor.constants import DEFAULT_REDUCTION, MATRIX_NDIM
from tapscope.comparator.noise_floor.derivative_error import KinkCrossings
from tapscope.comparator.noise_floor.graph import Graph
from tapscope.comparator.noise_floor.propagated_errors import columns_of
from tapscope.comparator.noise_floor.reduction_length import Params, reduction_of
from tapscope.comparator.pair_analysis.pair_result import PairResult

Array = np.ndarray[Any, Any]


class ComparisonFacts(NamedTuple):
    """Facts about a comparison that its matched sites do not contain."""

    softmax_conditions: Mapping[str, Quantiles] = {}
    """Path of an attention module whose weights only one run recorded -> condition of its softmax."""
    kv_cache_epsilon: float = 0.0
    """Epsilon of the format of both runs' KV caches, if it is narrower than their dtypes; otherwise 0."""
    time_embeddings: Mapping[str, float] = {}
    """Site of a sinusoidal embedding -> the largest error of a row that the rounding of its input explains."""
    unmatched_norms: frozenset[str] = frozenset()
    """Modules that contain a norm which both runs recorded but which could not be compared."""
    kink_crossings: Mapping[str, KinkCrossings] = {}
    """Site of a gradient -> its elements that are zero in exactly one run."""
    inherited_attention: Mapping[str, float] = {}
    """Site of an attention output -> the error of its worst row, if its inputs explain the whole error."""
    inherited_activations: frozenset[str] = frozenset()
    """Sites of outputs of ReLU and similar functions whose inputs explain their whole error."""


NO_FACTS = ComparisonFacts()


class FloorInputs:
    """The matched sites of one comparison as nodes of the dataflow graph.

    A *case* is a node that was compared as rounded numbers; columns have one element per case, in execution order.
    """

    def __init__(
        self,
        pairs: Sequence[PairResult],
        graph: Graph,
        params: Sequence[Params],
        facts: ComparisonFacts = NO_FACTS,
    ) -> None:
        """Initialize from the results of the graph's nodes, ``pairs``, and the parameters of their modules,
        ``params``."""
        self.pairs, self.graph, self.params, self.facts = pairs, graph, params, facts
        self.nodes = [i for i, node in enumerate(graph.nodes) if node.numeric]
        """The node of each case."""
        self.case_of = _inverse(self.nodes, len(pairs))
        """The case of each node; -1 for a node that was not compared as numbers."""
        self.spreads: ErrorColumns = columns_of([pairs[node].values for node in self.nodes])
        """The measured errors."""
        self.attention = AttentionModules(graph)
        has_gradients = any(node.port.endswith(".grad") for node in graph.nodes)
        self.reductions = [
            reduction_of(n.cls, p, has_gradients=has_gradients) for n, p in zip(graph.nodes, params, strict=True)
        ]
        """Reduction length of each node's module; 0 if unknown."""
        self.longest_reduction = max(filter(None, self.reductions), default=DEFAULT_REDUCTION)

    def shape(self, node: int) -> tuple[int, ...]:
        """Return the baseline's shape; empty if only the target has the site."""
        side = self.pairs[node].baseline
        return side.shape if side is not None else ()

    def parameter_shape(self, node: int) -> tuple[int, ...]:
        """Return the shape of the parameter that a gradient belongs to; empty if unknown."""
        port = self.graph.nodes[node].port
        return self.params[node].get(port[len("param[") :].partition("]")[0], ())

    def is_lookup(self, node: int) -> bool:
        """Return whether the node consists of rows of an embedding table, which are copied."""
        this, params = self.graph.nodes[node], self.params[node]
        is_table = "Embedding" in this.cls and [len(shape) for shape in params.values()] == [MATRIX_NDIM]
        return is_table and this.port.startswith("out") and not this.is_backward

    def site(self, node: int) -> str:
        """Return the name of a node's site."""
        return self.pairs[node].site

    def columns(self, values: Mapping[int, float], neutral: float) -> Array:
        """Convert numbers by node into a column, [cases], with ``neutral`` for cases without a number."""
        column = np.full(len(self.nodes), neutral)
        for node, value in values.items():
            if self.case_of[node] >= 0:
                column[self.case_of[node]] = value
        return column


def _inverse(nodes: Sequence[int], count: int) -> list[int]:
    inverse = [-1] * count
    for case, node in enumerate(nodes):
        inverse[node] = case
    return inverse
