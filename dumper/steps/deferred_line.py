"""Journal lines that are formatted only when they are sent.

Their token rows may still be in transit from a device, and formatting in the forward's thread would slow down the
model.
"""

import math
import time
from collections.abc import Callable
from typing import Protocol

from tapscope.core.observe import StepInfo

_PATIENCE_S = 60.0


class PendingRows(Protocol):
    """Token rows of a step that are not known yet, such as rows being copied from a device."""

    outline: StepInfo
    """The step as known before the rows arrive."""

    @property
    def is_ready(self) -> bool:
        """Whether :attr:`info` is final."""
        ...

    @property
    def info(self) -> StepInfo:
        """The step with its rows."""
        ...


class LateInfo:
    """Rows of a step that the host provides after opening the step; implements :class:`PendingRows`."""

    def __init__(self, outline: StepInfo) -> None:
        self.outline = outline
        """The step as known before :meth:`complete`."""
        self._info: StepInfo | None = None
        self._deadline = time.monotonic() + _PATIENCE_S

    def complete(self, info: StepInfo) -> None:
        """Set the complete step; the first call wins. Thread-safe."""
        self._info = self._info or info

    def give_up(self) -> None:
        """Use the outline, because the host will not provide the rows."""
        self.complete(self.outline)

    @property
    def is_ready(self) -> bool:
        """Whether :attr:`info` is final: the step is complete, or the host did not provide it in time."""
        return self._info is not None or time.monotonic() > self._deadline

    @property
    def info(self) -> StepInfo:
        """The complete step, or the outline if it was not provided."""
        return self._info or self.outline


class DeferredLine:
    """One or more journal lines; ``bytes(line)`` formats them once :attr:`is_ready`."""

    __slots__ = ("_compose", "_info", "_rows")

    def __init__(
        self,
        info: StepInfo,
        rows: PendingRows | None,
        compose: Callable[[StepInfo], bytes],
    ) -> None:
        """``compose(step)`` formats the lines; ``step`` is ``info``, or ``rows.info`` if ``rows`` is given."""
        self._info, self._rows, self._compose = info, rows, compose

    @property
    def is_ready(self) -> bool:
        """Whether the lines can be formatted and sent."""
        return self._rows is None or self._rows.is_ready

    def __len__(self) -> int:
        """Return the approximate length in bytes, for memory limits."""
        return 64 + 8 * math.prod(self._info.grid)

    def __bytes__(self) -> bytes:
        return self._compose(self._info if self._rows is None else self._rows.info)
