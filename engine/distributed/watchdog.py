"""Watch: which of the processes it looks at hangs, and where that one stands.

A process hangs when its pulse has not changed for the limit though it has something to do, or when it was stopped.
Time is counted in looks of the watch itself, so that one which was stopped together with all the others (Ctrl-Z, a
laptop that slept) blames nobody. A process held by a debugger is waited for.
"""

import faulthandler
import logging
import os
import re
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread

from tapscope.engine.distributed.heartbeat import Beat, Doing, Pulse

_log = logging.getLogger(__name__)

LOOKS = 8
"""How often a watch looks within the limit."""
LOADING = 10
"""So many limits long a process that loads may show no sign of life."""
_SAY_WHERE = getattr(signal, "SIGRTMIN", signal.SIGUSR1)
_STACK_S = 2.0
_PAUSE_S = 0.05
_DEBUGGERS = ("/pdb.py", "/bdb.py", "/debugpy/", "/pydevd")


@dataclass(slots=True)
class Watched:
    """A process that is watched."""

    pid: int
    pulse: Pulse
    stack: Path
    """Where it writes its stack when asked to; see :func:`tell_stack`."""
    last: Beat | None = None
    num_still: int = 0
    """Looks since its pulse has changed."""
    is_held: bool = False
    """Whether a debugger holds it, as far as was seen."""


class Watch:
    """Looks at processes; each look costs some microseconds."""

    def __init__(self, watched: Mapping[int, Watched], limit_s: float, own: Pulse | None = None) -> None:
        """``own`` is the pulse of the rank that the watched ones share collectives with, which has this watch."""
        self._watched = dict(watched)
        self._limit_s = limit_s
        self._own = own
        self._own_last: Beat | None = None
        self._own_still = 0

    @property
    def interval_s(self) -> float:
        """Time between two looks."""
        return self._limit_s / LOOKS

    def look(self) -> dict[int, str]:
        """What is to be said of each process that hangs, by number; to be called every :attr:`interval_s`."""
        for each in self._watched.values():
            _count(each)
        if self._own is not None:
            beat = self._own.read()
            self._own_still = self._own_still + 1 if beat == self._own_last else 0
            self._own_last = beat
        hung = [number for number, each in self._watched.items() if self._hangs(each)] or self._deadlocked()
        return {number: said for number in hung if (said := self._judge(self._watched[number])) is not None}

    def forget(self, number: int) -> None:
        """It has ended, or was said to hang: it is not looked at any more."""
        self._watched.pop(number, None)

    def _hangs(self, each: Watched) -> bool:
        beat = each.last
        assert beat is not None
        looks = LOOKS * (LOADING if beat.doing is Doing.LOADING else 1)
        if beat.doing in (Doing.WORKING, Doing.LOADING) and each.num_still >= looks:
            return True
        return beat.doing is not Doing.CLOSING and each.num_still >= LOOKS and state_of(each.pid) == "T"

    def _deadlocked(self) -> list[int]:
        """All, when every rank, this one too, waits for the others."""
        if self._own_last is None or self._own_last.doing is not Doing.WAITING or self._own_still < LOOKS:
            return []
        is_stuck = [each.last is not None and each.last.doing is Doing.WAITING for each in self._watched.values()]
        is_stuck += [each.num_still >= LOOKS for each in self._watched.values()]
        return list(self._watched) if all(is_stuck) else []

    def _judge(self, each: Watched) -> str | None:
        """How it hangs; None where a debugger holds it."""
        state, tracer = state_of(each.pid), tracer_of(each.pid)
        stack = "" if tracer else ask_stack(each)
        if tracer or any(name in stack for name in _DEBUGGERS):
            if not each.is_held:
                _log.warning("process %d is held by a debugger (%s); it is waited for", each.pid, each.last)
            each.num_still, each.is_held = 0, True
            return None
        limit = self._limit_s * each.num_still / LOOKS
        why = ", stopped by a signal" if state == "T" else ""
        said = f"hangs: it has not moved for {limit:.3g} s (rank_timeout_s={self._limit_s:g}){why}, {each.last}"
        return f"{said}; its main thread:\n{stack}" if stack else f"{said}; it did not tell its stack"


class WatchThread:
    """A watch with a thread of its own, which sleeps between two looks."""

    def __init__(self, watch: Watch, on_hung: Callable[[int, str], object]) -> None:
        """``on_hung`` is called in the thread, once for each process that hangs."""
        self._watch = watch
        self._on_hung = on_hung
        self._stopped = Event()
        self._thread = Thread(target=self._run, name="tapscope-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread; a look under way is finished first."""
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(self._watch.interval_s):
            for number, said in self._watch.look().items():
                self._watch.forget(number)
                self._on_hung(number, said)


def tell_stack(path: Path) -> None:
    """Have this process write its stack to ``path`` whenever :func:`ask_stack` asks, even while it holds the GIL."""
    file = path.open("ab", buffering=0)  # for as long as the process lives
    faulthandler.register(_SAY_WHERE, file=file, all_threads=True)


def ask_stack(each: Watched) -> str:
    """Where the main thread of a process stands that called :func:`tell_stack`; nothing where it does not answer.

    A stopped process is let go on for it: only for one that is going to be killed.
    """
    before = _size(each.stack)
    if before is None:
        return ""
    try:
        os.kill(each.pid, _SAY_WHERE)
        if state_of(each.pid) == "T":
            os.kill(each.pid, signal.SIGCONT)
    except ProcessLookupError:
        return ""
    deadline, seen = time.monotonic() + _STACK_S, before
    while time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
        size = _size(each.stack) or before
        if before < size == seen:
            break
        seen = size
    with each.stack.open("rb") as file:
        file.seek(before)
        return _main_thread(file.read().decode(errors="replace"))


def stack_in(folder: Path, number: int) -> Path:
    """Where worker ``number`` writes its stack."""
    return folder / f"stack-{number}"


def state_of(pid: int) -> str:
    """One letter, as `ps` has it: T is stopped; nothing where the system does not say, or there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def tracer_of(pid: int) -> int:
    """The process that traces it, such as gdb; 0 where there is none."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith("TracerPid:")), 0)


def _count(each: Watched) -> None:
    beat = each.pulse.read()
    each.num_still = each.num_still + 1 if beat == each.last else 0
    each.last = beat


def _size(path: Path) -> int | None:
    try:
        return path.stat().st_size
    except OSError:
        return None


def _main_thread(stacks: str) -> str:
    """Of faulthandler's text, the main thread: the oldest, which comes last."""
    main = re.split(r"^(?:Current thread|Thread) ", stacks, flags=re.MULTILINE)[-1]
    return "\n".join(line for line in main.splitlines() if line.startswith("  "))
