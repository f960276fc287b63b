"""Heat map of layers × steps, ranks or tokens; layers unfold into modules and sites."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.style import Style
from rich.text import Text
from textual import events

from tapscope.comparator import Verdict
from tapscope.core.formatting import middle
from tapscope.core.formatting import site as shorten
from tapscope.core.site import module_of
from tapscope.dashboard.keymap import LAYERS
from tapscope.dashboard.model.grid import Cell, Grid, GridColumn, GridRow, worst
from tapscope.dashboard.model.grid_levels import inner_rows
from tapscope.dashboard.theme import heat_style
from tapscope.dashboard.widgets.row_list import RowList

_LABEL, _NARROW_LABEL, _SITE_LABEL = 12, 8, 32
_AROUND = 5
"""Number of cells in a line besides label and columns: glyph, two spaces, and the culprit's mark."""
_WIDE = 24
"""Minimum width for full-length labels, which are also shortened if not all columns fit next to them."""


@dataclass(frozen=True, slots=True)
class _Line:
    """Line of the pane: a layer, a module in the layer, or a site."""

    layer: int
    """Row index of the layer in the grid of layers."""
    row: GridRow
    depth: int = 0
    """Nesting level; 0 for a layer."""
    inner: int = -1
    """Row index in the grid of the shown modules and sites; -1 for a layer."""
    has_rows: bool = False
    """Whether the line can be unfolded."""

    @property
    def key(self) -> tuple[int, str]:
        """Key of the line in the set of unfolded lines; the name is empty for a layer."""
        return self.layer, self.row.name if self.depth else ""

    @property
    def is_site(self) -> bool:
        """Whether the line is a site; False for a layer with a single site."""
        return self.depth > 0 and len(self.row.orders) == 1


class LayerGrid(RowList):
    """Left pane of the diff screen; the first line stands for all layers."""

    def __init__(self) -> None:
        super().__init__(LAYERS)
        self.layer_rows: Grid | None = None
        self._sites: Grid | None = None
        self._lines: list[_Line] = []
        self._unfolded: set[tuple[int, str]] = set()
        self._chosen: int | None = None
        self._span = (0, 0)
        """Range of shown columns: first, and end (exclusive)."""
        self._culprit: str | None = None
        self._in_sight: str | None = None
        """Layer that stays visible while the cursor is on the first line."""
        self._binned: dict[int, tuple[Grid, Grid]] = {}
        """Number of columns -> layers and sites, binned to at most that number."""
        self._inner: dict[int, Grid] = {}
        """Number of columns -> grid of the shown modules and sites."""
        self._longest = (0, 1)
        """Lengths of the longest row label and the longest column label."""

    @property
    def group(self) -> str | None:
        """Name of the layer under the cursor; None on the first line."""
        line = self._line
        return self.layer_rows.rows[line.layer].name if self.layer_rows and line else None

    @property
    def path(self) -> str:
        """Module under the cursor, or module of the site; empty for a layer and on the first line."""
        line = self._line
        if line is None or not line.depth:
            return ""
        return module_of(line.row.name) if line.is_site else line.row.name

    @property
    def order(self) -> int | None:
        """Position in execution order of the finding at the site under the cursor; None if not on a site."""
        line = self._line
        return line.row.orders[0] if line is not None and line.is_site else None

    @property
    def _line(self) -> _Line | None:
        return self._lines[self.cursor - 1] if 0 < self.cursor <= len(self._lines) else None

    def set_grids(self, layers: Grid, sites: Grid, culprit: str | None) -> None:
        """Show these grids; ``culprit`` is the name of the layer with the culprit's mark."""
        self.layer_rows, self._sites, self._culprit = layers, sites, culprit
        self._unfolded.clear()
        self._binned.clear()
        self._span = 0, len(layers.columns)
        self._longest = (
            max([len(row.label) for row in layers.rows], default=0),
            max([len(each.label) for each in layers.columns], default=1),
        )
        self._arrange(0)

    @property
    def axis(self) -> str:
        """Meaning of a column: ``step``, ``rank`` or ``token``."""
        return self.layer_rows.axis if self.layer_rows is not None else "step"

    def set_chosen(self, column: int | None) -> None:
        """Highlight the column of a step or rank; None removes the highlight."""
        if column == self._chosen:
            return
        self._chosen = column
        first, stop = self._span
        at = self._chosen_place
        if at is not None and not first <= at < stop:
            self._show_columns(stop - first)
        self.refresh_line(0)

    @property
    def _chosen_place(self) -> int | None:
        return self.layer_rows.column_of(self._chosen) if self.layer_rows and self._chosen is not None else None

    def zoom_columns(self, direction: int) -> bool:
        """Show half as many columns around the chosen one, or twice as many; return whether the view changed."""
        shown = self._span[1] - self._span[0]
        wanted = min(
            (shown + 1) // 2 if direction > 0 else 2 * shown, len(self.layer_rows.columns) if self.layer_rows else 0
        )
        if wanted == shown:
            return False
        self._show_columns(wanted)
        return True

    def _show_columns(self, num: int) -> None:
        """Show ``num`` columns around the chosen one, else around the center of the current ones."""
        assert self.layer_rows is not None
        at = self._chosen_place
        centre = at if at is not None else sum(self._span) // 2
        first = max(min(centre - num // 2, len(self.layer_rows.columns) - num), 0)
        self._span = first, first + num
        self._binned.clear()
        self._draw_title()
        self.refresh()

    def reveal(self, name: str | None) -> None:
        """Move the cursor to a layer without posting Moved; None moves to the first line."""
        names = [None if line.depth else line.row.name for line in self._lines]
        if name is None:
            self.set_num_rows(self.num_rows, 0)
        elif name in names:
            self.set_num_rows(self.num_rows, names.index(name) + 1)

    def keep_in_sight(self, name: str) -> None:
        """Keep a layer visible, also after a resize, while the cursor is on the first line."""
        self._in_sight = name
        self._follow()

    def _follow(self) -> None:
        rows = (i for i, line in enumerate(self._lines, 1) if not line.depth and line.row.name == self._in_sight)
        row = 0 if self.cursor else next(rows, 0)
        if not row:
            super()._follow()
            return
        visible, top = max(self.size.height - 1, 1), round(self.scroll_offset.y)
        if not top <= row < top + visible:
            around = row - visible // 2 if row >= visible else 0
            self.scroll_to(y=around, animate=False, immediate=True)

    def unfold(self, unfolded: bool) -> str:
        """Unfold or fold the line under the cursor; folding a folded line folds its parent.

        Returns a message if the line cannot be unfolded or folded, else an empty string.
        """
        line = self._line
        if line is None:
            return "Choose a layer: it unfolds into its modules."
        if unfolded:
            if not line.has_rows:
                return "A site has nothing to unfold."
            self._unfolded.add(line.key)
            self._arrange(self.cursor)
            return ""
        at = self.cursor - 1
        if line.key not in self._unfolded:
            if not line.depth:
                return "This layer is folded already."
            at = next(i for i in reversed(range(at)) if self._lines[i].depth < line.depth)
        self._unfolded.discard(self._lines[at].key)
        self._arrange(at + 1)
        return ""

    def _arrange(self, cursor: int) -> None:
        self._lines, self._inner = [], {}
        num_inner = 0
        every = self.layer_rows.rows if self.layer_rows else ()
        stack = [_Line(i, row, has_rows=True) for i, row in reversed(list(enumerate(every)))]
        while stack:
            line = stack.pop()
            if line.depth:
                line = replace(line, inner=num_inner)
                num_inner += 1
            self._lines.append(line)
            if line.key in self._unfolded and line.has_rows:
                stack += reversed(self._below(line))
        self.set_num_rows(len(self._lines) + 1 if self._lines else 0, cursor)
        self._draw_title()

    def _below(self, line: _Line) -> list[_Line]:
        """Return the lines of the next level; for a layer with a single site, the site."""
        assert self._sites is not None
        rows = inner_rows(self._sites.rows, line.row)
        if not rows and not line.depth:
            rows = tuple(self._sites.rows[i] for i in line.row.orders)
        return [_Line(line.layer, row, line.depth + 1, has_rows=len(row.orders) > 1) for row in rows]

    def columns(self, width: int) -> Sequence[GridColumn]:
        """Return the columns that a line of ``width`` cells shows: all of them, or bins."""
        return self._grids(width)[0].columns

    def _grids(self, width: int) -> tuple[Grid, Grid]:
        """Return the grid of layers and the grid of shown modules and sites, binned to the columns that fit."""
        assert self.layer_rows is not None
        assert self._sites is not None
        room = max((width - self._label(width) - _AROUND) // self._cell(width), 1)
        if room not in self._binned:
            layers, sites = self.layer_rows.span(*self._span), self._sites.span(*self._span)
            self._binned[room] = layers.binned(room), sites.binned(room)
            self._inner.clear()
        layers, sites = self._binned[room]
        if room not in self._inner:
            self._inner[room] = sites.grouped([line.row for line in self._lines if line.depth])
        return layers, self._inner[room]

    def _cell(self, width: int) -> int:
        """Return the width of a column: wide enough for its label if all columns fit, else one cell."""
        if self.layer_rows is None:
            return 1
        wide, num = self._longest[1] + 1, self._span[1] - self._span[0]
        return wide if num * wide + self._label(width) + _AROUND <= width else 1

    def _label(self, width: int) -> int:
        wanted = min(max(self._longest[0], len("everything")), _SITE_LABEL if self._unfolded and width > 60 else _LABEL)
        if self._unfolded and width > 60:
            return _SITE_LABEL
        num = self._span[1] - self._span[0]
        gives_way = width < _WIDE or wanted + num + _AROUND > width
        return _NARROW_LABEL if gives_way else wanted

    def header(self, width: int) -> Text | None:
        """Return the column labels; for one-cell columns, at most every tenth label."""
        if not self._lines:
            return None
        columns, cell = self.columns(width - 2), self._cell(width - 2)
        text = Text(" " * (self._label(width - 2) + 3))
        if cell > 1:
            for each in columns:
                chosen = self._chosen is not None and each.first <= self._chosen <= each.last
                text.append(" " * (cell - len(each.label)))
                text.append(each.label, style="bold reverse" if chosen else "")
            return text
        return text.append_text(_axis(columns, self._chosen))

    def on_resize(self, event: events.Resize) -> None:
        """Redraw for the new size."""
        super().on_resize(event)
        self._draw_title()

    def _draw_title(self) -> None:
        self.set_title(self.title(), self.subtitle())

    def title(self) -> str:
        """Return the title of the pane."""
        num, every = self._span[1] - self._span[0], self.layer_rows.columns if self.layer_rows else ()
        if not self._lines or num == len(every):
            return f"layers × {self.axis}s"
        first, last = every[self._span[0]], every[self._span[1] - 1]
        shown = f"{first.name or first.first}-{last.last_name or last.name or last.last}"
        return f"layers × {self.axis}s {shown} of {len(every)}"

    def subtitle(self) -> str:
        """Return the number of steps, ranks or tokens and the number of columns that show them; empty if not binned."""
        if not self._lines or self.layer_rows is None:
            return ""
        shown, num = len(self.columns(self.room - 2)), self._span[1] - self._span[0]
        return f"{num} {self.axis}s in {shown} columns" if shown < num else ""

    def mark(self, verdict: Verdict) -> str:
        """Return the character before a row's name."""
        return verdict.glyph

    def format_row(self, row: int, width: int) -> Text:
        """Format a row: worst verdict, name, and one cell per column."""
        label = self._label(width)
        assert self.layer_rows is not None
        if row == 0:
            everything = "everything" if label >= len("everything") else "all"
            return Text(f"{self.mark(worst(each.verdict for each in self.layer_rows.rows))} {everything}")
        line = self._lines[row - 1]
        layers, inner = self._grids(width)
        grid, at = (inner, line.inner) if line.depth else (layers, line.layer)
        shown = line.row
        fold = "" if not line.depth else " " if not line.has_rows else "▾" if line.key in self._unfolded else "▸"
        indent = " " * min(line.depth, label // 3) + fold
        name = indent + (shorten(shown.label, label - len(indent)) if line.depth else middle(shown.label, label))
        bold = Style(bold=True) if shown.is_cause else Style()
        text = Text(f"{self.mark(shown.verdict)} {name:<{label}} ", style=self._style(shown.verdict) + bold)
        cell = self._cell(width)
        for i in range(len(grid.columns)):
            each = grid.cell(at, i)
            text.append(" " * (cell - 1)).append(each.glyph, style=self._cell_style(each))
        if not line.depth and shown.name == self._culprit:
            text.append(" ◂", style=self.bad_style)
        return text

    def _style(self, verdict: Verdict | None) -> Style:
        """Return the style of a verdict: orange for bad ones, dim for agreement and for cells without a comparison."""
        if verdict is not None and verdict.is_bad:
            return self.bad_style
        return Style() if verdict is not None and verdict.is_orphan else Style(dim=True)

    def _cell_style(self, cell: Cell) -> Style:
        heat = heat_style(self.app.theme, cell.glyph)
        return self._style(cell.verdict) if heat is None else heat


def _axis(columns: Sequence[GridColumn], chosen: int | None) -> Text:
    """Label every tenth one-cell column, unless the label touches the previous one or exceeds the line."""
    cells = [" "] * len(columns)
    free = 0
    for i, each in enumerate(columns):
        label = each.name or str(each.first)
        if i >= free and i + len(label) <= len(columns) and (i == 0 or i % 10 == 0):
            cells[i : i + len(label)] = label
            free = i + len(label) + 1
    text = Text("".join(cells))
    for i, each in enumerate(columns):
        if chosen is not None and each.first <= chosen <= each.last:
            text.stylize("bold reverse", i, i + 1)
    return text
