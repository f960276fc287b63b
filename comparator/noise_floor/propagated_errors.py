"""Handed: the errors of sites as they go into what follows: as objects when they are asked for, or in columns."""

from collections.abc import Mapping, Sequence
from itertools import groupby

import numpy as np

from tapscope.comparator.metrics.error_distribution import NOTHING, Spread
from tapscope.comparator.metrics.spreads import Spreads
from tapscope.comparator.noise_floor.graph import Graph
from tapscope.comparator.pair_analysis.pair_result import Examined, Read


class HandedOn:
    """The spreads that nodes hand on, made when they are asked for."""

    def __init__(self, examined: Sequence[Examined], graph: Graph, moved: Mapping[int, Spread] | None = None) -> None:
        """``moved``: of parameters that are trained."""
        self._examined, self._graph = examined, graph
        apart = {i: one.more.handed_on for i, one in enumerate(examined) if graph.nodes[i].numeric}
        self.instead = {**{i: spread for i, spread in apart.items() if spread is not None}, **(moved or {})}
        """Those that are not what is judged."""

    def __getitem__(self, node: int) -> Spread | None:
        """None where there is none, or it says nothing."""
        if (found := self.instead.get(node)) is not None:
            return found
        return self._examined[node].spread if self._graph.nodes[node].numeric else None


def spreads_of(reads: Sequence[Read]) -> Spreads:
    """The spreads of sites that have one."""
    columns = [Spreads.of([])]
    for values, group in groupby(reads, key=lambda read: None if read.spread is not None else read.values):
        some = list(group)
        if values is None:
            columns.append(Spreads.of([read.spread or NOTHING for read in some]))
        else:
            columns.append(values.spreads.at([read.place for read in some]))
    return Spreads(*(np.concatenate(each, axis=-1) for each in zip(*columns, strict=True)))
