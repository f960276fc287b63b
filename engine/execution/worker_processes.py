"""Workers: processes that this one spawns, and what they tell it over ZMQ.

Sockets and whatever else they share lie in a directory of mode 0700 made for them, so two engines never meet.
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
from tapscope.engine.distributed.heartbeat import Pulse, pulse_in
from tapscope.engine.distributed.watchdog import Watch, Watched, WatchThread, stack_in
from tapscope.engine.execution.openmp_threads import children_wait_asleep

PROCESSES = multiprocessing.get_context("spawn")
"""How workers are started: never by fork, which CUDA and threads do not survive."""
POLL_MS = 100
LAST_WORDS_S = 1.0  # how long what a dying worker says may be on its way
_CLOSE_S = 10.0  # how long a worker may take to close its observer
_NO_GUARD = '; a script that makes an LLM with tp or dp > 1 does so under `if __name__ == "__main__":`'
_ABANDONED_S = 2.0  # the same for one that is out of step, and may hang


class Workers:
    """Numbered processes from 1 up; number 0 is this one."""

    are_final = True
    """Whether they have no workers of their own; then they cannot outlive this process."""

    def __init__(self) -> None:
        self.folder = make_tempdir()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        try:
            self._bind()
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            remove_tempdir(self.folder)
            raise UsageError(f"no socket can be made in {self.folder}: {error}; set TMPDIR to a short path") from None
        self._said: set[tuple[int, str]] = set()
        self._failures: dict[int, Message] = {}
        self._processes: dict[int, BaseProcess] = {}
        self._abandoned = self._dismissed = False
        self._hung: dict[int, str] = {}
        self._watch: WatchThread | None = None

    def _bind(self) -> None:
        self._socket.bind(address_in(self.folder))

    def start(self, main: Callable[..., None], arguments: tuple[Any, ...], count: int, what: str) -> None:
        """Spawn ``count`` workers that run ``main(number, *arguments)``; raises UsageError for what has no pickle."""
        for number in range(1, count + 1):
            Pulse.create(pulse_in(self.folder, number))
            process = PROCESSES.Process(target=main, args=(number, *arguments), name=f"tapscope-{what}-{number}")
            process.daemon = self.are_final
            self._processes[number] = process
            try:
                with children_wait_asleep():
                    process.start()
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise UsageError(f"the observer factory must be picklable when tp or dp > 1: {error}") from None

    def watch(self, limit_s: float, own: Pulse | None = None) -> None:
        """Kill a worker that hangs for ``limit_s``; ``own`` is this process's, where it is a rank of theirs."""
        watched = {
            number: Watched(pid, Pulse(pulse_in(self.folder, number)), stack_in(self.folder, number))
            for number, pid in self.pids.items()
            if pid is not None
        }
        self._watch = WatchThread(Watch(watched, limit_s, own), self._on_hung)

    def _on_hung(self, number: int, said: str) -> None:
        """In the watch's thread: whoever waits for the worker then sees it end."""
        pid = self.pids[number]
        if pid is not None:
            self._hung[number] = said
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @property
    def peers(self) -> Iterable[int]:
        """The numbers of the workers."""
        return self._processes

    @property
    def pids(self) -> dict[int, int | None]:
        """Process id of each worker, where it is known."""
        return {number: process.pid for number, process in self._processes.items()}

    @property
    def sentinels(self) -> list[int]:
        """Descriptors that become readable when a worker's process has ended."""
        return [process.sentinel for process in self._processes.values()]

    def await_all(self, kind: str) -> None:
        """Wait until every worker has sent a message of this kind; raises as :meth:`check` as soon as one is dead."""
        while any((number, kind) not in self._said for number in self.peers):
            self._receive(POLL_MS)
            self.check()

    def check(self) -> None:
        """Raise, as :meth:`explain`, when a worker has failed or ended."""
        self._receive(0)
        if self._failures or self._dead():
            self.explain(None)

    def explain(self, error: RankLostError | None) -> NoReturn:
        """Raise what says which worker was lost, and of what."""
        raise NotImplementedError

    def tell(self, message: Message) -> None:
        """Send ``message`` to every worker."""
        frames = encode(message)
        for number in self.peers:
            self._socket.send_multipart([identity(number), *frames])

    def abandon(self) -> None:
        """The workers are out of step: :meth:`close` will not wait long for them."""
        self._abandoned = True

    def dismiss(self) -> None:
        """Tell every worker to close its observer and end; :meth:`close` then waits for it."""
        if not self._dismissed and not self._abandoned and not self._socket.closed:
            self._dismissed = True
            self.tell(Message("close"))

    def close(self) -> None:
        """End every worker, gently unless abandoned; safe to call twice."""
        if self._socket.closed:
            return
        if self._watch is not None:
            self._watch.stop()
        self.dismiss()
        deadline = time.monotonic() + (_ABANDONED_S if self._abandoned else _CLOSE_S)
        for process in self._processes.values():
            if process.pid is not None:
                _end(process, deadline)
        self._socket.close()
        self._context.term()
        remove_tempdir(self.folder)

    def _receive(self, timeout_ms: int) -> None:
        """Note what workers said, waiting at most ``timeout_ms`` for the first word."""
        while self._socket.poll(timeout_ms):
            sender, *frames = self._socket.recv_multipart()
            message, number = decode(frames), int(sender.decode().removeprefix("worker-"))
            self._said.add((number, message.kind))
            if message.kind == "failed":
                self._failures[number] = message
            self._heard(number, message)
            timeout_ms = 0

    def _heard(self, number: int, message: Message) -> None:
        """A worker has said something."""

    def _dead(self) -> list[int]:
        return [number for number, process in self._processes.items() if not process.is_alive()]

    def _silent(self) -> list[int]:
        """Workers that ended without a word."""
        return [number for number in self._dead() if number not in self._failures]

    def _how_ended(self, number: int) -> str:
        if number in self._hung:
            return self._hung[number]
        code = self._processes[number].exitcode
        if code and code < 0:
            return f"was killed by signal {-code}"
        has_begun = any(said == number for said, _ in self._said)
        return f"exited with code {code}" + ("" if has_begun else _NO_GUARD)


def leave_signals_to_parent() -> None:
    """For a worker: SIGINT and SIGTERM reach the whole group; the process that spawned it decides what they mean."""
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)


def clean_up_after_parent(folder: Path) -> None:
    """For a worker that ends: where the process that spawned it was killed, nobody else removes their directory."""
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        shutil.rmtree(folder, ignore_errors=True)


def identity(number: int) -> bytes:
    """What a worker's messages are addressed by."""
    return f"worker-{number}".encode()


def address_in(folder: Path) -> str:
    """Where workers connect to."""
    return f"ipc://{folder / 'workers'}"


def _end(process: BaseProcess, deadline: float) -> None:
    process.join(max(0.0, deadline - time.monotonic()))
    if process.is_alive():
        process.kill()
        process.join()
    process.close()
