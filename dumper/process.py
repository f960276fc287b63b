"""Processes: is one alive, and the recorders that this process started."""

import atexit
import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

_started: "list[subprocess.Popen[bytes]]" = []


def is_alive(pid: int) -> bool:
    """Whether the process runs; one that was killed and not yet reaped does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return True
    return state != "Z"


def remember(process: "subprocess.Popen[bytes]") -> None:
    """Keep a recorder that outlives its starter's interest, and reap those that have ended."""
    _started[:] = [each for each in _started if each.poll() is None] + [process]


@atexit.register
def _let_go() -> None:
    """A recorder may outlive us (it waits for other ranks); Popen would call that a leak."""
    for process in _started:
        if process.poll() is None:
            process.returncode = 0
