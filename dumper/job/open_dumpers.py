"""Open dumpers: closed when the process ends, abandoned when it forks; and dumpers that nobody opened."""

import atexit
import logging
import os
import sys
from typing import Protocol

from zmq.utils import garbage

from tapscope.dumper.job import processes


class OpenDumper(Protocol):
    """A dumper, as seen by the process's exit and fork handlers."""

    def _close(self, interrupted: str | None = None) -> str | None:
        """Send what was recorded; ``interrupted`` names the exception that ends the process."""
        ...

    def _abandon(self) -> None:
        """This is a forked child: the recording belongs to the parent."""
        ...


_log = logging.getLogger("tapscope")
_open: dict[int, OpenDumper] = {}
_unused: set[object] = set()


def note_created(token: object) -> None:
    """Remember a new dumper by ``token``; if it is never opened, a warning says so when the process ends."""
    _unused.add(token)


def note_opened(token: object) -> None:
    """The dumper was opened, or a warning has said that it is not."""
    _unused.discard(token)


def opened(dumper: OpenDumper) -> None:
    """Close the dumper when the process ends, and abandon it in a forked child."""
    _open[id(dumper)] = dumper


def closed(dumper: OpenDumper) -> None:
    """The dumper was closed."""
    _open.pop(id(dumper), None)


def is_recording() -> bool:
    """Whether any dumper is open."""
    return bool(_open)


assert garbage  # both are imported first, so that their exit handlers run after all dumpers have sent what they hold
assert processes


@atexit.register
def _close_all() -> None:
    """Send what was recorded, with the name of an uncaught exception."""
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_type", None)
    for dumper in list(_open.values()):
        dumper._close(None if error is None else error.__name__)
    if _unused and error is None:
        _log.warning("tapscope: a Dumper was never opened and recorded nothing; use it in `with`, or call open()")


def _forget_all() -> None:
    """The recording belongs to the parent: the child has no thread and no socket of it."""
    for dumper in list(_open.values()):
        dumper._abandon()
    _open.clear()
    _unused.clear()


os.register_at_fork(after_in_child=_forget_all)
