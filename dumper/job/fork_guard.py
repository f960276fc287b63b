"""ForkGuard: warns in a child process, forked while a dumper is open, that nothing is recorded there."""

import logging
import mmap
from collections.abc import Callable
from typing import Any

_log = logging.getLogger("tapscope")
_SENTENCE = (
    "tapscope: nothing is recorded in this process, which was forked from one that records; "
    "open a Dumper here, or start the process with spawn and open one there"
)


class ForkGuard:
    """State shared by a recording and the children that are forked while it is open."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 1)  # anonymous memory, shared by parent and child
        self._is_over = False

    @property
    def was_called(self) -> bool:
        """Whether an attached model was called, or a value dumped, in a child."""
        return self._shared[0] > 0

    def warn(self) -> None:
        """In the child: a value came that is not recorded. Warns once, and tells the parent."""
        if not self._is_over:
            self._is_over = True
            self._shared[0] = 1
            _log.warning(_SENTENCE)

    def mute(self) -> None:
        """In the child: it records now, so stop warning."""
        self._is_over = True

    def around(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Wraps the calls of a model in the child."""
        self.warn()
        return call(*args, **kwargs)
