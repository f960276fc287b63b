"""Flow lanes: where the data flow between the rows of a folded module tree is drawn, as lines next to the rows."""

from bisect import bisect, insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from tapscope.dashboard.model.module_graph import ModuleGraph


@dataclass(frozen=True, slots=True)
class FlowLane:
    """The output of a row's module, and the rows that received it."""

    producer: int
    consumers: tuple[int, ...]
    lane: int
    """Column of its line; 0 is next to the rows. Lines in one column never overlap."""
    is_inferred: bool = False
    """Whether its flows are inferred from the order, see :attr:`DataFlow.is_inferred`."""

    @property
    def first(self) -> int:
        """The uppermost row of the line."""
        return min(self.producer, *self.consumers)

    @property
    def last(self) -> int:
        """The lowest row of the line."""
        return max(self.producer, *self.consumers)


def visible_modules(graph: ModuleGraph, folded: Collection[int]) -> list[int]:
    """Indices of the modules that are in no folded module, in order."""
    indices: list[int] = []
    hidden: int | None = None  # depth of the folded module that hides what follows
    for i, node in enumerate(graph.nodes):
        if hidden is not None and node.depth > hidden:
            continue
        hidden = node.depth if i in folded else None
        indices.append(i)
    return indices


def flow_lanes(graph: ModuleGraph, visible: Sequence[int]) -> list[FlowLane]:
    """A lane for each row whose output another row received, and one for those that are inferred; short lines are next
    to the rows.

    What a hidden module sends or receives belongs to the visible one around it. A module with visible submodules does
    not repeat what one of these receives.
    """
    flows: dict[tuple[int, bool], dict[int, None]] = {}
    for (producer, consumer), is_inferred in sorted(_visible_flows(graph, visible).items()):
        flows.setdefault((producer, is_inferred), {})[consumer] = None
    lines = [FlowLane(producer, tuple(consumers), 0, how) for (producer, how), consumers in flows.items()]
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
    """(row, row) -> whether the flow is inferred: it is not if any flow between modules of the two rows is shown."""
    row_of: dict[int, int] = {node: row for row, node in enumerate(visible)}
    rows: list[int] = []
    for i, node in enumerate(graph.nodes):
        rows.append(row_of[i] if i in row_of else rows[node.parent or 0])
    flows: dict[tuple[int, int], bool] = {}
    for each in graph.flows:
        pair = rows[each.producer], rows[each.consumer]
        flows[pair] = flows.get(pair, True) and each.is_inferred
    around = {row: _around(graph, visible, row_of, row) for row in {row for flow in flows for row in flow}}
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


def _around(graph: ModuleGraph, visible: Sequence[int], row_of: dict[int, int], row: int) -> set[int]:
    """Rows of the modules around a row's module."""
    rows, parent = set[int](), graph.nodes[visible[row]].parent
    while parent is not None:
        rows.add(row_of[parent])
        parent = graph.nodes[parent].parent
    return rows


def _has_room(others: list[tuple[int, int]], line: FlowLane) -> bool:
    """Whether none of the others, which are sorted, overlaps the line; it may begin in the row in which one ends."""
    at = bisect(others, (line.first, line.last))
    return (at == 0 or others[at - 1][1] <= line.first) and (at == len(others) or line.last <= others[at][0])
