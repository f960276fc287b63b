"""Base of modal screens with a single list."""

from typing import Generic, TypeVar

from textual.screen import ModalScreen

from tapscope.dashboard.widgets.row_list import RowList

Chosen = TypeVar("Chosen")


class ListScreen(ModalScreen[Chosen | None], Generic[Chosen]):
    """Base of the bookmark and column lists: moves the cursor, and closes without a result."""

    list: RowList

    def action_move(self, delta: int) -> None:
        """Move the cursor by ``delta`` lines."""
        self.list.move(delta)

    def action_page(self, direction: int) -> None:
        """Move the cursor by one page."""
        self.list.page(direction)

    def action_ends(self, direction: int) -> None:
        """Move the cursor to the first or last line."""
        self.list.ends(direction)

    def action_back(self) -> None:
        """Close the list."""
        self.dismiss(None)

    async def action_quit(self) -> None:
        """Close the list instead of the app; q on the screen below quits."""
        self.dismiss(None)
