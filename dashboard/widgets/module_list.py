"""Module tree of a run or comparison, with class, shape and error."""

from collections.abc import Sequence

from rich.style import Style
from rich.text import Text

from tapscope.core.formatting import middle
from tapscope.dashboard.model.flow_lanes import FlowLane, flow_lanes, visible_modules
from tapscope.dashboard.model.module_graph import ModuleGraph, ModuleNode
from tapscope.dashboard.theme import heat_style
from tapscope.dashboard.widgets.row_list import RowList

MODULES = "modules"
_COLUMNS = {"shape": 16, "dtype": 13, "÷ floor": 8}
_CLASS = 24
_MIN_NAME = 24
MAX_LANES = 8
"""Maximum number of data-flow lines side by side."""


class ModuleList(RowList):
    """Tree with one line per module outside all folded modules."""

    def __init__(self, graph: ModuleGraph) -> None:
        super().__init__(MODULES)
        self.graph = graph
        self._has_children = {node.parent for node in graph.nodes}
        self._folded = set(graph.folded)
        self._visible: list[int] = []
        self._flow = FlowGutter(())

    def on_mount(self) -> None:
        """Show the tree."""
        self._flatten(0)

    @property
    def at(self) -> int | None:
        """Index of the module under the cursor."""
        return self._visible[self.cursor] if self._visible else None

    @property
    def node(self) -> ModuleNode | None:
        """The module under the cursor."""
        return None if self.at is None else self.graph.nodes[self.at]

    def reveal(self, index: int) -> None:
        """Unfold the ancestors of a module and move the cursor to the module."""
        parent = self.graph.nodes[index].parent
        while parent is not None:
            self._folded.discard(parent)
            parent = self.graph.nodes[parent].parent
        self._flatten(index)

    def fold(self) -> None:
        """Fold the module, or go to its parent if already folded."""
        node, at = self.node, self.at
        if node is None or at is None:
            return
        if at in self._has_children and at not in self._folded:
            self._folded.add(at)
            self._flatten(at)
        elif node.parent is not None:
            self.go(self._visible.index(node.parent))

    def unfold(self) -> None:
        """Unfold the module, or go to its first child if already unfolded."""
        at = self.at
        if at is None or at not in self._has_children:
            return
        if at in self._folded:
            self._folded.discard(at)
            self._flatten(at)
        else:
            self.go(self.cursor + 1)

    def _flatten(self, index: int) -> None:
        self._visible = visible_modules(self.graph, self._folded)
        self._flow = FlowGutter(flow_lanes(self.graph, self._visible))
        self.set_num_rows(len(self._visible), self._visible.index(index) if self._visible else 0)
        self.post_message(self.Moved(self))

    def _gutter_width(self, width: int) -> int:
        """Return the width of the data-flow lines; 0 if they would leave too little space for names."""
        return self._flow.width if width - self._flow.width >= _MIN_NAME + MAX_LANES else 0

    def _columns(self, width: int) -> dict[str, int]:
        """Return name -> width of the columns that fit next to the name."""
        is_pair = any(node.ratio.value is not None or node.ratio.text != "-" for node in self.graph.nodes)
        longest = max((len(node.cls) for node in self.graph.nodes), default=0)
        columns = {"class": min(max(longest, 5), _CLASS)} if longest else {}
        columns |= _COLUMNS if is_pair else {name: wide for name, wide in _COLUMNS.items() if name != "÷ floor"}
        for dropped in ("dtype", "class", "shape"):
            if width - sum(wide + 2 for wide in columns.values()) >= _MIN_NAME:
                break
            columns.pop(dropped, None)
        return columns

    def header(self, width: int) -> Text | None:
        """Return the column names."""
        gutter = self._gutter_width(width)
        width -= 2 + gutter
        return Text(" " * gutter) + self._line("module", {name: name for name in self._columns(width)}, width)

    def format_row(self, row: int, width: int) -> Text:
        """Format a module: error glyph as in the heat map, name, class, shape and dtype of its output."""
        at = self._visible[row]
        node = self.graph.nodes[at]
        fold = " " if at not in self._has_children else "▸" if at in self._folded else "▾"
        name = f"{'  ' * node.depth}{fold} {node.name}"
        line = self._line(
            f"{node.glyph} {name}",
            {"class": node.cls, "shape": node.shape, "dtype": node.dtype, "÷ floor": node.ratio.text},
            width - self._gutter_width(width),
        )
        if node.is_cause or node.verdict in _BAD:
            line.stylize(self.bad_style + Style(bold=node.is_cause or None), 1)
        elif node.worst_inside not in _BAD and node.glyph in "~=":
            line.stylize("dim")
        heat = heat_style(self.app.theme, node.glyph)
        if heat is not None:
            line.stylize(heat, 0, 1)
        if at in self._folded and node.worst_inside in _BAD and node.verdict not in _BAD:
            line.stylize(self.bad_style, 1)
        return Text(self._flow.text(row) if self._gutter_width(width) else "") + line

    def _line(self, name: str, cells: dict[str, str], width: int) -> Text:
        columns = self._columns(width)
        room = max(width - sum(wide + 2 for wide in columns.values()), 1)
        line = f"{middle(name, room):<{room}}"
        for column, wide in columns.items():
            text = middle(cells[column], wide)
            line += f"  {text:<{wide}}" if column == "class" else f"  {text:>{wide}}"
        return Text(line)


_BAD = frozenset({"differs", "nonfinite", "shape"})


class FlowGutter:
    """Data-flow lines next to the rows, drawn with box-drawing characters."""

    def __init__(self, lanes: Sequence[FlowLane]) -> None:
        self._lanes = [each for each in lanes if each.lane < MAX_LANES]
        self.width = 2 + max(each.lane for each in self._lanes) if self._lanes else 0
        """Width of the gutter, in characters."""

    def text(self, row: int) -> str:
        """Return the gutter of a row, e.g. ``│╰→``; ``┊`` and ``⇢`` are inferred flows."""
        if not self.width:
            return ""
        touched = [each for each in self._lanes if each.first <= row <= each.last]
        joined = {each.lane for each in touched if row == each.producer or row in each.consumers}
        above = {each.lane for each in touched if each.first < row}
        below = {each.lane for each in touched if row < each.last}
        outermost = max(joined, default=-1)
        dashed = {each.lane for each in touched if each.is_inferred and each.first < row < each.last} - joined
        cells = [
            "┊"
            if lane in dashed and lane > outermost
            else _BOX[lane in above, lane in below, lane < outermost, lane in joined or lane < outermost]
            for lane in reversed(range(self.width - 1))
        ]
        received = [each for each in touched if row in each.consumers]
        if received:
            return "".join(cells) + ("⇢" if all(each.is_inferred for each in received) else "→")
        return "".join(cells) + ("─" if joined else " ")


_BOX = {
    (False, False, False, False): " ",
    (True, True, False, False): "│",
    (False, True, False, True): "╭",
    (True, False, False, True): "╰",
    (True, True, False, True): "├",
    (False, False, True, True): "─",
    (False, True, True, True): "┬",
    (True, False, True, True): "┴",
    (True, True, True, True): "┼",
}
"""(up, down, left, right) -> the box-drawing character with these arms."""
