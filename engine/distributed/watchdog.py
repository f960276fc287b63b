"""Watchdog: detects processes that hang and reports where they hang.

A process hangs if it has work but its heartbeat has not changed within the time limit, or if it was stopped by a
signal. Time is counted in the watchdog's own checks, so if everything is suspended together (Ctrl-Z, a sleeping
laptop), no process counts as hung. Neither does a process held by a debugger.
"""

import ctypes
import faulthandler
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Lock, Thread

from tapscope.engine.distributed.heartbeat import Activity, Heartbeat, HeartbeatSample

_log = logging.getLogger(__name__)

CHECKS_PER_LIMIT = 8
"""Number of checks within the time limit."""
LOADING_FACTOR = 10
"""Multiple of the time limit that applies to a loading process."""
_STACK_SIGNAL = getattr(signal, "SIGRTMIN", signal.SIGUSR1)
_STACK_S = 2.0
_ENDS = "in <module>", "in _run_module_as_main", "\n  ..."  # outermost frame, or faulthandler's truncation mark
_PAUSE_S = 0.05
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/debugpy/", "/pydevd")


@dataclass(slots=True)
class WatchedProcess:
    """A watched process and its last heartbeat."""

    pid: int
    heartbeat: Heartbeat
    stack: Path
    """File to which the process writes its stack on request, see :func:`enable_stack_dumps`."""
    last: HeartbeatSample | None = None
    num_unchanged: int = 0
    """Number of checks since the heartbeat last changed."""
    is_being_debugged: bool = False
    """Whether a debugger held the process at the last diagnosis."""


class Watchdog:
    """Checks a set of processes; one check takes microseconds."""

    def __init__(self, watched: Mapping[int, WatchedProcess], limit_s: float, own: Heartbeat | None = None) -> None:
        """``own``: heartbeat of this process, if it takes part in collectives with the watched processes."""
        self._watched = dict(watched)
        self._limit_s = limit_s
        self._own = own
        self._own_last: HeartbeatSample | None = None
        self._own_unchanged = 0

    @property
    def interval_s(self) -> float:
        """Time between two checks."""
        return self._limit_s / CHECKS_PER_LIMIT

    def check(self) -> dict[int, str]:
        """Return number -> diagnosis of the processes that hang. Call every :attr:`interval_s`."""
        for each in self._watched.values():
            _count(each)
        if self._own is not None:
            sample = self._own.read()
            self._own_unchanged = self._own_unchanged + 1 if sample == self._own_last else 0
            self._own_last = sample
        hung = [number for number, each in self._watched.items() if self._hangs(each)] or self._deadlocked()
        return {number: text for number in hung if (text := self._diagnose(self._watched[number])) is not None}

    def forget(self, number: int) -> None:
        """Stop watching a process that has ended or was reported as hung."""
        self._watched.pop(number, None)

    def _hangs(self, each: WatchedProcess) -> bool:
        sample = each.last
        assert sample is not None
        limit = CHECKS_PER_LIMIT * (LOADING_FACTOR if sample.activity is Activity.LOADING else 1)
        if sample.activity in (Activity.WORKING, Activity.LOADING) and each.num_unchanged >= limit:
            return True
        return (
            sample.activity is not Activity.CLOSING
            and each.num_unchanged >= CHECKS_PER_LIMIT
            and process_state(each.pid) == "T"
        )

    def _deadlocked(self) -> list[int]:
        """Return all processes if every rank, including this one, waits for the others; else an empty list."""
        if (
            self._own_last is None
            or self._own_last.activity is not Activity.WAITING
            or self._own_unchanged < CHECKS_PER_LIMIT
        ):
            return []
        is_stuck = [each.last is not None and each.last.activity is Activity.WAITING for each in self._watched.values()]
        is_stuck += [each.num_unchanged >= CHECKS_PER_LIMIT for each in self._watched.values()]
        return list(self._watched) if all(is_stuck) else []

    def _diagnose(self, each: WatchedProcess) -> str | None:
        """Return why and where a process hangs; None if a debugger holds it."""
        state, tracer = process_state(each.pid), tracer_pid(each.pid)
        stack = "" if tracer else request_stack(each)
        if tracer or any(name in stack for name in _DEBUGGERS):
            if not each.is_being_debugged:
                _log.warning("process %d is held by a debugger (%s); waiting for it", each.pid, each.last)
            each.num_unchanged, each.is_being_debugged = 0, True
            return None
        limit = self._limit_s * each.num_unchanged / CHECKS_PER_LIMIT
        why = ", stopped by a signal" if state == "T" else ""
        text = f"hangs: no progress for {limit:.3g} s (rank_timeout_s={self._limit_s:g}){why}, {each.last}"
        return f"{text}; its main thread:\n{stack}" if stack else f"{text}; its stack could not be read"


class WatchdogThread:
    """Runs a watchdog in its own thread, which sleeps between checks."""

    def __init__(self, watch: Watchdog, on_hung: Callable[[int, str], object]) -> None:
        """``on_hung``: called in the thread with number and diagnosis, once for each process that hangs."""
        self._watch = watch
        self._on_hung = on_hung
        self._stopped = Event()
        self._checking = Lock()
        self._thread = Thread(target=self._run, name="tapscope-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread after the current check."""
        self._stopped.set()
        self._thread.join()

    def finish_check(self) -> None:
        """Wait, for seconds at most, until a check in progress has reported its hung processes to ``on_hung``.

        Call before reporting the end of a watched process: if the watchdog killed it, the diagnosis is the reason.
        """
        with self._checking:
            pass

    def _run(self) -> None:
        while not self._stopped.wait(self._watch.interval_s):
            with self._checking:
                for number, diagnosis in self._watch.check().items():
                    self._watch.forget(number)
                    self._on_hung(number, diagnosis)


def enable_stack_dumps(path: Path) -> None:
    """Let this process write its main thread's stack to ``path`` on :func:`request_stack`, even with the GIL held."""
    file = path.open("ab", buffering=0)  # stays open for the lifetime of the process
    # Only the main thread: reading the stack of another thread that runs Python can crash the process.
    faulthandler.register(_STACK_SIGNAL, file=file, all_threads=False)


def request_stack(each: WatchedProcess) -> str:
    """Return the main thread's stack of a process that called :func:`enable_stack_dumps`; empty if it does not respond.

    A stopped process is resumed for this, so call it only for a process that is about to be killed.
    """
    text, deadline = "", time.monotonic() + _STACK_S
    try:
        with each.stack.open("rb") as file:
            file.seek(0, os.SEEK_END)
            _signal_main_thread(each.pid, _STACK_SIGNAL)
            if process_state(each.pid) == "T":
                os.kill(each.pid, signal.SIGCONT)
            while time.monotonic() < deadline and not text.rstrip().endswith(_ENDS):
                time.sleep(_PAUSE_S)
                text += file.read().decode(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
    return "\n".join(line for line in text.splitlines() if line.startswith("  "))


def _signal_main_thread(pid: int, number: int) -> None:
    """Send a signal to the main thread. Raises ProcessLookupError.

    ``os.kill`` is not enough: in a stopped process, any thread may receive the signal.
    """
    if (tgkill := getattr(ctypes.CDLL(None), "tgkill", None)) is None:  # glibc before 2.30, macOS
        os.kill(pid, number)
    elif tgkill(pid, pid, number) != 0:
        raise ProcessLookupError(pid)


def stack_path(folder: Path, number: int) -> Path:
    """Return the path of the stack dump of worker ``number``."""
    return folder / f"stack-{number}"


def process_state(pid: int) -> str:
    """Return the state letter of a process as shown by `ps`, T if stopped; empty if the system does not report it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def tracer_pid(pid: int) -> int:
    """Return the id of the process that traces ``pid``, for example gdb; 0 if none."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("TracerPid:")), 0)


def _count(each: WatchedProcess) -> None:
    sample = each.heartbeat.read()
    each.num_unchanged = each.num_unchanged + 1 if sample == each.last else 0
    each.last = sample
