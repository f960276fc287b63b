"""Wide: floors of sites whose errors may be all in a few rows: of tokens that took another way, or whose gradient is
next to nothing."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tapscope.comparator.metrics.columns import larger, smaller
from tapscope.comparator.metrics.error_distribution import Spread
from tapscope.comparator.metrics.spreads import Largest
from tapscope.comparator.noise_floor.conditions import PRODUCTS
from tapscope.comparator.noise_floor.floor import Terms, local_floors
from tapscope.comparator.noise_floor.floor_inputs import Cases
from tapscope.comparator.noise_floor.floors import Floors
from tapscope.comparator.noise_floor.gradients import shared_gain, spilled

Array = np.ndarray[Any, Any]
_MOVED = 2.0
"""How much further off a row may be that took another way: as far as a vector of its size that points elsewhere. A row
that was made of such rows may be so by as much as its condition makes of their error."""
_MATRIX = 2
"""Axes of the weight of one linear map; those of experts have one more."""


class _Site(NamedTuple):
    """One of them."""

    inputs: Sequence[Spread]
    """As their errors appear in it."""
    cancels: float
    """By how much a sum is smaller than its terms."""
    stretch: float
    """How much larger the condition may be of single rows."""
    products: float
    """How much larger that of all is."""
    is_of_few: bool
    """Whether it is a sum of which single rows may have but one term: of what one token gave an expert."""


def wide_floors(cases: Cases, rows: Array, condition: Array, mixes: Array) -> tuple[Floors, Array]:
    """(floors of some cases given their inputs, whether the model of the path bounds them).

    ``condition`` is theirs; ``mixes``: rows may be mixed on the way.
    """
    nodes = [cases.nodes[row] for row in rows.tolist()]
    sites = [_site(cases, node) for node in nodes]
    is_back = np.array([cases.graph.is_backward[node] for node in nodes], bool)
    is_sum = np.array([cases.graph.nodes[node].is_summed for node in nodes], bool)
    cancels = np.array([site.cancels for site in sites])
    condition = condition * np.array([site.products for site in sites])
    spreads, given = cases.terms.spreads.at(rows), Largest.of([site.inputs for site in sites])
    turned = np.where(cases.is_behind_flips[rows], smaller(_MOVED, condition * given.errors[-1]), 0.0)
    limit = larger(cases.limit[rows], _MOVED * cancels * given.errors[-1], turned)
    # A large row's error is many times a small row that it is added to, and small rows are differences.
    is_made = np.array([cases.graph.inputs(node).how != "same" for node in nodes], bool)
    is_open = (is_back & is_made) | (cases.lifts.of(nodes) > 1.0).any(0)
    tail_limit = np.where(is_open, np.inf, 0.0)
    terms = Terms(spreads, cases.terms.base[rows], cases.terms.eps[rows], limit, tail_limit, cases.offset[rows])
    stretch = np.array([site.stretch for site in sites])
    found = local_floors(given, terms, cancels * condition, mixes=mixes, sums_rows=is_sum, stretch=stretch)
    found = found.of_few().where(np.array([site.is_of_few for site in sites], bool), found)
    return found.scaled(np.where(is_back & mixes, shared_gain(spreads), 0.0)), cancels == 1.0


def _site(cases: Cases, node: int) -> _Site:
    this, graph, given = cases.graph.nodes[node], cases.graph, cases.inputs(node)
    inputs = given
    if graph.inputs(node).how != "same" and not _keeps_rows(cases, node):
        inputs = tuple(spilled(s) if this.is_backward else s.worst_everywhere() for s in given)
    shape = cases.params[node].get(this.port[len("param[") :].partition("]")[0], ())
    cancels = cases.backward.cancellation(node) if this.is_summed and len(shape) == 1 else 1.0
    products = PRODUCTS if graph.is_of_many(node) else 1.0
    is_of_few = this.is_summed and len(shape) > _MATRIX
    return _Site(inputs, cancels, cases.backward.stretch(node, given), products, is_of_few)


def _keeps_rows(cases: Cases, node: int) -> bool:
    """Whether each row is made of the same row of what went in."""
    this = cases.graph.nodes[node]
    if this.convolves:
        return False
    return not this.is_input and not this.is_summed and (bool(cases.params[node]) or this.is_pointwise)
