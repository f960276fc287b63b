"""Graph: what went into a site, from the module tree and the order in which sites fired.

Modules call functions that no hook sees, so edges are not known exactly. For the output of a module they are its
captured inputs; for a module with captured insides, these too; where nothing was captured, whatever fired just before.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tapscope.comparator.floor import OPS_PER_LAYER
from tapscope.comparator.names import PARTIAL
from tapscope.site import layer_of

WINDOW = 8
"""How many sites that fired before stand in for inputs that were not captured."""


@dataclass(frozen=True, slots=True)
class Node:
    """One matched site in execution order."""

    path: str
    port: str
    numeric: bool
    """Whether it was compared as rounded numbers."""
    has_params: bool = False
    """Whether the module has parameters of its own: then it is one operation."""

    @property
    def is_input(self) -> bool:
        """Whether this is what a module was given: its inputs, or going backward the gradients of its outputs."""
        return self.port.startswith("out" if self.port.endswith(".grad") else "in[")


@dataclass(frozen=True, slots=True)
class Inputs:
    """What went into a site."""

    nodes: tuple[int, ...]
    """Indices of the sites."""
    how: str
    """``captured``, ``inside`` or ``before``; empty when nothing fired before."""
    ops: int = 1
    """Roundings in sequence between those and the site."""


class Graph:
    """Inputs of every node of a comparison."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes
        self._ins: dict[str, list[int]] = {}
        self._inside: dict[str, list[int]] = {}
        for i, node in enumerate(nodes):
            if node.is_input:
                self._ins.setdefault(node.path, []).append(i)
            parent = node.path
            while parent:
                parent = parent.rpartition(".")[0]
                self._inside.setdefault(parent, []).append(i)
        self.depth = _depths(nodes)
        """Layers that lie before each node."""

    def inputs(self, index: int) -> Inputs:
        """What went into the node."""
        node = self.nodes[index]
        if not node.is_input:
            path = node.path.removesuffix(PARTIAL)
            own = [i for i in self._ins.get(path, ()) if i < index]
            inside = [] if path != node.path else [i for i in self._inside.get(path, ()) if i < index]
            if any(self.nodes[i].numeric for i in inside):
                return Inputs((*own, *inside), "inside", 2)
            # Integers alone are the inputs of an embedding; of a decoder layer they are only its positions.
            if own and (node.has_params or any(self.nodes[i].numeric for i in own)):
                return Inputs(tuple(own), "captured", self._ops(node))
        before = [i for i in range(max(0, index - 4 * WINDOW), index) if self.nodes[i].numeric][-WINDOW:]
        if not before:
            return Inputs((), "", OPS_PER_LAYER * (1 + self._layers_before(index)))
        gap = max(self.depth[index] - self.depth[before[-1]], 0)
        return Inputs(tuple(before), "before", 4 + OPS_PER_LAYER * gap)

    def _ops(self, node: Node) -> int:
        """Roundings inside a module of which only the ends were captured."""
        if node.has_params:
            return 1
        if layer_of(node.path) is None and not node.path.rpartition(".")[0]:
            return OPS_PER_LAYER * (1 + max(self.depth, default=0))
        return OPS_PER_LAYER

    def _layers_before(self, index: int) -> int:
        layer = layer_of(self.nodes[index].path)
        return layer if layer is not None else max(self.depth, default=0)


def _depths(nodes: Sequence[Node]) -> list[int]:
    depths, deepest = [], 0
    for node in nodes:
        layer = layer_of(node.path)
        deepest = max(deepest, 0 if layer is None else layer + 1)
        depths.append(deepest)
    return depths
