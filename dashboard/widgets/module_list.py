"""ModuleList: the modules of a run or a comparison as a tree, with class, shape and error."""

from rich.style import Style
from rich.text import Text

from tapscope.core.formatting import middle
from tapscope.dashboard.model.module_graph import ModuleGraph, ModuleNode
from tapscope.dashboard.theme import heat_style
from tapscope.dashboard.widgets.row_list import RowList

MODULES = "modules"
FIRST_ROWS = 60
"""Initially, levels are unfolded while the tree has at most this many rows."""
_COLUMNS = {"shape": 16, "dtype": 13, "÷ floor": 8}
_CLASS = 24
_MIN_NAME = 24


class ModuleList(RowList):
    """A line per module that no folded module hides."""

    def __init__(self, graph: ModuleGraph) -> None:
        super().__init__(MODULES)
        self.graph = graph
        self._has_children = {node.parent for node in graph.nodes}
        self._folded = _first_folded(graph)
        self._visible: list[int] = []

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
        """Unfold what hides a module, and put the cursor on it."""
        parent = self.graph.nodes[index].parent
        while parent is not None:
            self._folded.discard(parent)
            parent = self.graph.nodes[parent].parent
        self._flatten(index)

    def fold(self) -> None:
        """Fold the module, or go to the one around it where it is folded."""
        node, at = self.node, self.at
        if node is None or at is None:
            return
        if at in self._has_children and at not in self._folded:
            self._folded.add(at)
            self._flatten(at)
        elif node.parent is not None:
            self.go(self._visible.index(node.parent))

    def unfold(self) -> None:
        """Unfold the module, or go to the first one in it where it is unfolded."""
        at = self.at
        if at is None or at not in self._has_children:
            return
        if at in self._folded:
            self._folded.discard(at)
            self._flatten(at)
        else:
            self.go(self.cursor + 1)

    def _flatten(self, index: int) -> None:
        self._visible = []
        hidden: int | None = None  # depth of the folded module that hides what follows
        for i, node in enumerate(self.graph.nodes):
            if hidden is not None and node.depth > hidden:
                continue
            hidden = node.depth if i in self._folded else None
            self._visible.append(i)
        self.set_num_rows(len(self._visible), self._visible.index(index) if self._visible else 0)
        self.post_message(self.Moved(self))

    def _columns(self, width: int) -> dict[str, int]:
        """Name -> width of the columns that fit next to the name."""
        is_pair = any(node.ratio.value is not None or node.ratio.text != "-" for node in self.graph.nodes)
        longest = max((len(node.cls) for node in self.graph.nodes), default=0)
        found = {"class": min(max(longest, 5), _CLASS)} if longest else {}
        found |= _COLUMNS if is_pair else {name: wide for name, wide in _COLUMNS.items() if name != "÷ floor"}
        for dropped in ("dtype", "class", "shape"):
            if width - sum(wide + 2 for wide in found.values()) >= _MIN_NAME:
                break
            found.pop(dropped, None)
        return found

    def header(self, width: int) -> Text | None:
        """Names of the columns."""
        columns = self._columns(width - 2)
        return self._line("module", {name: name for name in columns}, width - 2)

    def format_row(self, row: int, width: int) -> Text:
        """A module: its error as in the heat map, its name, its class, and what it returned."""
        at = self._visible[row]
        node = self.graph.nodes[at]
        fold = " " if at not in self._has_children else "▸" if at in self._folded else "▾"
        name = f"{'  ' * node.depth}{fold} {node.name}"
        line = self._line(
            f"{node.glyph} {name}",
            {"class": node.cls, "shape": node.shape, "dtype": node.dtype, "÷ floor": node.ratio.text},
            width,
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
        return line

    def _line(self, name: str, cells: dict[str, str], width: int) -> Text:
        columns = self._columns(width)
        room = max(width - sum(wide + 2 for wide in columns.values()), 1)
        line = f"{middle(name, room):<{room}}"
        for column, wide in columns.items():
            text = middle(cells[column], wide)
            line += f"  {text:<{wide}}" if column == "class" else f"  {text:>{wide}}"
        return Text(line)


_BAD = frozenset({"differs", "nonfinite", "shape"})


def _first_folded(graph: ModuleGraph) -> set[int]:
    """Whole levels are shown, from the root down, while the tree stays short; and what leads to a cause."""
    deepest, rows = 0, 0
    for depth in range(max((node.depth for node in graph.nodes), default=0) + 1):
        rows += sum(node.depth == depth for node in graph.nodes)
        if rows > FIRST_ROWS and depth > 1:
            break
        deepest = depth
    parents = {node.parent for node in graph.nodes if node.parent is not None}
    folded = {i for i in parents if graph.nodes[i].depth >= deepest}
    for node in graph.nodes:
        above = node.parent if node.is_cause else None
        while above is not None:
            folded.discard(above)
            above = graph.nodes[above].parent
    return folded
