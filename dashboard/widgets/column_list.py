"""ColumnList: rows with columns, of which the user may choose some."""

from collections.abc import Sequence
from typing import ClassVar

from tapscope.dashboard.widgets.row_list import RowList


class ColumnList(RowList):
    """Base of the lists of records and findings."""

    COLUMNS: ClassVar[tuple[str, ...]]
    """All that can be chosen, in the order in which they are shown."""
    chosen: tuple[str, ...] | None = None
    """What the user chose; None: what fits of the usual ones."""

    def choose(self, columns: Sequence[str] | None) -> None:
        """Show these columns; those of an unknown name are left out."""
        self.chosen = None if columns is None else tuple(name for name in self.COLUMNS if name in columns)
        self.set_num_rows(self.num_rows, self.cursor)

    def usual(self) -> Sequence[str]:
        """The columns that are shown unless the user chose others."""
        raise NotImplementedError

    def fitting(self, widths: dict[str, int], room: int, dropped_first: Sequence[str]) -> dict[str, int]:
        """Name -> width of the columns that leave the site its cells; of chosen ones the last are left out first."""
        names = self.usual() if self.chosen is None else self.chosen
        columns = {name: widths[name] for name in names}
        for dropped in dropped_first if self.chosen is None else reversed(names):
            if sum(width + 2 for width in columns.values()) <= room:
                break
            columns.pop(dropped, None)
        return columns
