"""Layout of data-flow lines next to the rows of a folded module tree."""

from bisect import bisect, insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from tapscope.dashboard.model.module_graph import ModuleGraph


@dataclass(frozen=True, slots=True)
class FlowLane:
    """Line from a row whose module produced an output to the rows whose modules received the output."""

    producer: int
    consumers: tuple[int, ...]
    lane: int
    """Column of the line; 0 is adjacent to the rows. Lines in one column do not overlap."""
    is_inferred: bool = False
    """Whether the flows are inferred, see :attr:`DataFlow.is_inferred`."""

    @property
    def first(self) -> int:
        """Topmost row of the line."""
        return min(self.producer, *self.consumers)

    @property
    def last(self) -> int:
        """Bottommost row of the line."""
        return max(self.producer, *self.consumers)


def visible_modules(graph: ModuleGraph, folded: Collection[int]) -> list[int]:
    """Return the indices of the modules outside all folded modules, in order."""
    indices: list[int] = []
    hidden: int | None = None  # depth of the folded module that hides the following deeper nodes
    for i, node in enumerate(graph.nodes):
        if hidden is not None and node.depth > hidden:
            continue
        hidden = node.depth if i in folded else None
        indices.append(i)
    return indices


def flow_lanes(graph: ModuleGraph, visible: Sequence[int]) -> list[FlowLane]:
    """Lay out one line per row whose output another row received, and a separate one for inferred flows.

    Shorter lines are closer to the rows. Flows of a hidden module are attributed to its visible ancestor. A module with
    visible submodules does not repeat the inputs of its submodules.
    """
    flows: dict[tuple[int, bool], dict[int, None]] = {}
    for (producer, consumer), is_inferred in sorted(_visible_flows(graph, visible).items()):
        flows.setdefault((producer, is_inferred), {})[consumer] = None
    lines = [FlowLane(row, tuple(consumers), 0, is_inferred) for (row, is_inferred), consumers in flows.items()]
    lines.sort(key=lambda line: line.last - line.first)
    taken: list[list[tuple[int, int]]] = []
    lanes = []
    for line in lines:
        lane = next((n for n, others in enumerate(taken) if _has_room(others, line)), len(taken))
        if lane == len(taken):
            taken.append([])
        insort(taken[lane], (line.first, line.last))
        lanes.append(replace(line, lane=lane))
    return lanes


def _visible_flows(graph: ModuleGraph, visible: Sequence[int]) -> dict[tuple[int, int], bool]:
    """Return (producer row, consumer row) -> whether the flow is inferred.

    A flow counts as inferred only if all flows between modules of the two rows are.
    """
    row_of: dict[int, int] = {node: row for row, node in enumerate(visible)}
    rows: list[int] = []
    for i, node in enumerate(graph.nodes):
        rows.append(row_of[i] if i in row_of else rows[node.parent or 0])
    flows: dict[tuple[int, int], bool] = {}
    for each in graph.flows:
        pair = rows[each.producer], rows[each.consumer]
        flows[pair] = flows.get(pair, True) and each.is_inferred
    around = {row: _ancestor_rows(graph, visible, row_of, row) for row in {row for flow in flows for row in flow}}
    repeated: dict[tuple[int, int], bool] = {}
    for (producer, consumer), is_inferred in flows.items():
        for above in around[consumer]:
            repeated[producer, above] = repeated.get((producer, above), True) and is_inferred
    return {
        (p, c): is_inferred
        for (p, c), is_inferred in flows.items()
        if p != c and p not in around[c] and c not in around[p]
        if (p, c) not in repeated or (repeated[p, c] and not is_inferred)
    }


def _ancestor_rows(graph: ModuleGraph, visible: Sequence[int], row_of: dict[int, int], row: int) -> set[int]:
    """Return the rows of all ancestors of a row's module."""
    rows, parent = set[int](), graph.nodes[visible[row]].parent
    while parent is not None:
        rows.add(row_of[parent])
        parent = graph.nodes[parent].parent
    return rows


def _has_room(others: list[tuple[int, int]], line: FlowLane) -> bool:
    """Return whether ``line`` overlaps none of the sorted ``others``; lines may share an end row."""
    at = bisect(others, (line.first, line.last))
    return (at == 0 or others[at - 1][1] <= line.first) and (at == len(others) or line.last <= others[at][0])
