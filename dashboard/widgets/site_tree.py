"""Module tree of a run, with the number of records and anomalies per module."""

from rich.text import Text

from tapscope.core.formatting import count, middle
from tapscope.dashboard.browse_source import ModuleCounts
from tapscope.dashboard.keymap import SITES
from tapscope.dashboard.module_tree import SiteNode
from tapscope.dashboard.widgets.row_list import RowList

FIRST_ROWS = 40
"""Limit on the number of rows of the initially unfolded levels."""

_MIN_NAME = 14
"""Minimum width of the indented name; if both counts leave less, only the anomalies are shown."""
WIDE = 26
"""Minimum width for an indent of two cells per level; narrower trees indent by one."""


class SiteTree(RowList):
    """Left pane of the browse screen."""

    def __init__(self) -> None:
        super().__init__(SITES)
        self._root = SiteNode("", "")
        self._label = ""
        self._counts: ModuleCounts | None = None
        self._unfolded: set[str] = set()
        self._visible: list[tuple[SiteNode, int]] = []

    @property
    def path(self) -> str:
        """Module under the cursor; empty for the whole model."""
        return self._visible[self.cursor][0].path if self._visible else ""

    def set_tree(self, root: SiteNode, label: str) -> None:
        """Show another tree; folds and cursor are kept for modules that still exist."""
        path, is_first = self.path, not self._root.children
        self._counts = None  # they belong to the previous tree
        self._root, self._label = root, label
        if is_first:
            self._unfolded = _first_unfolded(root)
        self._flatten(path)

    def set_counts(self, counts: ModuleCounts) -> None:
        """Show the counts of the chosen step and rank."""
        if counts != self._counts:
            self._counts = counts
            self.refresh()

    def reveal(self, path: str) -> None:
        """Unfold the ancestors of a module and move the cursor to the module, without posting Moved."""
        parts = path.split(".") if path else []
        self._unfolded |= {"", *(".".join(parts[:i]) for i in range(1, len(parts)))}
        self._flatten(path)

    def fold(self) -> None:
        """Fold the module, or go to its parent if already folded."""
        node, depth = self._visible[self.cursor]
        if node.path in self._unfolded and node.children:
            self._unfolded.discard(node.path)
            self._flatten(node.path)
        elif depth:
            parent = next(row for row in range(self.cursor, -1, -1) if self._visible[row][1] < depth)
            self.go(parent)

    def unfold(self) -> None:
        """Unfold the module, or go to its first child if already unfolded."""
        node, _ = self._visible[self.cursor]
        if not node.children:
            return
        if node.path in self._unfolded:
            self.go(self.cursor + 1)
        else:
            self._unfolded.add(node.path)
            self._flatten(node.path)

    def format_row(self, row: int, width: int) -> Text:
        """Format a module: ``▾ layers.12      % 1  6``."""
        node, depth = self._visible[row]
        num_records, num_anomalies = self._counts.of(node) if self._counts is not None else (0, 0)
        mark = f"% {count(num_anomalies)} " if num_anomalies else ""
        amount = count(num_records) if num_records else "-"
        fold = " " if not node.children else "▾" if node.path in self._unfolded else "▸"
        room = max(width - len(mark) - len(amount) - 1, 4)
        if room < _MIN_NAME and mark:  # anomalies take precedence over the number of records
            mark, amount = mark.rstrip(), ""
            room = max(width - len(mark) - 1, 4)
        indent = 2 if width >= WIDE else 1
        start = f"{' ' * min(indent * depth, room // 2)}{fold} "
        name = start + middle(_label(node) if node.path else self._label, room - len(start))
        style = "" if num_records else "dim"
        return Text(f"{name:<{room}} ", style=style).append(mark, style="bold").append(amount, style="dim")

    def _flatten(self, path: str) -> None:
        self._visible = []
        stack = [(self._root, 0)]
        while stack:
            node, depth = stack.pop()
            self._visible.append((node, depth))
            if node.path in self._unfolded:
                stack += [(child, depth + 1) for child in reversed(node.children.values())]
        cursor = next((row for row, (node, _) in enumerate(self._visible) if node.path == path), 0)
        self.set_num_rows(len(self._visible), cursor)


def _label(node: SiteNode) -> str:
    """Return the module's name; a numbered module includes the name of its list: ``layers.12``."""
    if not node.name.isdigit():
        return node.name
    return ".".join(node.path.rsplit(".", 2)[-2:])


def _first_unfolded(root: SiteNode) -> set[str]:
    """Return the modules to unfold first: whole levels while the tree stays short; the root in any case."""
    unfolded, level, rows = {""}, list(root.children.values()), 1 + len(root.children)
    while level:
        below = [child for node in level for child in node.children.values()]
        rows += len(below)
        if rows > FIRST_ROWS:
            break
        unfolded |= {node.path for node in level if node.children}
        level = below
    return unfolded
