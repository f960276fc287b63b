"""Lifts: rows next to nothing, and what modules make of them.

A row's error is measured beside a share of the typical row at least
(:data:`~tapscope.kernels.native.overview.SMALL_ROW`). That is too little where a norm follows: it divides each row by
its own size, so that what comes out is off by as much as the row was of itself, and a row of which nothing but rounding
is left comes out as large as any. And it is too much where a function nobody saw makes rows that are small because what
they were made of cancels (a head of a linear attention whose query meets nothing in the state): their rounding is that
of the other rows.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from tapscope.comparator.columns import largest_in
from tapscope.comparator.examined import Examined
from tapscope.comparator.floor import ROW_LIMIT
from tapscope.comparator.graph import Graph
from tapscope.comparator.handed import HandedOn
from tapscope.comparator.spread import QUANTILES, Quantiles, Spread
from tapscope.index import SiteInfo
from tapscope.kernels.native import RowMeasures
from tapscope.kernels.native.overview import SMALL_ROW, median, quantiles

Array = np.ndarray[Any, Any]

_NORM = re.compile(r"norm", re.IGNORECASE)
_MOST = 10.0
"""Error of a row beyond which it says nothing more."""
_STANDS_OUT = 3.0
"""How much further off than the typical row the worst is before it is asked why."""
NO_LIFT = (1.0,) * len(QUANTILES)
"""By how much a norm enlarges errors that need no lift, at :data:`~.spread.QUANTILES`."""
UNMET = (1.0, *(1.0 / SMALL_ROW,) * (len(QUANTILES) - 1))
"""The same of a norm that was not compared: it lifts whatever is less than what errors are measured beside at least."""


def norms_of(sites: Mapping[str, SiteInfo]) -> frozenset[str]:
    """Paths of the modules that divide each row by its size."""
    return frozenset(site.rpartition(":")[0] for site, info in sites.items() if info.cls and _NORM.search(info.cls))


def is_lifted(site: str, norms: Collection[str]) -> bool:
    """Whether the site is what a norm is given, going forward."""
    path, _, port = site.rpartition(":")
    return path in norms and port.startswith("in[") and not port.endswith(".grad")


def own_errors(rows: RowMeasures) -> Quantiles:
    """Errors of rows, each relative to itself alone, at :data:`QUANTILES`; what is zero on one side is all off."""
    parts, wholes = np.sqrt(rows.sum_sq_diff), np.sqrt(rows.sum_sq_baseline)
    most: Array = np.where(parts > 0.0, _MOST, 0.0)
    return quantiles(np.minimum(np.divide(parts, wholes, out=most.copy(), where=wholes > 0.0), _MOST), QUANTILES)


def unmet(everything: Sequence[Examined], norms: Collection[str]) -> frozenset[str]:
    """Modules with a norm inside that both runs recorded, and whose rows do not meet: heads of all tokens in a batch
    that is not the other's."""
    found = set()
    for one in everything:
        path, _, port = one.site.rpartition(":")
        if one.apart and one.baseline and one.target and path in norms and port.startswith("out"):
            found.add(path.rpartition(".")[0])
    return frozenset(found)


def stands_out(errors: Array) -> Array:
    """Whether the worst rows of sites are far off beside the typical one; ``errors`` are [quantiles, sites]."""
    found: Array = errors[-1] > _STANDS_OUT * errors[0]
    return found


def even_errors(rows: RowMeasures, errors: Quantiles) -> Quantiles:
    """The ``errors`` of rows at :data:`QUANTILES`, but that of the typical row relative to that one at least."""
    parts, wholes = np.sqrt(rows.sum_sq_diff), np.sqrt(rows.sum_sq_baseline)
    typical = median(wholes)
    if not typical > 0.0:
        return ()
    found = quantiles(parts / np.maximum(wholes, typical), QUANTILES)
    return errors[0], *(max(errors[0], error) for error in found[1:])


class Lifts:
    """By how much more than they seem rows are off to the norms of a comparison."""

    def __init__(self, examined: Sequence[Examined], graph: Graph, spreads: HandedOn) -> None:
        """``examined`` and ``spreads`` are those of the graph's nodes."""
        self._graph, self._spreads = graph, spreads
        given = [(i, spread, one) for i, one in enumerate(examined) if one.more.own_errors and (spread := spreads[i])]
        lifts = {i: _lift(spread.errors, one.more.own_errors) for i, spread, one in given}
        self.by = {i: by for i, by in lifts.items() if by is not NO_LIFT}
        """Node -> by how much more than they seem its rows are off to what follows, where that is so."""
        self.noise = frozenset(i for i in self.by if (spread := self.handed(i)) and spread.errors[-1] > ROW_LIMIT)
        """Nodes with a row of which rounding has left nothing: a norm makes it as large as any other."""

    def handed(self, node: int) -> Spread | None:
        """A node's spread as what follows is given it."""
        spread = self._spreads[node]
        return spread.lifted(self.by[node]) if spread is not None and node in self.by else spread

    def of(self, nodes: Sequence[int]) -> Array:
        """[quantiles, nodes]: what is made of the inputs of some nodes."""
        if not self.by:
            return np.broadcast_to(1.0, (len(QUANTILES), len(nodes)))
        lifts = np.ones((len(QUANTILES), len(self._graph.nodes)))
        lifts[:, list(self.by)] = np.array(list(self.by.values())).T
        found = largest_in(lifts, [self._graph.inputs(node).nodes for node in nodes])
        return np.maximum(found, 1.0)


def _lift(errors: Sequence[float], own: Sequence[float]) -> Quantiles:
    """How much larger the errors of rows are beside themselves; 1 of what is given to no norm."""
    if not own:
        return NO_LIFT
    found = tuple(max(1.0, alone / error) if error > 0.0 else 1.0 for error, alone in zip(errors, own, strict=True))
    return found if max(found) > 1.0 else NO_LIFT
