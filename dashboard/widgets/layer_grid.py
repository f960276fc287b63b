"""LayerGrid: layers against steps, a glyph a cell."""

from collections.abc import Sequence

from rich.style import Style
from rich.text import Text
from textual import events

from tapscope.comparator import Verdict
from tapscope.core.formatting import middle
from tapscope.dashboard.keymap import LAYERS
from tapscope.dashboard.layer_grid import Group, worst
from tapscope.dashboard.widgets.row_list import RowList

_LABEL, _NARROW_LABEL = 12, 8
_WIDE = 24
"""Cells from which labels give way only where all steps fit then."""


class LayerGrid(RowList):
    """Left pane of the diff screen; its first line stands for everything."""

    def __init__(self) -> None:
        super().__init__(LAYERS)
        self.groups: Sequence[Group] = ()
        self._steps: Sequence[int] = ()
        self._step: int | None = None
        self._culprit: str | None = None

    @property
    def group(self) -> str | None:
        """Name of the group under the cursor; None for everything."""
        return self.groups[self.cursor - 1].name if self.groups and self.cursor > 0 else None

    def set_groups(self, groups: Sequence[Group], steps: Sequence[int], culprit: str | None) -> None:
        """Show these groups; ``culprit`` is the name of the one that is marked."""
        self.groups, self._steps, self._culprit = groups, steps, culprit
        self.set_num_rows(len(groups) + 1 if groups else 0, 0)
        self.tell()

    def set_step(self, step: int | None) -> None:
        """The column that is chosen."""
        self._step = step
        self.tell()
        self.refresh()

    def reveal(self, name: str | None) -> None:
        """Put the cursor on a group, without a word to the screen."""
        names = [None, *(group.name for group in self.groups)]
        if name in names:
            self.set_num_rows(self.num_rows, names.index(name))

    def columns(self, width: int) -> Sequence[int]:
        """The steps that fit into ``width`` cells, the chosen one among them."""
        room = max((width - self._label(width) - 4) // self._cell, 1)
        at = self._steps.index(self._step) if self._step in self._steps else 0
        first = max(min(at - room // 2, len(self._steps) - room), 0)
        return self._steps[first : first + room]

    @property
    def _cell(self) -> int:
        return max([len(str(step)) for step in self._steps], default=1) + 1

    def _label(self, width: int) -> int:
        longest = max([len(group.label) for group in self.groups], default=0)
        wanted = min(max(longest, len("everything")), _LABEL)
        needed = len(self._steps) * self._cell + 4
        gives_way = width < _WIDE or wanted + needed > width >= _NARROW_LABEL + needed
        return _NARROW_LABEL if gives_way else wanted

    def header(self, width: int) -> Text | None:
        """The steps."""
        if not self.groups:
            return None
        text = Text(" " * (self._label(width - 2) + 2))
        for step in self.columns(width - 2):
            text.append(" " * (self._cell - len(str(step))))
            text.append(str(step), style="bold reverse" if step == self._step else "")
        return text

    def on_resize(self, event: events.Resize) -> None:
        """What fits has changed."""
        super().on_resize(event)
        self.tell()

    def tell(self) -> None:
        """Say in the border which steps are shown, where not all fit."""
        seen = self.columns(self.room - 2) if self.groups else ()
        left_out = f"steps {seen[0]}-{seen[-1]} of {len(self._steps)}" if 0 < len(seen) < len(self._steps) else ""
        self.set_title("layers × steps", left_out)

    def format_row(self, row: int, width: int) -> Text:
        """A group: its worst verdict, its name, and a glyph for every step."""
        label = self._label(width)
        if row == 0:
            return Text(f"{worst([g.verdict for g in self.groups]).glyph} {middle('everything', label)}")
        group = self.groups[row - 1]
        line = Text(f"{group.verdict.glyph} {middle(group.label, label):<{label}}", style=self._style(group.verdict))
        for step in self.columns(width):
            line.append(group.glyph(step).rjust(self._cell), style=self._style(group.steps.get(step)))
        if group.name == self._culprit:
            line.append(" ◂", style=self.bad_style)
        return line

    def _style(self, verdict: Verdict | None) -> Style:
        """Orange for what differs, dim for what agrees and where nothing was compared."""
        if verdict is not None and verdict.is_bad:
            return self.bad_style
        return Style() if verdict is not None and verdict.is_orphan else Style(dim=True)
