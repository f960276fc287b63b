"""Computed: the dtypes that values were computed in, which may be coarser than those they came out in."""

from collections.abc import Sequence

from tapscope.comparator.noise_floor.graph import Graph
from tapscope.comparator.pair_analysis.pair_result import Examined
from tapscope.core import dtypes

_FLOAT32 = dtypes.epsilon("float32")


def computed_in(examined: Sequence[Examined], graph: Graph, node: int) -> tuple[str, str]:
    """On both sides: a value's own dtype, or a 16-bit one that went in (a head may give out float32)."""
    own, inputs = examined[node].dtypes, graph.inputs(node)
    multiplies = inputs.how == "inside" and graph.nodes[node].has_params  # by weights of its own
    if inputs.how != "captured" and not multiplies:
        return own
    given = [examined[i].dtypes for i in inputs.nodes if graph.nodes[i].numeric]
    baseline, target = (
        max([name, *(other for other in others if dtypes.epsilon(other) > _FLOAT32)], key=dtypes.epsilon)
        for name, *others in zip(own, *given, strict=True)
    )
    return baseline, target
