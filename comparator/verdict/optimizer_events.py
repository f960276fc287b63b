"""Optimizer events: parameters or gradients that one cause changed in one step: an optimizer step, a clip, a
checkpoint. No single module did that, so they are one divergence."""

from collections.abc import Collection, Mapping, Sequence

from tapscope.comparator.noise_floor.graph import Graph

FEWEST = 3
"""Fewest members of an event: two may have separate causes."""


def events(nodes: Sequence[int], bad: Mapping[int, int], graph: Graph) -> dict[int, list[int]]:
    """The first node of each event -> the other members, in order; most nodes are alone.

    ``bad``: node -> the step in which it became wrong. Parameters updated in one step belong together; other
    parameters, and gradients, if most of those compared are off from that step on.
    """
    found: dict[int, list[int]] = {}
    groups: dict[tuple[bool, int], list[int]] = {}
    for n in sorted(nodes, key=lambda n: (bad[n], n)):
        node = graph.nodes[n]
        if node.is_summed or (node.is_state and node.port.startswith("param[")):
            groups.setdefault((node.is_summed, bad[n]), []).append(n)
        else:
            found[n] = []
    for (is_summed, step), members in groups.items():
        if len(members) >= FEWEST and (_are_trained(members, graph) or _are_most(is_summed, step, bad, graph)):
            found[members[0]] = members[1:]
        else:
            found |= {n: [] for n in members}
    return found


def _are_trained(members: Collection[int], graph: Graph) -> bool:
    return all(graph.nodes[n].is_trained for n in members)


def _are_most(is_summed: bool, step: int, bad: Mapping[int, int], graph: Graph) -> bool:
    """Whether more than half of the compared nodes of this kind are off from that step on."""
    alike = [n for n, node in enumerate(graph.nodes) if node.port.startswith("param[") and node.is_summed == is_summed]
    return 2 * sum(bad.get(n) == step for n in alike) > len(alike)
