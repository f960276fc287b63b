"""Processes: liveness checks, and the recorders that this process started."""

import atexit
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

_started: "list[subprocess.Popen[bytes]]" = []


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
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


def track_child(process: "subprocess.Popen[bytes]") -> None:
    """Keep a reference to a started recorder, and reap those that have ended."""
    _started[:] = [each for each in _started if each.poll() is None] + [process]


def exit_reason(pid: int, log: Path) -> str:
    """How a recorder ended, as far as known, with the last line of its ``log``: a phrase that follows its name."""
    code = next((each.poll() for each in _started if each.pid == pid), None)
    if code is None:
        how = "died"
    elif code < 0:
        name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
        how = f"was killed by {name}" + (" (manually, or out of memory)" if name == "SIGKILL" else "")
    else:
        how = f"ended with exit code {code}"
    try:
        log_lines = log.read_text(errors="replace").strip().splitlines()
    except OSError:
        log_lines = []
    return how + (f": {log_lines[-1]} (see {log})" if log_lines else "")


@atexit.register
def _let_go() -> None:
    """A recorder may outlive this process while it waits for other ranks; Popen would report a leak."""
    for process in _started:
        if process.poll() is None:
            process.returncode = 0
