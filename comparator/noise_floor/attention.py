"""Attention: which values are weighted means over rows, and what follows of their errors.

Such a mean hands the error of one row to all that attend to it. And the weights are made by a softmax, which takes
errors of scores, that are absolute, for relative ones (:mod:`.sharpness`): how sharp it is can be told by the weights
that either run recorded, also where the other one has a kernel that never writes them down.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tapscope.comparator.metrics.columns import hypot, larger
from tapscope.comparator.metrics.error_distribution import QUANTILES, Quantiles, root_mean_square
from tapscope.comparator.metrics.near_zero_rows import NO_LIFT
from tapscope.comparator.metrics.softmax_condition import beyond
from tapscope.comparator.metrics.spreads import ELEMENT, PEAK
from tapscope.comparator.noise_floor.conditions import CONDITION
from tapscope.comparator.noise_floor.graph import Graph
from tapscope.comparator.noise_floor.kv_cache_error import twice_rounded
from tapscope.comparator.pair_analysis.pair_result import Examined

Array = np.ndarray[Any, Any]

_ATTENTION = re.compile(r"(?i)attention|attn")
_MIXES = frozenset({"around", "inside", "before"})


class Beside(NamedTuple):
    """What is known of a comparison beside the sites that meet."""

    sharpness: Mapping[str, Quantiles] = {}
    """Of modules whose weights one run alone recorded."""
    cache: float = 0.0
    """Epsilon of the format in which both runs keep their caches, where that is a narrow one; see :mod:`.caches`."""
    sinusoids: Mapping[str, float] = {}
    """Site -> the largest error of a row of an embedding that differs as the time does which it is of."""


NONE = Beside()


class Attention:
    """The attentions among the modules of a graph."""

    def __init__(self, examined: Sequence[Examined], graph: Graph, beside: Beside) -> None:
        """``examined`` are those of the graph's nodes."""
        self._examined, self._graph, self._cache = examined, graph, beside.cache
        self._paths = {node.path for node in graph.nodes if _ATTENTION.search(node.cls)}
        self._of = [self._around(node) if self._paths else None for node in range(len(graph.nodes))]
        sharp = {**beside.sharpness}
        sharp |= {graph.nodes[n].path: one.more.sharpness for n, one in enumerate(examined) if one.more.sharpness}
        self._lifts: dict[str | None, Quantiles] = {path: beyond(CONDITION, found) for path, found in sharp.items()}
        """By how much more than by a usual condition the softmax of each enlarges errors."""

    def of(self, node: int) -> str | None:
        """The module that a value is, or going backward a gradient, may be a weighted mean over rows of: the one that
        gave it, where that has no parameters, or the one between whose parts it lies; None of any other, such as
        the queries and keys that it is given."""
        return self._of[node]

    def mixes(self, node: int) -> bool:
        """Whether a row may be made of several rows of what went in: by attention, or by functions nobody saw."""
        how = self._graph.inputs(node).how
        return how in _MIXES or self.of(node) is not None or self.convolves(node)

    def lift(self, node: int) -> Quantiles:
        """By how much more than usual a value may be off that is what a softmax gave, or was made of that."""
        if self._graph.is_backward[node]:
            return NO_LIFT
        own = self._examined[node].more.sharpness
        return beyond(CONDITION, own) if own else self._lifts.get(self.of(node), NO_LIFT)

    def passed(self, node: int, before: float) -> float:
        """What all roundings before a node are worth behind it: a softmax may be sharper than usual, of all rows
        together, and what went through a cache was rounded there."""
        more = self.lift(node) if self._lifts else NO_LIFT
        if more is not NO_LIFT:
            before *= float(root_mean_square(np.array(more)))
        return float(twice_rounded(np.array(before), self._cache)) if self._cache and self._is_mean(node) else before

    def lifts_around(self) -> dict[str, Quantiles]:
        """Of the modules that make weights and of those around them, where their softmax is sharp."""
        found: dict[str, Quantiles] = {}
        for node, this in enumerate(self._graph.nodes) if self._lifts else ():
            more = self._lifts.get(this.path, NO_LIFT)
            for path in (this.path, self._graph.enclosing(node)) if more is not NO_LIFT else ():
                found[path] = tuple(map(max, more, found.get(path, more)))
        return found

    def with_means(self, given: Array, nodes: Sequence[int]) -> Array:
        """Errors of what went into some nodes, [kinds, nodes], as they appear there: the typical row of an attention is
        given the root mean square of all rows' errors, for those that are far off are in every row that attends to
        them; and keys and values have gone through the cache."""
        at = [row for row, node in enumerate(nodes) if self._is_mean(node) or self.convolves(node)]
        if not at:
            return given
        given = given.copy()
        typical = given[0, at]
        mean = larger(typical, root_mean_square(given[: len(QUANTILES), at]))
        given[ELEMENT, at] *= np.divide(mean, typical, out=np.ones_like(mean), where=typical > 0.0)
        given[0, at] = mean
        if self._cache:
            given[: ELEMENT + 1, at] = twice_rounded(given[: ELEMENT + 1, at], self._cache)
            given[PEAK, at] = hypot(given[PEAK, at], np.where(given[PEAK, at] > 0.0, self._cache, 0.0))
        return given

    def _around(self, node: int) -> str | None:
        this, how = self._graph.nodes[node], self._graph.inputs(node).how
        if this.is_input and this.path in self._paths:
            return None
        if how == "captured":
            path = None if this.has_params else this.path
        else:
            path = self._graph.enclosing(node) if how == "around" else None
        return path if path in self._paths else None

    def convolves(self, node: int) -> bool:
        """Whether rows of an image were made of each other by a convolution or its like."""
        return self._graph.nodes[node].convolves and self._graph.inputs(node).how == "captured"

    def _is_mean(self, node: int) -> bool:
        return not self._graph.is_backward[node] and self.of(node) is not None
