"""ForkGuard: warn in a child process, forked while a dumper is open, that nothing is recorded there."""

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
    """State shared by a recording and child processes forked while the recording is open."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 1)  # anonymous memory, shared by parent and child
        self._is_over = False

    @property
    def was_called(self) -> bool:
        """Whether a child called an attached model or dumped a value."""
        return self._shared[0] > 0

    def warn(self) -> None:
        """In the child: log once that values are not recorded, and set :attr:`was_called` for the parent."""
        if not self._is_over:
            self._is_over = True
            self._shared[0] = 1
            _log.warning(_SENTENCE)

    def mute(self) -> None:
        """In the child: disable the warning, because the child records its own run."""
        self._is_over = True

    def around(self, call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """In the child: wrap a call of a model with the warning."""
        self.warn()
        return call(*args, **kwargs)
