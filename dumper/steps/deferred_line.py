"""DeferredLine: a journal line that depends on token rows still being copied from a device."""

from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from tapscope.core.observe import StepInfo
from tapscope.run_format.ledger import encode_line


class PendingRows(Protocol):
    """The token rows of a step, being copied from a device."""

    outline: StepInfo
    """What is known of the step before the rows arrive."""

    @property
    def is_ready(self) -> bool:
        """Whether :attr:`info` is complete."""
        ...

    @property
    def info(self) -> StepInfo:
        """The step with its rows."""
        ...


class DeferredLine:
    """``bytes()`` of it is the line, once it is ready."""

    __slots__ = ("_compose", "_rows")

    def __init__(self, rows: PendingRows, compose: Callable[[StepInfo], dict[str, Any]]) -> None:
        self._rows = rows
        self._compose = compose

    @property
    def is_ready(self) -> bool:
        """Whether it can be sent."""
        return self._rows.is_ready

    def __len__(self) -> int:
        """Approximate length, for memory limits."""
        return 64 + 8 * int(np.prod(self._rows.outline.grid))

    def __bytes__(self) -> bytes:
        return encode_line(self._compose(self._rows.info))
