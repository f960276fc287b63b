"""Journal lines that are made where they are sent: their token rows are still being copied from a device, or making
them would take the model's time."""

import math
import time
from collections.abc import Callable
from typing import Protocol

from tapscope.core.observe import StepInfo

_PATIENCE_S = 60.0


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


class LateInfo:
    """The rows of a step whose host learns its tokens later."""

    def __init__(self, outline: StepInfo) -> None:
        self.outline = outline
        """What is known of the step before :meth:`complete`."""
        self._info: StepInfo | None = None
        self._deadline = time.monotonic() + _PATIENCE_S

    def complete(self, info: StepInfo) -> None:
        """Set the rows; from any thread."""
        self._info = self._info or info

    def give_up(self) -> None:
        """The rows are not coming: the outline has to do."""
        self.complete(self.outline)

    @property
    def is_ready(self) -> bool:
        """Whether :attr:`info` is complete, or too late."""
        return self._info is not None or time.monotonic() > self._deadline

    @property
    def info(self) -> StepInfo:
        """The step with its rows, or its outline."""
        return self._info or self.outline


class DeferredLine:
    """One line or several: ``bytes()`` of it, once it is ready."""

    __slots__ = ("_compose", "_info", "_rows")

    def __init__(
        self,
        info: StepInfo,
        rows: PendingRows | None,
        compose: Callable[[StepInfo], bytes],
    ) -> None:
        """``compose`` gets the step: ``info``, or with its ``rows`` once they have arrived."""
        self._info, self._rows, self._compose = info, rows, compose

    @property
    def is_ready(self) -> bool:
        """Whether it can be sent."""
        return self._rows is None or self._rows.is_ready

    def __len__(self) -> int:
        """Approximate length, for memory limits."""
        return 64 + 8 * math.prod(self._info.grid)

    def __bytes__(self) -> bytes:
        return self._compose(self._info if self._rows is None else self._rows.info)
