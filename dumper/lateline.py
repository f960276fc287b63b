"""LateLine: a line of the journal that depends on rows which are on their way from a device."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tapscope.ledger import encode_line
from tapscope.observe import StepInfo

if TYPE_CHECKING:
    from tapscope.dumper.laterows import LateRows


class LateLine:
    """``bytes()`` of it is the line, once it is here."""

    __slots__ = ("_compose", "_rows")

    def __init__(self, rows: "LateRows", compose: Callable[[StepInfo], dict[str, Any]]) -> None:
        self._rows = rows
        self._compose = compose

    @property
    def is_here(self) -> bool:
        """Whether it can be sent."""
        return self._rows.is_here

    def __len__(self) -> int:
        """Roughly, for whoever counts what it holds."""
        return 64 + 8 * int(np.prod(self._rows.outline.grid))

    def __bytes__(self) -> bytes:
        return encode_line(self._compose(self._rows.info))
