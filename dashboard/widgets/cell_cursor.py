"""CellCursor: a cursor that moves over rows and columns."""

from textual.widget import Widget

_LAST = 1 << 30
"""Beyond every row and column."""


class CellCursor(Widget, can_focus=True):
    """A widget with a cursor on one of its cells."""

    row: int
    """Of the cursor."""
    column: int

    def go(self, row: int, column: int) -> None:
        """Put the cursor on the nearest cell that there is."""
        raise NotImplementedError

    def move(self, delta: int) -> None:
        """Rows down, or up."""
        self.go(self.row + delta, self.column)

    def page(self, direction: int) -> None:
        """As many rows as are visible."""
        self.move(direction * max(self.size.height - 2, 1))

    def ends(self, direction: int) -> None:
        """The first or last row."""
        self.go(0 if direction < 0 else _LAST, self.column)

    def move_column(self, delta: int) -> None:
        """Columns to the right, or left."""
        self.go(self.row, self.column + delta)

    def column_ends(self, direction: int) -> None:
        """The first or last column."""
        self.go(self.row, 0 if direction < 0 else _LAST)
