"""PropagatedErrors: the errors that sites propagate to the sites computed from them, as objects or in columns."""

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np

from tapscope.comparator.metrics.error_columns import ErrorColumns
from tapscope.comparator.metrics.error_distribution import NO_ERROR, ErrorDistribution
from tapscope.comparator.noise_floor.graph import Graph
from tapscope.comparator.pair_analysis.pair_result import PairResult, PairValues


class PropagatedErrors:
    """Mapping from node to the distribution of errors that it propagates, created on access."""

    def __init__(self, pairs: Sequence[PairResult], graph: Graph, replaced: Mapping[int, ErrorDistribution]) -> None:
        """Initialize from the results of the graph's nodes, ``pairs``.

        ``replaced`` contains nodes that propagate other errors than the measured ones, such as those of excluded rows.
        """
        self._pairs, self._graph = pairs, graph
        self.replaced = {node: spread for node, spread in replaced.items() if spread is not None}

    def __getitem__(self, node: int) -> ErrorDistribution | None:
        """Return the propagated errors of a node; None if it was not compared as numbers."""
        if (replacement := self.replaced.get(node)) is not None:
            return replacement
        return self._pairs[node].distribution if self._graph.nodes[node].numeric else None


def columns_of(reads: Sequence[PairValues]) -> ErrorColumns:
    """Return the error distributions of sites that were compared as numbers, in columns."""
    columns = [ErrorColumns.of([])]
    for values, group in groupby(reads, key=lambda read: None if read.distribution is not None else read.columns):
        some = list(group)
        if values is None:
            columns.append(ErrorColumns.of([read.distribution or NO_ERROR for read in some]))
        else:
            columns.append(values.distributions.at([read.index for read in some]))
    return ErrorColumns(*(np.concatenate(each, axis=-1) for each in zip(*columns, strict=True)))
