"""The watch over processes: which one hangs, and which only loads, waits, sleeps, or is held by a debugger."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from jobs import wait_until

from tapscope.engine.distributed.heartbeat import Doing, Pulse, pulse_in
from tapscope.engine.distributed.watchdog import LOADING, LOOKS, Watch, Watched, stack_in, state_of, tracer_of

PROGRAM = """
import ctypes, sys, threading
from pathlib import Path
from tapscope.engine.distributed.watchdog import tell_stack
tell_stack(Path(sys.argv[1]))
threading.Thread(target=threading.Event().wait, daemon=True).start()
def here():
    print("here", flush=True)
    {do}
here()
"""


@pytest.fixture
def pulse(tmp_path: Path) -> Pulse:
    return Pulse.create(pulse_in(tmp_path, 1))


class Program:
    """A process that tells its stack, at a point that it reports."""

    def __init__(self, folder: Path, do: str = "sys.stdin.readline()") -> None:
        self.stack = stack_in(folder, 1)
        command = [sys.executable, "-c", PROGRAM.replace("{do}", do), str(self.stack)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "here\n"

    def watched(self, pulse: Pulse) -> Watched:
        return Watched(self.process.pid, pulse, self.stack)

    def stop(self) -> None:
        """Until it is stopped."""
        os.kill(self.process.pid, signal.SIGSTOP)
        os.waitpid(self.process.pid, os.WUNTRACED)

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    program = Program(tmp_path)
    try:
        yield program
    finally:
        program.end()


def _looks(watch: Watch, count: int) -> dict[int, str]:
    """What so many looks find, all but the last of which find nothing."""
    for _ in range(count - 1):
        assert watch.look() == {}
    return watch.look()


def test_who_has_work_and_does_not_move_hangs_and_says_where(pulse: Pulse, program: Program) -> None:
    watch = Watch({1: program.watched(pulse)}, 8.0)
    pulse.step(3)
    for layer in range(5):  # it gets on, slowly
        pulse.layer(layer)
        assert _looks(watch, LOOKS) == {}
    said = watch.look()[1]
    assert said.startswith("hangs: it has not moved for 8 s (rank_timeout_s=8), in step 3, layer 4; its main thread:\n")
    assert said.count(", line ") == 2
    assert " in here" in said


@pytest.mark.parametrize("doing", [Doing.STARTING, Doing.ASLEEP, Doing.WAITING, Doing.CLOSING])
def test_who_sleeps_or_waits_for_others_does_not_hang_unless_it_was_stopped(
    pulse: Pulse, program: Program, doing: Doing
) -> None:
    pulse.now(doing)
    watch = Watch({1: program.watched(pulse)}, 8.0)
    assert _looks(watch, 3 * LOOKS) == {}
    program.stop()
    found = watch.look()
    assert ("stopped by a signal" in found.get(1, "")) == (doing is not Doing.CLOSING)
    assert (" in here" in found.get(1, "")) == (doing is not Doing.CLOSING)


def test_who_loads_has_ten_times_as_long(pulse: Pulse, program: Program) -> None:
    pulse.now(Doing.LOADING)
    watch = Watch({1: program.watched(pulse)}, 8.0)
    assert "for 80 s (rank_timeout_s=8), while loading" in _looks(watch, LOADING * LOOKS + 1)[1]


def test_ranks_that_all_wait_for_each_other_hang(tmp_path: Path, pulse: Pulse, program: Program) -> None:
    own = Pulse()
    watch = Watch({1: program.watched(pulse)}, 8.0, own)
    pulse.step(0)
    pulse.now(Doing.WAITING)
    own.now(Doing.WORKING)  # this rank keeps the other waiting: as long as it likes, nobody else hangs
    assert _looks(watch, 3 * LOOKS) == {}
    own.now(Doing.WAITING)
    assert "in step 0, in a collective" in _looks(watch, LOOKS + 1)[1]


HELD = {
    "by pdb": "import pdb; pdb.Pdb().set_trace()\n    str()",
    "by a tracer": "ctypes.CDLL(None).ptrace(0, 0, 0, 0)\n    str(sys.stdin.readline())",  # PTRACE_TRACEME
}


@pytest.mark.parametrize("how", HELD)
def test_who_is_held_by_a_debugger_is_waited_for(
    tmp_path: Path, pulse: Pulse, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    program = Program(tmp_path, HELD[how])
    try:
        if how == "by a tracer":
            wait_until(lambda: tracer_of(program.process.pid) == os.getpid(), "the program is traced")
            program.stop()
            assert (state_of(program.process.pid), tracer_of(program.process.pid)) == ("t", os.getpid())
        else:
            said = ""
            while not said.endswith("(Pdb)"):
                said += program.process.stdout.read(1)
        pulse.step(0)
        watch = Watch({1: program.watched(pulse)}, 8.0)
        assert _looks(watch, 3 * LOOKS) == {}
        assert caplog.text.count("is held by a debugger") == 1
    finally:
        program.end()
