"""Processes: check liveness, and track the recorders that this process started."""

import atexit
import os
import signal
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import subprocess

_started: "list[subprocess.Popen[bytes]]" = []


def is_alive(pid: int) -> bool:
    """Return whether the process runs; False for a zombie."""
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
    """Track a started recorder, and reap recorders that have exited."""
    _started[:] = [each for each in _started if each.poll() is None] + [process]


def exit_reason(pid: int, log: Path) -> str:
    """Describe how a recorder exited, as a predicate ("was killed by SIGKILL"), with the last line of its ``log``."""
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
def _suppress_leak_warnings() -> None:
    """Suppress Popen's leak warning for recorders that outlive this process while they wait for other ranks."""
    for process in _started:
        if process.poll() is None:
            process.returncode = 0
