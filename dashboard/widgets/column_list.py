"""Base of lists whose columns the user may choose."""

from collections.abc import Sequence
from typing import ClassVar

from tapscope.dashboard.widgets.row_list import RowList


class ColumnList(RowList):
    """Row list with columns; base of the record table and the finding table."""

    COLUMNS: ClassVar[tuple[str, ...]]
    """All columns that can be chosen, in display order."""
    chosen: tuple[str, ...] | None = None
    """Columns chosen by the user; None shows as many default columns as fit."""

    def choose(self, columns: Sequence[str] | None) -> None:
        """Show the given columns, ignoring unknown names; None restores the default."""
        self.chosen = None if columns is None else tuple(name for name in self.COLUMNS if name in columns)
        self.set_num_rows(self.num_rows, self.cursor)

    def usual(self) -> Sequence[str]:
        """Return the default columns."""
        raise NotImplementedError

    def fitting(self, widths: dict[str, int], room: int, dropped_first: Sequence[str]) -> dict[str, int]:
        """Return name -> width of the columns that fit into ``room`` cells.

        Default columns are dropped in the order ``dropped_first``, chosen columns from the last one on.
        """
        names = self.usual() if self.chosen is None else self.chosen
        columns = {name: widths[name] for name in names}
        for dropped in dropped_first if self.chosen is None else reversed(names):
            if sum(width + 2 for width in columns.values()) <= room:
                break
            columns.pop(dropped, None)
        return columns
