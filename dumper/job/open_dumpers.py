"""Open dumpers: close them when the process exits, and abandon them in a forked child.

Also warns of dumpers that were created but never opened.
"""

import atexit
import logging
import os
import sys
from typing import Protocol

from zmq.utils import garbage

from tapscope.dumper.job import processes


class OpenDumper(Protocol):
    """Interface of a dumper for the exit and fork handlers."""

    def _close(self, interrupted: str | None = None) -> str | None:
        """Send the remaining records and close; ``interrupted`` names the exception that ends the process."""
        ...

    def _abandon(self) -> None:
        """Release the recording in a forked child without closing it, because it belongs to the parent."""
        ...


_log = logging.getLogger("tapscope")
_open: dict[int, OpenDumper] = {}
_unused: set[object] = set()


def note_created(token: object) -> None:
    """Register a new dumper by ``token``; if it is never opened, a warning is logged when the process exits."""
    _unused.add(token)


def note_opened(token: object) -> None:
    """Unregister a dumper that was opened, or for which a warning was already logged."""
    _unused.discard(token)


def opened(dumper: OpenDumper) -> None:
    """Register an open dumper: it is closed when the process exits, and abandoned in a forked child."""
    _open[id(dumper)] = dumper


def closed(dumper: OpenDumper) -> None:
    """Unregister a closed dumper."""
    _open.pop(id(dumper), None)


def is_recording() -> bool:
    """Return whether any dumper is open."""
    return bool(_open)


assert garbage  # both modules are imported first, so that their exit handlers run after all dumpers are closed
assert processes


@atexit.register
def _close_all() -> None:
    """Close all dumpers at exit, with the name of an uncaught exception, and warn of a dumper that was never opened."""
    error = None if hasattr(sys, "ps1") else getattr(sys, "last_type", None)
    for dumper in list(_open.values()):
        dumper._close(None if error is None else error.__name__)
    if _unused and error is None:
        _log.warning("tapscope: a Dumper was never opened and recorded nothing; use it in `with`, or call open()")


def _forget_all() -> None:
    """Abandon all dumpers in a forked child: their threads and sockets exist only in the parent."""
    for dumper in list(_open.values()):
        dumper._abandon()
    _open.clear()
    _unused.clear()


os.register_at_fork(after_in_child=_forget_all)
