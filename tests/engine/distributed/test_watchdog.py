"""The watchdog distinguishes hung processes from those that load, wait, sleep or are held by a debugger."""

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
import zmq
from fastapi import FastAPI
from hung_worker import hung_worker_main
from jobs import wait_until

from tapscope.core.errors import RankLostError
from tapscope.engine.distributed.heartbeat import Activity, Heartbeat, heartbeat_path
from tapscope.engine.distributed.watchdog import (
    _STACK_SIGNAL,
    CHECKS_PER_LIMIT,
    LOADING_FACTOR,
    Watchdog,
    WatchedProcess,
    process_state,
    request_stack,
    stack_path,
    tracer_pid,
)
from tapscope.engine.distributed.worker_processes import WorkerProcesses
from tapscope.engine.runners.engine_client import EngineClient
from tapscope.engine.server.app_state import AppState
from tapscope.engine.server.http_server import ENGINE_LOST, _serve
from tapscope.engine.server.server_settings import ServerSettings

PROGRAM = """
import ctypes, sys, threading
from pathlib import Path
from tapscope.engine.distributed.watchdog import enable_stack_dumps
enable_stack_dumps(Path(sys.argv[1]))
for _ in range(20):
    threading.Thread(target=threading.Event().wait, daemon=True).start()
def here():
    print("here", flush=True)
    {do}
here()
"""


@pytest.fixture
def heartbeat(tmp_path: Path) -> Heartbeat:
    return Heartbeat.create(heartbeat_path(tmp_path, 1))


class Program:
    """A process that reports when it reaches a known point, and dumps its stack on request."""

    def __init__(self, folder: Path, do: str = "sys.stdin.readline()") -> None:
        self.stack = stack_path(folder, 1)
        command = [sys.executable, "-c", PROGRAM.replace("{do}", do), str(self.stack)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout.readline() == "here\n"

    def watched(self, heartbeat: Heartbeat) -> WatchedProcess:
        return WatchedProcess(self.process.pid, heartbeat, self.stack)

    def stop(self) -> None:
        """Send SIGSTOP and wait until the process is stopped."""
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


def _check_times(watch: Watchdog, count: int) -> dict[int, str]:
    """Check ``count`` times and return the last result; the earlier results must be empty."""
    for _ in range(count - 1):
        assert watch.check() == {}
    return watch.check()


def test_watchdog_reports_a_busy_process_without_progress(heartbeat: Heartbeat, program: Program) -> None:
    watch = Watchdog({1: program.watched(heartbeat)}, 8.0)
    heartbeat.start_step(3)
    for layer in range(5):  # slow progress
        heartbeat.start_layer(layer)
        assert _check_times(watch, CHECKS_PER_LIMIT) == {}
    report = watch.check()[1]
    assert report.startswith("hangs: no progress for 8 s (rank_timeout_s=8), in step 3, layer 4; its main thread:\n")
    assert report.count(", line ") == 2
    assert " in here" in report


@pytest.mark.parametrize("activity", [Activity.STARTING, Activity.IDLE, Activity.WAITING, Activity.CLOSING])
def test_watchdog_ignores_idle_and_waiting_processes_unless_stopped(
    heartbeat: Heartbeat, program: Program, activity: Activity
) -> None:
    heartbeat.set_activity(activity)
    watch = Watchdog({1: program.watched(heartbeat)}, 8.0)
    assert _check_times(watch, 3 * CHECKS_PER_LIMIT) == {}
    program.stop()
    found = watch.check()
    assert ("stopped by a signal" in found.get(1, "")) == (activity is not Activity.CLOSING)
    assert (" in here" in found.get(1, "")) == (activity is not Activity.CLOSING)


def test_watchdog_allows_ten_time_limits_for_loading(heartbeat: Heartbeat, program: Program) -> None:
    heartbeat.set_activity(Activity.LOADING)
    watch = Watchdog({1: program.watched(heartbeat)}, 8.0)
    assert "for 80 s (rank_timeout_s=8), while loading" in _check_times(watch, LOADING_FACTOR * CHECKS_PER_LIMIT + 1)[1]


def test_watchdog_detects_a_deadlock_of_all_ranks(tmp_path: Path, heartbeat: Heartbeat, program: Program) -> None:
    own = Heartbeat()
    watch = Watchdog({1: program.watched(heartbeat)}, 8.0, own)
    heartbeat.start_step(0)
    heartbeat.set_activity(Activity.WAITING)
    own.set_activity(Activity.WORKING)  # this rank keeps the other waiting, for any time; no other rank hangs
    assert _check_times(watch, 3 * CHECKS_PER_LIMIT) == {}
    own.set_activity(Activity.WAITING)
    assert "in step 0, in a collective" in _check_times(watch, CHECKS_PER_LIMIT + 1)[1]


HELD = {
    "by pdb": "import pdb; pdb.Pdb().set_trace()\n    str()",
    "by a tracer": "ctypes.CDLL(None).ptrace(0, 0, 0, 0)\n    str(sys.stdin.readline())",  # PTRACE_TRACEME
}


@pytest.mark.parametrize("how", HELD)
def test_watchdog_waits_for_a_debugged_process(
    tmp_path: Path, heartbeat: Heartbeat, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    program = Program(tmp_path, HELD[how])
    try:
        if how == "by a tracer":
            wait_until(lambda: tracer_pid(program.process.pid) == os.getpid(), "the program is traced")
            program.stop()
            assert (process_state(program.process.pid), tracer_pid(program.process.pid)) == ("t", os.getpid())
        else:
            output = ""
            while not output.endswith("(Pdb)"):
                output += program.process.stdout.read(1)
        heartbeat.start_step(0)
        watch = Watchdog({1: program.watched(heartbeat)}, 8.0)
        assert _check_times(watch, 3 * CHECKS_PER_LIMIT) == {}
        assert caplog.text.count("is held by a debugger") == 1
    finally:
        program.end()


def test_stack_of_a_stopped_process_is_that_of_its_main_thread_only(heartbeat: Heartbeat, program: Program) -> None:
    """A stopped process may take the signal in any thread, and walking the stacks of running threads can crash it."""
    for _ in range(5):
        program.stop()
        assert " in here" in request_stack(program.watched(heartbeat))
    assert program.stack.read_text().count("most recent call first") == 5
    assert "threading.py" not in program.stack.read_text()


WRITES_IN_TWO_PARTS = """
import signal, sys, time
from tapscope.engine.distributed import watchdog

def dump(*_):
    with open(sys.argv[1], "ab", buffering=0) as file:
        file.write(b'Stack (most recent call first):\\n  File "m.py", line 2 in slow\\n')
        time.sleep(0.4)
        file.write(b'  File "m.py", line 9 in <module>\\n')

signal.signal(watchdog._STACK_SIGNAL, dump)
open(sys.argv[1], "wb").close()
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_watchdog_reads_a_stack_that_is_written_slowly(tmp_path: Path, heartbeat: Heartbeat) -> None:
    path = stack_path(tmp_path, 0)
    command = [sys.executable, "-c", WRITES_IN_TWO_PARTS, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            found = request_stack(WatchedProcess(process.pid, heartbeat, path))
        finally:
            process.kill()
    assert found == '  File "m.py", line 2 in slow\n  File "m.py", line 9 in <module>'


class Workers(WorkerProcesses):
    def raise_lost(self, error: RankLostError | None) -> NoReturn:
        raise RankLostError(self._describe_end(1))


def test_worker_that_ends_while_it_is_diagnosed_is_reported_as_hung() -> None:
    workers = Workers()
    try:
        workers.start(hung_worker_main, (workers.folder,), 1, "worker")
        workers.watch(0.5)

        def has_ended() -> bool:
            workers.check()
            return False

        with pytest.raises(RankLostError, match=r"^hangs: .*; its stack could not be read$"):
            wait_until(has_ended, "the worker ends")
    finally:
        workers.close()


def test_engine_that_ends_while_it_is_diagnosed_is_reported_as_hung(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder := tmp_path / "shared").mkdir()
    Heartbeat.create(heartbeat_path(folder, 0)).set_activity(Activity.WORKING)
    channel, theirs = socket.socketpair()
    dies = (
        f"import signal; signal.signal({int(_STACK_SIGNAL)}, lambda *_: exit(3)); print(1, flush=True); signal.pause()"
    )
    command = [sys.executable, "-c", dies]
    engine = subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=[theirs.fileno()])  # inherits the channel
    theirs.close()
    assert engine.stdout is not None
    assert engine.stdout.readline() == b"1\n"
    stack_path(folder, 0).touch()
    state = AppState("model", ServerSettings())

    async def serve() -> int:
        state.client = EngineClient(context, [f"ipc://{tmp_path}/engine"], None)
        with channel, socket.create_server(("127.0.0.1", 0)) as listener:
            watched = {"pid": engine.pid, "folder": str(folder), "limit_s": 0.5}
            return await _serve(FastAPI(), listener, channel, state, watched)

    try:
        with zmq.Context() as context:
            code = asyncio.run(serve())
            state.client.close()
    finally:
        engine.kill()
        engine.communicate()
    assert (code, engine.returncode) == (ENGINE_LOST, 3)
    assert f"process {engine.pid} hangs: no progress for" in str(state.client.failure)
    output = capsys.readouterr().err
    assert 0 < output.index(" hangs: ") < output.index("the engine's process has ended; the server exits")
