"""Graph: the dataflow graph of a comparison, from the module tree, the firing order, and values with equal bytes.

Modules call functions that no hook observes, so not all edges are known. The inputs of a site are, in order of
precedence:

1. the earlier site with the same bytes; 2. for the output of a module, the captured values inside the module, its
inputs and its parameters; 3. none, for the output of a module without parameters that was called without tensors: the
host passed its values; 4. for any other site, the values that the enclosing module received and that its other
submodules computed before.

Gradients follow the same rules in the backward, in addition to the values of the forward.
"""

import re
from bisect import bisect_left
from collections.abc import Collection, Sequence

from tapscope.comparator.noise_floor.constants import INPUT_WINDOW, OPS_PER_LAYER, OPS_POINTWISE
from tapscope.comparator.noise_floor.node import NO_INPUTS, Inputs, Node
from tapscope.comparator.runs.modules import ancestors, common_module, is_within, outer, parent
from tapscope.comparator.runs.names import PARTIAL
from tapscope.core.site import layer_of

_KINKED = re.compile(r"(?i)(leaky|p|r)?relu6?|hard(tanh|sigmoid)|(hard|soft)shrink|threshold")


class Graph:
    """The inputs of every node of a comparison."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes
        self.is_backward = [node.is_backward for node in nodes]
        """[nodes]: whether the node is a gradient."""
        self.gradients = [i for i, is_gradient in enumerate(self.is_backward) if is_gradient]
        """Nodes that are gradients."""
        self._is_called_again = any("#" in node.port for node in nodes)
        self._is_state, self._is_input = [node.is_state for node in nodes], [node.is_input for node in nodes]
        self._given: dict[str, list[int]] = {}
        self._made: dict[tuple[str, bool], list[int]] = {}
        self._inside: dict[str, list[int]] = {}
        self._called = outer([node.path for node in nodes])
        self._around_path: dict[str, str] = {}
        self._gradients = {(n.path, n.port.removesuffix(".grad")): i for i, n in enumerate(nodes) if n.is_summed}
        """(module, port) of a parameter -> node of its gradient."""
        any_back = any(self.is_backward)  # needed for gradients only
        self._values = {(node.path, node.port): i for i, node in enumerate(nodes) if any_back and node.numeric}
        self._classes = {node.path: node.cls for node in nodes if any_back}
        for i, node in enumerate(nodes):
            if self._is_input[i] or self._is_state[i]:
                self._given.setdefault(node.path, []).append(i)
            elif node.numeric:
                self._made.setdefault((self._enclosing(node.path), self.is_backward[i]), []).append(i)
            for above in ancestors(parent(node.path)) if node.path else ():
                if above in self._called:
                    self._inside.setdefault(above, []).append(i)
        self.depth = _depths(nodes, self.is_backward)
        """[nodes]: number of layers before the node."""
        self._consumers: dict[int, list[str]] = {}
        self.all_inputs = self._resolve()
        """[nodes]: inputs of the node."""

    def inputs(self, index: int) -> Inputs:
        """Return the inputs of a node."""
        return self.all_inputs[index]

    def _resolve(self) -> list[Inputs]:
        holders: tuple[dict[object, int], dict[object, int]] = ({}, {})
        groups = self._gradient_groups()
        inputs = []
        for i, node in enumerate(self.nodes):
            from_one = self._first_holder(i, node, holders) or (self._through(i, groups[i]) if i in groups else None)
            inputs.append(from_one or self._inputs(i))
            for side, identity in enumerate(node.identities):
                if identity is not None:
                    holders[side].setdefault(identity, i)
        return inputs

    def _gradient_groups(self) -> dict[int, list[int]]:
        """Return first node of each gradient -> all sites that have this gradient.

        A tensor has one gradient: the module that computed the tensor records it for its output, each consumer for its
        input. The same applies to a parameter that modules share.
        """
        groups: dict[object, list[int]] = {}
        for i, node in enumerate(self.nodes):
            if self.is_backward[i] and node.numeric and None not in node.identities:
                groups.setdefault((node.is_summed, node.identities), []).append(i)
        first = {members[0]: members for members in groups.values()}
        return {i: members for i, members in first.items() if len(members) > 1 or not self.nodes[i].is_summed}

    def _through(self, index: int, group: Sequence[int]) -> Inputs | None:
        """Return the inputs of a gradient through all modules that consumed the tensor; None if none were captured."""
        captured = [self._inputs(i) for i in group if not self.nodes[i].is_input]
        captured = [each for each in captured if each.source in ("captured", "submodules")]
        nodes = tuple(sorted({n for each in captured for n in each.nodes if n < index}))
        if not nodes:
            return None
        if not self.nodes[index].is_summed:
            self._consumers[index] = [self.nodes[i].path for i in group if not self.nodes[i].is_input]
        inside = any(each.source == "submodules" for each in captured)
        return Inputs(nodes, "submodules" if inside else "captured", max(each.ops for each in captured))

    def blamed(self, index: int, owners: Collection[str] = ()) -> tuple[str, ...]:
        """Return the modules that may have computed a value, the likeliest first.

        A value computed between submodules belongs to the enclosing module. ``owners`` are modules with a parameter
        whose gradient is wrong by itself: if exactly one of them consumed a tensor, it computed the tensor's gradient.
        """
        node = self.nodes[index]
        if consumers := self._consumers.get(index):
            inner = [c for c in consumers if not any(other != c and is_within(other, c) for other in consumers)]
            if len(own := {c for c in inner if c in owners}) == 1:
                return tuple(own)
            common = common_module(inner)
            outer = min(consumers, key=len)
            return (common, outer) if len(set(inner)) == 1 and outer != common else (common,)
        if not node.is_input:
            return (node.path.removesuffix(PARTIAL),)
        return (self._enclosing(node.path),)

    def enclosing(self, index: int) -> str:
        """Return the path of the nearest called module around that of the node."""
        return self._enclosing(self.nodes[index].path)

    def is_of_many(self, index: int) -> bool:
        """Return whether the node is a value of a function that was not captured, in a module with parameters of its
        own."""
        if self.all_inputs[index].source != "enclosing_module" or self.is_backward[index]:
            return False
        return any(self.nodes[i].has_params for i in self._given.get(self.enclosing(index), ()))

    def value_of(self, index: int) -> int | None:
        """Return the node of the value that a gradient belongs to; None for a value, or if the value was not
        compared."""
        node = self.nodes[index]
        return self._values.get((node.path, node.port.removesuffix(".grad"))) if node.is_backward else None

    def has_kink(self, index: int) -> bool:
        """Return whether the node is the input gradient of a pointwise function whose derivative jumps, such as
        ReLU."""
        return any(map(_KINKED.fullmatch, self.consumer_classes(index)))

    def consumer_classes(self, index: int) -> list[str]:
        """Return the classes of the modules whose backward computed a gradient: the consumers of the tensor."""
        paths = self._consumers.get(index, [self.nodes[index].path])
        return [self._classes.get(path, "") for path in paths]

    def _enclosing(self, path: str) -> str:
        """Return the path of the nearest called module around another one; a list of modules is never called."""
        holder = parent(path)
        known = self._around_path.get(holder)
        if known is None:
            above = ancestors(holder) if path else ("",)
            known = self._around_path[holder] = next((one for one in above if one in self._called), "")
        return known

    def _first_holder(
        self, index: int, node: Node, holders: tuple[dict[object, int], dict[object, int]]
    ) -> Inputs | None:
        """Return the site that had these bytes first, on both sides or on one, as the only input."""
        if self._is_state[index]:
            return None
        one, two = holders[0].get(node.identities[0]), holders[1].get(node.identities[1])
        if one is not None and one == two:
            return Inputs((one,), "aliased", 0)
        if not node.numeric:  # integers may be equal on one side by chance
            return None
        # The two sites are equal in only one run: in the other run, the later site has a value of its own.
        origin = max((each for each in (one, two) if each is not None), default=None)
        if origin is None or not self._is_input[index] or self.is_backward[index]:
            return None  # an output that equals the input in one run only may be the module's bug
        return Inputs((origin,), "aliased", 1)

    def _inputs(self, index: int) -> Inputs:
        node = self.nodes[index]
        if self._is_state[index]:
            return self._updates(index)
        if not self._is_input[index]:
            path = node.path.removesuffix(PARTIAL)
            own, is_backward = self._given.get(path, []), self.is_backward[index]
            own = [i for i in own if self._is_before(i, index) and self._reaches(i, index)]
            if self._is_called_again:
                own = self._of_call(own, node.call)
            if is_backward and not any(self.is_backward[i] for i in own):
                own = []  # the incoming gradient was recorded later (the module returns its input), or not at all
            elif is_backward:  # also the gradient of a tensor that bypasses the module, along the residual
                own += [i for i in self._given.get(parent(path), ()) if i < index and self._goes(i, index)]
            inside = [] if path != node.path else [i for i in self._inside.get(path, ()) if i < index]
            inside = [i for i in inside if self._reaches(i, index)]
            if any(self.nodes[i].numeric for i in inside):
                return Inputs(tuple(sorted({*own, *inside})), "submodules", 2)
            # Integers suffice as the inputs of an embedding. A decoder layer must also have numeric inputs.
            if own and (node.has_params or any(self.nodes[i].numeric and not self._is_state[i] for i in own)):
                return Inputs(tuple(own), "captured", self._ops(node))
            if node.has_no_inputs and not node.has_params:
                return Inputs((), NO_INPUTS, self._ops(node))
        around = self._around(index)
        if around:
            return Inputs(around, "enclosing_module", 4 + OPS_PER_LAYER * self._gap(around, index))
        before = tuple(i for i in range(max(0, index - 4 * INPUT_WINDOW), index) if self.nodes[i].numeric)[
            -INPUT_WINDOW:
        ]
        if not before:
            return Inputs((), "", OPS_PER_LAYER * (1 + self._layers_before(index)))
        return Inputs(before, "preceding", 4 + OPS_PER_LAYER * self._gap(before, index))

    def _of_call(self, own: list[int], call: str) -> list[int]:
        """Return the inputs of one call among all inputs of a module, and its parameters."""
        mine = [i for i in own if self._is_state[i] or self.nodes[i].call == call]
        return mine if any(not self._is_state[i] for i in mine) else own

    def _updates(self, index: int) -> Inputs:
        """Return the gradient by which a parameter was updated."""
        node = self.nodes[index]
        places = self._gradients if node.is_trained else {}
        node_of_update = places.get((node.path, node.port))
        return Inputs((), "") if node_of_update is None else Inputs((node_of_update,), "captured")

    def _is_before(self, origin: int, index: int) -> bool:
        """Return whether a site precedes another; an updated parameter is used in the next step."""
        return origin < index or self.nodes[origin].is_trained

    def _reaches(self, origin: int, index: int) -> bool:
        """Return whether a value may be an input of a site: the backward does not affect the forward."""
        return not self.is_backward[origin] or self.is_backward[index]

    def _around(self, index: int) -> tuple[int, ...]:
        """Return the values that the enclosing module received, and the latest values of its other submodules.

        If the inputs of the nearest enclosing module were not captured, a second level is included.
        """
        node = self.nodes[index]
        indices: list[int] = []
        above, levels = node.path, 0
        while above and levels < 2:
            above = self._enclosing(above)
            given = self._given.get(above, [])
            given = [i for i in given if i < index and self._goes(i, index)] if given else given
            siblings = self._made.get((above, self.is_backward[index]), [])
            end = bisect_left(siblings, index)
            made = siblings[max(end - INPUT_WINDOW, 0) : end]
            indices += [*given, *made]
            levels += bool(made)
            if any(self.nodes[i].numeric for i in given):
                break
        return tuple(sorted(set(indices))) if any(self.nodes[i].numeric for i in indices) else ()

    def _goes(self, origin: int, index: int) -> bool:
        return self.is_backward[origin] == self.is_backward[index]

    def _gap(self, origins: tuple[int, ...], index: int) -> int:
        return max(self.depth[index] - self.depth[origins[-1]], 0)

    def _ops(self, node: Node) -> int:
        """Return the number of sequential roundings inside a module of which only inputs and outputs were captured."""
        if node.has_params:
            return 1
        if node.is_pointwise:
            return OPS_POINTWISE
        if layer_of(node.path) is None and not parent(node.path):
            return OPS_PER_LAYER * (1 + max(self.depth, default=0))
        return OPS_PER_LAYER

    def _layers_before(self, index: int) -> int:
        layer = layer_of(self.nodes[index].path)
        return layer if layer is not None else max(self.depth, default=0)


def _depths(nodes: Sequence[Node], is_backward: Sequence[bool]) -> list[int]:
    """Return the number of layers before each node, counted up through the forward and on through the backward."""
    layers = [layer_of(node.path) for node in nodes]
    depths, deepest, num_layers = [], 0, 1 + max((layer for layer in layers if layer is not None), default=-1)
    for layer, is_back in zip(layers, is_backward, strict=True):
        here = 0 if layer is None else 2 * num_layers - layer if is_back else layer + 1
        deepest = max(deepest, num_layers if is_back else 0, here)
        depths.append(deepest)
    return depths
