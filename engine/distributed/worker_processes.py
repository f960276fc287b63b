"""WorkerProcesses: spawned worker processes and their ZMQ messages.

Sockets and other shared files are in a dedicated directory with mode 0700, so two engines never mix.
"""

import multiprocessing
import os
import pickle
import shutil
import signal
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NoReturn

import zmq

from tapscope.core.errors import RankLostError, UsageError
from tapscope.core.tempdirs import make_tempdir, remove_tempdir
from tapscope.core.wire import Message, decode, encode
from tapscope.engine.distributed.heartbeat import Heartbeat, heartbeat_path
from tapscope.engine.distributed.openmp_threads import children_sleep_when_idle
from tapscope.engine.distributed.watchdog import Watchdog, WatchdogThread, WatchedProcess, stack_path

SPAWN_CONTEXT = multiprocessing.get_context("spawn")
"""Start method of workers; fork is incompatible with CUDA and threads."""
POLL_MS = 100
FINAL_MESSAGE_S = 1.0  # maximum time for the last message of a dying worker to arrive
_CLOSE_S = 10.0  # maximum time for a worker to close its observer
_ABANDONED_S = 2.0  # the same, for an abandoned worker, which may hang
_MAIN_GUARD_HINT = '; a script that creates an LLM with tp or dp > 1 must do so under `if __name__ == "__main__":`'


class WorkerProcesses:
    """Worker processes numbered from 1; number 0 is this process."""

    are_daemons = True
    """Whether workers are daemon processes, which do not outlive this process and cannot have workers of their own."""

    def __init__(self) -> None:
        """Raises UsageError if the socket cannot be created."""
        self.folder = make_tempdir()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        try:
            self._bind()
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            remove_tempdir(self.folder)
            raise UsageError(
                f"cannot create a socket in {self.folder}: {error}; set TMPDIR to a shorter path"
            ) from None
        self._received: set[tuple[int, str]] = set()
        self._failures: dict[int, Message] = {}
        self._processes: dict[int, BaseProcess] = {}
        self._abandoned = self._dismissed = False
        self._hung: dict[int, str] = {}
        self._watch: WatchdogThread | None = None

    def _bind(self) -> None:
        self._socket.bind(worker_address(self.folder))

    def start(self, main: Callable[..., None], arguments: tuple[Any, ...], count: int, what: str) -> None:
        """Spawn ``count`` workers that run ``main(number, *arguments)``.

        Raises UsageError if an argument cannot be pickled.
        """
        for number in range(1, count + 1):
            Heartbeat.create(heartbeat_path(self.folder, number))
            process = SPAWN_CONTEXT.Process(target=main, args=(number, *arguments), name=f"tapscope-{what}-{number}")
            process.daemon = self.are_daemons
            self._processes[number] = process
            try:
                with children_sleep_when_idle():
                    process.start()
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise UsageError(f"the observer factory must be picklable when tp or dp > 1: {error}") from None

    def watch(self, limit_s: float, own: Heartbeat | None = None) -> None:
        """Kill workers that hang for ``limit_s``; ``own``: heartbeat of this process, if it is a rank too."""
        watched = {
            number: WatchedProcess(pid, Heartbeat(heartbeat_path(self.folder, number)), stack_path(self.folder, number))
            for number, pid in self.pids.items()
            if pid is not None
        }
        self._watch = WatchdogThread(Watchdog(watched, limit_s, own), self._on_hung)

    def _on_hung(self, number: int, diagnosis: str) -> None:
        """Kill the worker, so that waiting processes notice its end. Called in the watchdog's thread."""
        pid = self.pids[number]
        if pid is not None:
            self._hung[number] = diagnosis
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @property
    def peers(self) -> Iterable[int]:
        """Numbers of the workers."""
        return self._processes

    @property
    def pids(self) -> dict[int, int | None]:
        """Number -> process id of each worker; None if not known."""
        return {number: process.pid for number, process in self._processes.items()}

    @property
    def sentinels(self) -> list[int]:
        """Descriptors that become readable when a worker process ends."""
        return [process.sentinel for process in self._processes.values()]

    def wait_for_all(self, kind: str) -> None:
        """Wait until every worker has sent a message of type ``kind``.

        Raises like :meth:`check` as soon as a worker is lost.
        """
        while any((number, kind) not in self._received for number in self.peers):
            self._receive(POLL_MS)
            self.check()

    def check(self) -> None:
        """Raise the error of :meth:`raise_lost` if a worker has failed or ended."""
        self._receive(0)
        if self._failures or self._ended_workers():
            self.raise_lost(None)

    def raise_lost(self, error: RankLostError | None) -> NoReturn:
        """Raise an error that names the lost worker and the cause."""
        raise NotImplementedError

    def broadcast(self, message: Message) -> None:
        """Send ``message`` to every worker."""
        frames = encode(message)
        for number in self.peers:
            self._socket.send_multipart([worker_identity(number), *frames])

    def abandon(self) -> None:
        """Mark the workers as out of step, so that :meth:`close` waits only briefly for them."""
        self._abandoned = True

    def request_close(self) -> None:
        """Ask every worker to close its observer and exit; :meth:`close` waits for it."""
        if not self._dismissed and not self._abandoned and not self._socket.closed:
            self._dismissed = True
            self.broadcast(Message("close"))

    def close(self) -> None:
        """Stop every worker, by request unless abandoned. Idempotent."""
        if self._socket.closed:
            return
        if self._watch is not None:
            self._watch.stop()
        self.request_close()
        deadline = time.monotonic() + (_ABANDONED_S if self._abandoned else _CLOSE_S)
        for process in self._processes.values():
            if process.pid is not None:
                _end(process, deadline)
        self._socket.close()
        self._context.term()
        remove_tempdir(self.folder)

    def _receive(self, timeout_ms: int) -> None:
        """Process messages of workers, waiting up to ``timeout_ms`` for the first."""
        while self._socket.poll(timeout_ms):
            sender, *frames = self._socket.recv_multipart()
            message, number = decode(frames), int(sender.decode().removeprefix("worker-"))
            self._received.add((number, message.kind))
            if message.kind == "failed":
                self._failures[number] = message
            self._on_message(number, message)
            timeout_ms = 0

    def _on_message(self, number: int, message: Message) -> None:
        """Handle a message of a worker; for subclasses."""

    def _ended_workers(self) -> list[int]:
        return [number for number, process in self._processes.items() if not process.is_alive()]

    def _ended_silently(self) -> list[int]:
        """Return the workers that ended without reporting a failure."""
        return [number for number in self._ended_workers() if number not in self._failures]

    def _diagnosis(self, number: int) -> str | None:
        """Return why the watchdog killed this worker; None if it did not."""
        if self._watch is not None:
            self._watch.finish_check()
        return self._hung.get(number)

    def _describe_end(self, number: int) -> str:
        if (diagnosis := self._diagnosis(number)) is not None:
            return diagnosis
        code = self._processes[number].exitcode
        if code and code < 0:
            return f"was killed by signal {-code}"
        has_begun = any(sender == number for sender, _ in self._received)
        return f"exited with code {code}" + ("" if has_begun else _MAIN_GUARD_HINT)


def ignore_signals() -> None:
    """Ignore SIGINT and SIGTERM in a worker. They reach the whole process group, and the parent handles them."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)


def remove_orphaned_folder(folder: Path) -> None:
    """Remove the shared directory if the parent was killed. Called by a worker that exits."""
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        shutil.rmtree(folder, ignore_errors=True)


def worker_identity(number: int) -> bytes:
    """Return the ZMQ identity of worker ``number``."""
    return f"worker-{number}".encode()


def worker_address(folder: Path) -> str:
    """Return the ZMQ address to which workers connect."""
    return f"ipc://{folder / 'workers'}"


def _end(process: BaseProcess, deadline: float) -> None:
    process.join(max(0.0, deadline - time.monotonic()))
    if process.is_alive():
        process.kill()
        process.join()
    process.close()
