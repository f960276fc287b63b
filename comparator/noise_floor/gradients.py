"""Gradients: why their rounding is larger than that of values.

Values are normalised again and again; gradients are not. Those of tokens that the model is sure of are next to nothing
beside those of others, what they are summed to may cancel, and float16 has no room for them.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from msgspec import structs

from tapscope.comparator.facts import Numbers
from tapscope.comparator.metrics.error_distribution import NOTHING, Spread
from tapscope.comparator.metrics.spreads import Spreads
from tapscope.comparator.noise_floor.floor import unit
from tapscope.comparator.noise_floor.graph import Graph
from tapscope.comparator.noise_floor.propagated_errors import HandedOn
from tapscope.core import dtypes
from tapscope.kernels.native.aggregate import SMALL_ROW

Array = np.ndarray[Any, Any]

_MASKED = 0.05
"""Share of a gradient that a ReLU whose class nobody knows has made zero at least."""


def losses(graph: Graph) -> dict[int, int]:
    """Gradients that come from no other gradient -> the value they are the gradient of."""
    found = {}
    for i, node in enumerate(graph.nodes):
        if not graph.is_backward[i] or any(graph.is_backward[j] for j in graph.inputs(i).nodes):
            continue
        own = graph.value_of(i)
        if own is not None and not node.port.startswith("param["):
            found[i] = own
    return found


def of_loss(logits: Numbers | None) -> Spread:
    """What the errors of the logits make of the gradient that a loss gives them.

    A cross-entropy's is p - y. Of p = softmax(z), dp_j = p_j (dz_j - sum p dz), so that no element is off by more
    than 2 max|dz| of itself, that of the label included: an absolute error of the logits is a relative one here.
    """
    error = 2.0 * logits.max_abs if logits is not None else 0.0
    return structs.replace(NOTHING, errors=(error,) * len(NOTHING.errors), element=error, peak=error)


def of_head(loss: Spread) -> Spread:
    """The same of the weight that the logits are made with. A row of its gradient is a sum of what a loss gives one
    label, so that all of the row is off by as much at most, in one direction; and what the errors of a token do to the
    sum over its labels scales all rows alike, a common gain."""
    return structs.replace(loss, gain=0.5 * loss.errors[-1])  # of a gain a floor takes twice what went in


def of_values(graph: Graph, spreads: HandedOn, node: int) -> list[Spread]:
    """What the errors of values make of a gradient beside those of other gradients: a derivative is taken at values,
    also where the function that it is of was not captured."""
    inputs = graph.inputs(node)
    if not _is_derivative(graph, node) or inputs.how != "around":
        return []
    places = [graph.value_of(i) for i in (*inputs.nodes, node)]
    return [spread for i in places if i is not None and (spread := spreads[i]) is not None]


def of_kinks(graph: Graph, spreads: HandedOn, node: int, zeros: Callable[[int], float]) -> list[Spread]:
    """The same where a derivative may have a jump: in a ReLU, or a function nobody saw that leaves as many elements
    without a gradient. ``zeros`` tells what share of a gradient they are."""
    if not _is_derivative(graph, node):
        return []
    found, inputs = of_values(graph, spreads, node), graph.inputs(node).nodes
    if not found or zeros(node) <= _MASKED + max((zeros(i) for i in inputs if graph.is_backward[i]), default=1.0):
        found = []
    if graph.has_kink(node):
        given = [spreads[i] for i in inputs if graph.nodes[i].is_input and not graph.nodes[i].is_backward]
        found += [spread for spread in given if spread is not None]
    return list(map(_of_kink, found))


def _is_derivative(graph: Graph, node: int) -> bool:
    return graph.nodes[node].is_backward and not graph.nodes[node].is_summed


def _of_kink(spread: Spread) -> Spread:
    """A derivative with a jump at 0, of values with these errors. Of normal values 0.8 e lie within e of their size
    around 0, and there a gradient is all or nothing."""
    errors = tuple(math.sqrt(0.8 * min(error, 1.0)) for error in spread.errors)
    return structs.replace(NOTHING, errors=errors, element=1.0, peak=1.0)


def spilled(spread: Spread) -> Spread:
    """As the errors of one row appear in another one that they are added to, going backward.

    A row carries the worst row's error, and a small one the typical row's: it is measured beside :data:`SMALL_ROW` of
    that one's size at least.
    """
    worst = spread.worst_everywhere()
    return structs.replace(
        worst, errors=(worst.errors[0], *(max(e, spread.errors[0] / SMALL_ROW) for e in worst.errors[1:]))
    )


def stretch(spread: Spread, inputs: Sequence[Spread]) -> float:
    """How much worse than the typical row's the condition of one row may be.

    A linear map enlarges an error by up to its largest singular value, which is at least the largest enlargement of a
    row that was seen; and a gradient's errors are not spread evenly over directions, but all in some labels.
    """
    given = max((s.sizes.reach for s in inputs if s.sizes), default=1.0)
    return max(1.0, spread.sizes.reach / given) if spread.sizes else 1.0


def effects(graph: Graph, sizes: Sequence[float]) -> list[float]:
    """Of each gradient with its value beside it, norm of the one times norm of the other: what a relative error of the
    value would change of the loss; 0 where either is not known. ``sizes`` are the norms."""
    if not any(graph.is_backward):
        return [0.0] * len(sizes)
    values = {(node.path, node.port): size for node, size in zip(graph.nodes, sizes, strict=True)}
    return [
        size * values.get((node.path, node.port.removesuffix(".grad")), 0.0) if node.is_backward else 0.0
        for node, size in zip(graph.nodes, sizes, strict=True)
    ]


def difference(effect: float, inputs: Sequence[float]) -> float:
    """By how much the effect of a value is smaller than that of what was made of it. A function that is linear in it
    leaves both the same; where a softmax or a norm hardly heeds it, its gradient is a difference of larger terms, and
    carries their errors."""
    return max(1.0, max(inputs, default=0.0) / effect) if effect > 0.0 else 1.0


def shared_gain(spreads: Spreads) -> Array:
    """Common gain of the rows of gradients that were mixed on the way: each carries the errors of tokens behind it,
    so that only as many as the root of them are independent."""
    found: Array = 3.0 * spreads.gain_sd / np.sqrt(np.sqrt(np.maximum(spreads.num_rows, 1)))
    return found


def cancellation(size: float, inputs: Sequence[float]) -> float:
    """By how much a sum over tokens is smaller than independent ones would have left it: the condition of summation
    (Higham, section 4.1); of a bias, or of a norm's weight, beside which what is summed has size 1. A bias of keys has
    no effect on a softmax, and its gradient is all rounding. Of all are given their norms."""
    return max(1.0, max(inputs, default=0.0) / size) if size > 0.0 else 1.0


def flushes(names: Sequence[str], spread: Spread | None) -> list[Spread]:
    """What rounding to multiples of the smallest number does to the largest element of the smallest row: all of it may
    be gone; of nothing but float16."""
    sizes, smallest = spread.sizes if spread is not None else None, max(map(dtypes.smallest, names))
    if sizes is None or sizes.least <= 0.0 or smallest < 1e-30:
        return []
    return [structs.replace(NOTHING, peak=min(smallest / sizes.least, 1.0))]


def drowned(spread: Spread) -> float:
    """What the rounding of the largest row in float32 is to the typical one: the gradients of logits add up to zero,
    and those of experts that no token chose are what is left of the others'."""
    return unit(*("float32",) * 2, 1) * spread.sizes.reach if spread.sizes is not None else 0.0


def underflow(names: Sequence[str], spread: Spread) -> float:
    """What rounding to multiples of the smallest number adds to a row, relative to it: nothing but in float16."""
    if spread.sizes is None or spread.sizes.rms <= 0.0:
        return 0.0
    return unit(*("float32",) * 2, 1) / dtypes.epsilon("float32") * max(map(dtypes.smallest, names)) / spread.sizes.rms
