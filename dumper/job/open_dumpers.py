"""Lifetime: dumpers that are open when the process ends or forks."""

import atexit
import os
import sys
from typing import Protocol

from tapscope.dumper.job import processes


class OpenDumper(Protocol):
    """A dumper, as far as the process concerns it."""

    def _close(self, interrupted: str | None = None) -> str | None:
        """What was recorded is sent; ``interrupted`` names the exception that ends the process."""
        ...

    def _abandon(self) -> None:
        """This is a forked child: the recording is the parent's."""
        ...


_open: dict[int, OpenDumper] = {}


def opened(dumper: OpenDumper) -> None:
    """It is to be closed when the process ends, and forgotten by a forked child."""
    _open[id(dumper)] = dumper


def closed(dumper: OpenDumper) -> None:
    """It closed by itself."""
    _open.pop(id(dumper), None)


def is_recording() -> bool:
    """Whether any dumper is open."""
    return bool(_open)


assert processes  # imported first, so that at exit it lets go of recorders after all dumpers have closed


@atexit.register
def _close_all() -> None:
    """What was recorded is sent; an uncaught exception is told to the run."""
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_type", None)
    for dumper in list(_open.values()):
        dumper._close(None if error is None else error.__name__)


def _forget_all() -> None:
    """The recording is the parent's: here it has no thread and no socket, and nothing is recorded."""
    for dumper in list(_open.values()):
        dumper._abandon()
    _open.clear()


os.register_at_fork(after_in_child=_forget_all)
