"""PropagatedErrors: the errors that sites pass on to the sites computed from them, as objects or in columns."""

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np

from tapscope.comparator.metrics.error_columns import ErrorColumns
from tapscope.comparator.metrics.error_distribution import NO_ERROR, ErrorDistribution
from tapscope.comparator.noise_floor.graph import Graph
from tapscope.comparator.pair_analysis.pair_result import PairResult, PairValues


class PropagatedErrors:
    """Node -> the spread of errors that it passes on, made when it is asked for."""

    def __init__(self, pairs: Sequence[PairResult], graph: Graph, replaced: Mapping[int, ErrorDistribution]) -> None:
        """``pairs`` are those of the graph's nodes; ``replaced``: nodes that pass on other errors than those that were
        measured, such as those of rows that were left out."""
        self._pairs, self._graph = pairs, graph
        self.replaced = {node: spread for node, spread in replaced.items() if spread is not None}

    def __getitem__(self, node: int) -> ErrorDistribution | None:
        """None for what was not compared as numbers."""
        if (replacement := self.replaced.get(node)) is not None:
            return replacement
        return self._pairs[node].distribution if self._graph.nodes[node].numeric else None


def columns_of(reads: Sequence[PairValues]) -> ErrorColumns:
    """The spreads of sites that were compared as numbers, in columns."""
    columns = [ErrorColumns.of([])]
    for values, group in groupby(reads, key=lambda read: None if read.distribution is not None else read.columns):
        some = list(group)
        if values is None:
            columns.append(ErrorColumns.of([read.distribution or NO_ERROR for read in some]))
        else:
            columns.append(values.distributions.at([read.index for read in some]))
    return ErrorColumns(*(np.concatenate(each, axis=-1) for each in zip(*columns, strict=True)))
