"""Base of widgets with a cursor over rows and columns."""

from textual.widget import Widget

_LAST = 1 << 30
"""Larger than any row or column index."""


class CellCursor(Widget, can_focus=True):
    """Widget with a cursor on one of its cells."""

    row: int
    """Row of the cursor."""
    column: int

    def go(self, row: int, column: int) -> None:
        """Move the cursor to a cell, clamped to the existing cells."""
        raise NotImplementedError

    def move(self, delta: int) -> None:
        """Move the cursor down by ``delta`` rows."""
        self.go(self.row + delta, self.column)

    def page(self, direction: int) -> None:
        """Move the cursor by one page."""
        self.move(direction * max(self.size.height - 2, 1))

    def ends(self, direction: int) -> None:
        """Move the cursor to the first or last row."""
        self.go(0 if direction < 0 else _LAST, self.column)

    def move_column(self, delta: int) -> None:
        """Move the cursor right by ``delta`` columns."""
        self.go(self.row, self.column + delta)

    def column_ends(self, direction: int) -> None:
        """Move the cursor to the first or last column."""
        self.go(self.row, 0 if direction < 0 else _LAST)
