"""Gradients: why their rounding is larger than that of values.

Values are normalised again and again; gradients are not. Those of tokens that the model is sure of are next to nothing
beside those of others, what they are summed to may cancel, and float16 has no room for them.
"""

from collections.abc import Sequence

from msgspec import structs

from tapscope import dtypes
from tapscope.comparator.finding import Numbers
from tapscope.comparator.floor import unit
from tapscope.comparator.graph import Graph
from tapscope.comparator.spread import NOTHING, Spread
from tapscope.kernels.native.overview import SMALL_ROW


def losses(graph: Graph) -> dict[int, int]:
    """Gradients that come from no other gradient -> the value they are the gradient of."""
    places = {(node.path, node.port): i for i, node in enumerate(graph.nodes) if node.numeric}
    found = {}
    for i, node in enumerate(graph.nodes):
        own = places.get((node.path, node.port.removesuffix(".grad")))
        first = node.is_backward and not any(graph.nodes[j].is_backward for j in graph.inputs(i).nodes)
        if first and own is not None and not node.port.startswith("param["):
            found[i] = own
    return found


def of_loss(logits: Numbers | None) -> Spread:
    """What the errors of the logits make of the gradient that a loss gives them.

    A cross-entropy's is p - y. Of p = softmax(z), dp_j = p_j (dz_j - sum p dz), so that no element is off by more
    than 2 max|dz| of itself, that of the label included: an absolute error of the logits is a relative one here.
    """
    error = 2.0 * logits.max_abs if logits is not None else 0.0
    return structs.replace(NOTHING, errors=(error,) * len(NOTHING.errors), element=error, peak=error)


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


def cancellation(spread: Spread, inputs: Sequence[Spread]) -> float:
    """By how much a sum over tokens is smaller than independent ones would have left it: the condition of summation
    (Higham, section 4.1); of a bias, or of a norm's weight, beside which what is summed has size 1. A bias of keys has
    no effect on a softmax, and its gradient is all rounding."""
    given = max((s.sizes.norm for s in inputs if s.sizes), default=0.0)
    return max(1.0, given / spread.sizes.norm) if spread.sizes and spread.sizes.norm > 0.0 else 1.0


def underflow(names: Sequence[str], spread: Spread) -> float:
    """What rounding to multiples of the smallest number adds to a row, relative to it: nothing but in float16."""
    if spread.sizes is None or spread.sizes.rms <= 0.0:
        return 0.0
    return unit(*("float32",) * 2, 1) / dtypes.epsilon("float32") * max(map(dtypes.smallest, names)) / spread.sizes.rms
