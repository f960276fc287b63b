"""Input line at the bottom, for filters and prompts."""

from textual.geometry import Size
from textual.reactive import Reactive
from textual.widgets import Input


class LineInput(Input):
    """Single-line input that is as wide as the screen, so that typing does not trigger a layout."""

    virtual_size = Reactive(Size(0, 0))

    def __init__(self, placeholder: str = "", *, id: str) -> None:
        super().__init__(placeholder=placeholder, id=id, compact=True)
