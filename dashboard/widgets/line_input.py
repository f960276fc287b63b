"""LineInput: the line at the bottom into which a filter or an answer is typed."""

from textual.geometry import Size
from textual.reactive import Reactive
from textual.widgets import Input


class LineInput(Input):
    """One line as wide as the screen, so that a typed character does not lay out the whole screen."""

    virtual_size = Reactive(Size(0, 0))

    def __init__(self, placeholder: str = "", *, id: str) -> None:
        super().__init__(placeholder=placeholder, id=id, compact=True)
