"""Graph: what went into a site, from the module tree, the order in which sites fired, and values that are equal.

Modules call functions that no hook sees, so edges are not all known. In this order: a value whose bytes an earlier site
already held came from there; a module's output came from what was captured inside it and from its inputs and
parameters; anything else came from what the enclosing module was given and what its other parts made before. Going
backward the same holds of gradients, beside the values of the forward.
"""

import re
from bisect import bisect_left
from collections.abc import Collection, Sequence

from tapscope.comparator.noise_floor.constants import INPUT_WINDOW, OPS_PER_LAYER, OPS_POINTWISE
from tapscope.comparator.noise_floor.node import Inputs, Node
from tapscope.comparator.runs.modules import ancestors, common_module, is_within, outer, parent
from tapscope.comparator.runs.names import PARTIAL
from tapscope.core.site import layer_of

_KINKED = re.compile(r"(?i)(leaky|p|r)?relu6?|hard(tanh|sigmoid)|(hard|soft)shrink|threshold")


class Graph:
    """Inputs of every node of a comparison."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.nodes = nodes
        self.is_backward = [node.is_backward for node in nodes]
        """[nodes]"""
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
        """Of parameters, by their module and port."""
        any_back = any(self.is_backward)  # what follows is asked for of gradients alone
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
        """Layers that lie before each node."""
        self._consumers: dict[int, list[str]] = {}
        self.all_inputs = self._resolve()
        """What went into each node."""

    def inputs(self, index: int) -> Inputs:
        """What went into the node."""
        return self.all_inputs[index]

    def _resolve(self) -> list[Inputs]:
        holders: tuple[dict[object, int], dict[object, int]] = ({}, {})
        groups = self._gradient_groups()
        found = []
        for i, node in enumerate(self.nodes):
            from_one = self._same(i, node, holders) or (self._through(i, groups[i]) if i in groups else None)
            found.append(from_one or self._inputs(i))
            for side, identity in enumerate(node.identities):
                if identity is not None:
                    holders[side].setdefault(identity, i)
        return found

    def _gradient_groups(self) -> dict[int, list[int]]:
        """First node of each gradient -> every site that shows it: a tensor has one gradient, which its maker sees as
        that of its output and each consumer as that of its input; a parameter that modules share has one as well."""
        groups: dict[object, list[int]] = {}
        for i, node in enumerate(self.nodes):
            if self.is_backward[i] and node.numeric and None not in node.identities:
                groups.setdefault((node.is_summed, node.identities), []).append(i)
        first = {members[0]: members for members in groups.values()}
        return {i: members for i, members in first.items() if len(members) > 1 or not self.nodes[i].is_summed}

    def _through(self, index: int, group: Sequence[int]) -> Inputs | None:
        """What went into a gradient: whatever went into it through each module that consumed the tensor."""
        found = [self._inputs(i) for i in group if not self.nodes[i].is_input]
        found = [each for each in found if each.how in ("captured", "inside")]
        nodes = tuple(sorted({n for each in found for n in each.nodes if n < index}))
        if not nodes:
            return None
        if not self.nodes[index].is_summed:
            self._consumers[index] = [self.nodes[i].path for i in group if not self.nodes[i].is_input]
        inside = any(each.how == "inside" for each in found)
        return Inputs(nodes, "inside" if inside else "captured", max(each.ops for each in found))

    def blamed(self, index: int, owners: Collection[str] = ()) -> tuple[str, ...]:
        """The module whose doing a value is, the likeliest first; the enclosing one where it came from between its
        parts. ``owners`` have a parameter whose gradient is wrong by itself: a tensor's gradient is then that one's
        doing among its consumers."""
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
        """The nearest called module around that of the node."""
        return self._enclosing(self.nodes[index].path)

    def is_of_many(self, index: int) -> bool:
        """Whether it is a value that came out of a function nobody saw in a module with parameters of its own."""
        if self.all_inputs[index].how != "around" or self.is_backward[index]:
            return False
        return any(self.nodes[i].has_params for i in self._given.get(self.enclosing(index), ()))

    def value_of(self, index: int) -> int | None:
        """The value that a gradient is beside; None for a value, or where it was not compared."""
        node = self.nodes[index]
        return self._values.get((node.path, node.port.removesuffix(".grad"))) if node.is_backward else None

    def has_kink(self, index: int) -> bool:
        """Whether it is the gradient of what a pointwise function was given whose derivative jumps."""
        paths = self._consumers.get(index, [self.nodes[index].path])
        return any(_KINKED.fullmatch(self._classes.get(path, "")) for path in paths)

    def _enclosing(self, path: str) -> str:
        """The nearest module around another that is called; a list of modules never is, and can do nothing."""
        holder = parent(path)
        known = self._around_path.get(holder)
        if known is None:
            above = ancestors(holder) if path else ("",)
            known = self._around_path[holder] = next((one for one in above if one in self._called), "")
        return known

    def _same(self, index: int, node: Node, holders: tuple[dict[object, int], dict[object, int]]) -> Inputs | None:
        """The site that held these bytes first, on both sides or on one."""
        if self._is_state[index]:
            return None
        one, two = holders[0].get(node.identities[0]), holders[1].get(node.identities[1])
        if one is not None and one == two:
            return Inputs((one,), "same", 0)
        if not node.numeric:  # of integers that are equal on one side alone nobody knows whether they are the same
            return None
        # Held by two sites in one run and by the later of these in the other: that one made it another value there.
        origin = max((each for each in (one, two) if each is not None), default=None)
        if origin is None or not self._is_input[index] or self.is_backward[index]:
            return None  # a module may hand on its input on one side because the fault is that it does
        return Inputs((origin,), "same", 1)

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
                own = []  # the gradient that went in was seen later, by a module that hands on its input, or never
            elif is_backward:  # the gradient of a tensor that went round the module as well, along the residual
                own += [i for i in self._given.get(parent(path), ()) if i < index and self._goes(i, index)]
            inside = [] if path != node.path else [i for i in self._inside.get(path, ()) if i < index]
            inside = [i for i in inside if self._reaches(i, index)]
            if any(self.nodes[i].numeric for i in inside):
                return Inputs(tuple(sorted({*own, *inside})), "inside", 2)
            # Integers alone are the inputs of an embedding; of a decoder layer they are only its positions.
            if own and (node.has_params or any(self.nodes[i].numeric and not self._is_state[i] for i in own)):
                return Inputs(tuple(own), "captured", self._ops(node))
        around = self._around(index)
        if around:
            return Inputs(around, "around", 4 + OPS_PER_LAYER * self._gap(around, index))
        before = tuple(i for i in range(max(0, index - 4 * INPUT_WINDOW), index) if self.nodes[i].numeric)[
            -INPUT_WINDOW:
        ]
        if not before:
            return Inputs((), "", OPS_PER_LAYER * (1 + self._layers_before(index)))
        return Inputs(before, "before", 4 + OPS_PER_LAYER * self._gap(before, index))

    def _of_call(self, own: list[int], call: str) -> list[int]:
        """Of what a module was given, that of one call of it, and its parameters."""
        mine = [i for i in own if self._is_state[i] or self.nodes[i].call == call]
        return mine if any(not self._is_state[i] for i in mine) else own

    def _updates(self, index: int) -> Inputs:
        """The gradient that a parameter was moved by."""
        node = self.nodes[index]
        places = self._gradients if node.is_trained else {}
        found = places.get((node.path, node.port))
        return Inputs((), "") if found is None else Inputs((found,), "captured")

    def _is_before(self, origin: int, index: int) -> bool:
        """Whether a site fires before another; what an optimizer makes of a parameter is there in the next step."""
        return origin < index or self.nodes[origin].is_trained

    def _reaches(self, origin: int, index: int) -> bool:
        """Whether a value of that module may have gone into this one: not from the backward into the forward."""
        return not self.is_backward[origin] or self.is_backward[index]

    def _around(self, index: int) -> tuple[int, ...]:
        """What the enclosing module was given, and the latest that its other parts made; from two levels at most where
        the nearer one says nothing of what it was given."""
        node = self.nodes[index]
        found: list[int] = []
        above, levels = node.path, 0
        while above and levels < 2:
            above = self._enclosing(above)
            given = self._given.get(above, [])
            given = [i for i in given if i < index and self._goes(i, index)] if given else given
            siblings = self._made.get((above, self.is_backward[index]), [])
            end = bisect_left(siblings, index)
            made = siblings[max(end - INPUT_WINDOW, 0) : end]
            found += [*given, *made]
            levels += bool(made)
            if any(self.nodes[i].numeric for i in given):
                break
        return tuple(sorted(set(found))) if any(self.nodes[i].numeric for i in found) else ()

    def _goes(self, origin: int, index: int) -> bool:
        return self.is_backward[origin] == self.is_backward[index]

    def _gap(self, origins: tuple[int, ...], index: int) -> int:
        return max(self.depth[index] - self.depth[origins[-1]], 0)

    def _ops(self, node: Node) -> int:
        """Roundings inside a module of which only the ends were captured."""
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
    """Layers before each node: counted up through the forward, and on through the backward, which goes down."""
    layers = [layer_of(node.path) for node in nodes]
    depths, deepest, num_layers = [], 0, 1 + max((layer for layer in layers if layer is not None), default=-1)
    for layer, is_back in zip(layers, is_backward, strict=True):
        here = 0 if layer is None else 2 * num_layers - layer if is_back else layer + 1
        deepest = max(deepest, num_layers if is_back else 0, here)
        depths.append(deepest)
    return depths
