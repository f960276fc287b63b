"""Ranks: the processes of ranks 1 and up, as rank 0 sees them, and what each of them runs.

Rank 0 lives in the caller's process and decides; the others obey plans that arrive over ZMQ as JSON. Sockets and
the rendezvous file lie in a directory of mode 0700 made for this engine, so engines never meet each other.
"""

import multiprocessing
import pickle
import shutil
import signal
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import NoReturn

import torch
import zmq

from tapscope.engine.config import EngineConfig
from tapscope.engine.model_config import ModelConfig
from tapscope.engine.parallel import TensorParallel
from tapscope.engine.plan import StepPlan
from tapscope.engine.runner import Runner, device_of
from tapscope.errors import CheckpointError, RankLostError, UsageError
from tapscope.observe import ObserverFactory
from tapscope.wire import Message, decode, encode

_POLL_MS = 100
_LAST_WORDS_S = 1.0  # how long a dying rank's traceback may be on its way
_CLOSE_S = 10.0  # how long a rank may take to close its observer
_ABANDONED_S = 2.0  # the same for a rank that is out of step, and may hang


class Ranks:
    """The spawned ranks of one engine."""

    def __init__(self, config: EngineConfig, model_config: ModelConfig, observer: ObserverFactory | None) -> None:
        self._config = config
        self._folder = Path(tempfile.mkdtemp(prefix="tapscope-"))
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.linger = 0
        try:
            self._bind()
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            self._folder.rmdir()
            raise UsageError(f"no socket can be made in {self._folder}: {error}; set TMPDIR to a short path") from None
        self._said: set[tuple[int, str]] = set()
        self._failures: dict[int, str] = {}
        self._answers: dict[int, str | None] = {}
        self._abandoned = self._dismissed = False
        context = multiprocessing.get_context("spawn")
        arguments = (config, model_config, observer, str(self._folder))
        self._processes: dict[int, BaseProcess] = {
            rank: context.Process(target=rank_main, args=(rank, *arguments), name=f"tapscope-rank-{rank}", daemon=True)
            for rank in range(1, config.tp)
        }

    def _bind(self) -> None:
        self._socket.bind(_address(self._folder))

    @property
    def _peers(self) -> Iterable[int]:
        """The other ranks."""
        return self._processes

    def connect(self) -> TensorParallel:
        """Start the processes and join rank 0 with them; raises RankLostError."""
        for process in self._processes.values():
            try:
                process.start()
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise UsageError(f"the observer factory must be picklable when tp > 1: {error}") from None
        self.await_all("up")
        try:
            path, timeout_s = self._folder / "store", self._config.rank_timeout_s
            tp = TensorParallel.connect(path, 0, self._config.tp, timeout_s, device_of(self._config.device, 0))
        except RankLostError as error:
            self.explain(error)
        tp.watch(self.sentinels)
        return tp

    @property
    def pids(self) -> dict[int, int | None]:
        """Process id of each spawned rank."""
        return {rank: process.pid for rank, process in self._processes.items()}

    @property
    def sentinels(self) -> list[int]:
        """Descriptors that become readable when a rank's process has ended."""
        return [process.sentinel for process in self._processes.values()]

    def await_all(self, kind: str) -> None:
        """Wait until every rank has sent a message of this kind; raises RankLostError as soon as one is dead."""
        while any((rank, kind) not in self._said for rank in self._peers):
            self._receive(_POLL_MS)
            self.check()

    def send(self, plan: StepPlan) -> None:
        """Have every rank compute ``plan``; raises RankLostError when one is dead."""
        self.check()
        frames = encode(plan.to_message())
        for rank in self._peers:
            self._socket.send_multipart([identity(rank), *frames])

    def ask(self, message: Message) -> None:
        """Have every rank do what ``message`` says; :meth:`answers` has what came of it."""
        self.check()
        self._answers.clear()
        for rank in self._peers:
            self._socket.send_multipart([identity(rank), *encode(message)])

    def answers(self) -> dict[int, str | None]:
        """What went wrong on each rank, None where nothing did; waits for all of them, raises RankLostError."""
        while len(self._answers) < self._config.tp - 1:
            self._receive(_POLL_MS)
            self.check()
        return dict(self._answers)

    def check(self) -> None:
        """Raise RankLostError when a rank has failed or ended."""
        self._receive(0)
        if self._failures or self._dead():
            self.explain(None)

    def explain(self, error: RankLostError | None) -> NoReturn:
        """Raise the RankLostError that says which rank broke the collective, with its traceback if it sent one.

        Ranks whose peer vanished fail too; they are named only when no rank turns out to have begun it.
        """
        deadline = time.monotonic() + _LAST_WORDS_S
        while not self._own_failures() and not self._silent() and time.monotonic() < deadline:
            self._receive(_POLL_MS)
        if not self._own_failures():
            self._receive(2 * _POLL_MS)  # a dead rank's last words may still be on their way
        self._raise(error)

    def abandon(self) -> None:
        """The ranks are out of step: :meth:`close` will not wait long for them."""
        self._abandoned = True

    def dismiss(self) -> None:
        """Tell every rank to close its observer and end; :meth:`close` then waits for it."""
        if self._dismissed or self._abandoned:
            return
        self._dismissed = True
        for rank in self._peers:
            self._socket.send_multipart([identity(rank), *encode(Message("close"))])

    def close(self) -> None:
        """End every rank, gently unless abandoned; safe to call twice."""
        if self._socket.closed:
            return
        self.dismiss()
        deadline = time.monotonic() + (_ABANDONED_S if self._abandoned else _CLOSE_S)
        for process in self._processes.values():
            if process.pid is not None:
                _end(process, deadline)
        self._socket.close()
        self._context.term()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _dead(self) -> list[int]:
        return [rank for rank, process in self._processes.items() if not process.is_alive()]

    def _receive(self, timeout_ms: int) -> None:
        """Note what ranks said, waiting at most ``timeout_ms`` for the first word."""
        while self._socket.poll(timeout_ms):
            sender, *frames = self._socket.recv_multipart()
            message, rank = decode(frames), int(sender.decode().removeprefix("rank-"))
            self._said.add((rank, message.kind))
            if message.kind == "done":
                self._answers[rank] = message["error"]
            if message.kind == "failed":
                self._failures[rank] = message["traceback"]
            timeout_ms = 0

    def _own_failures(self) -> dict[int, str]:
        """Tracebacks of the ranks that failed for a reason of their own."""
        return {rank: text for rank, text in self._failures.items() if "RankLostError" not in text}

    def _silent(self) -> list[int]:
        """Ranks that ended without a word."""
        return [rank for rank in self._dead() if rank not in self._failures]

    def _raise(self, cause: RankLostError | None) -> NoReturn:
        failures = self._own_failures() or ({} if self._silent() else self._failures)
        if failures:
            rank = min(failures)
            raise RankLostError(f"rank {rank} of {self._config.tp} failed:\n{failures[rank].rstrip()}") from cause
        if silent := self._silent():
            code = self._processes[silent[0]].exitcode
            hint = '; a script that makes an LLM with tp > 1 does so under `if __name__ == "__main__":`'
            how = f"was killed by signal {-code}" if code and code < 0 else f"exited with code {code}{hint}"
            raise RankLostError(f"rank {silent[0]} of {self._config.tp} {how}") from cause
        raise cause or RankLostError("a rank was lost")


def rank_main(
    rank: int, config: EngineConfig, model_config: ModelConfig, observer: ObserverFactory | None, folder: str
) -> None:
    """Body of a spawned rank: load, obey plans, end with rank 0. What goes wrong is told to rank 0."""
    for name in (signal.SIGINT, signal.SIGTERM):  # they reach the whole group; rank 0 decides what they mean
        signal.signal(name, signal.SIG_IGN)
    torch.set_num_threads(1)
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 1000
        socket.identity = identity(rank)
        socket.connect(_address(Path(folder)))
        try:
            obey(partial(_meet, rank, config, Path(folder)), config, model_config, observer, socket)
        except BaseException:  # noqa: BLE001  (told to rank 0, which raises it)
            socket.send_multipart(encode(Message("failed", {"traceback": traceback.format_exc()})))
            raise SystemExit(1) from None
        finally:
            if not _rank_0_lives():
                shutil.rmtree(folder, ignore_errors=True)


def _meet(rank: int, config: EngineConfig, folder: Path) -> TensorParallel:
    device = device_of(config.device, rank)
    tp = TensorParallel.connect(folder / "store", rank, config.tp, config.rank_timeout_s, device)
    parent = multiprocessing.parent_process()
    tp.watch([] if parent is None else [parent.sentinel])
    return tp


def obey(
    meet: Callable[[], TensorParallel],
    config: EngineConfig,
    model_config: ModelConfig,
    observer: ObserverFactory | None,
    socket: "zmq.Socket[bytes]",
    rank_0_ended: "zmq.Socket[bytes] | None" = None,
) -> None:
    """Load this rank's part and compute the plans of rank 0 until it says close or is no more.

    ``rank_0_ended`` becomes readable when the connection is lost; a rank that rank 0 spawned sees its parent end.
    """
    socket.send_multipart(encode(Message("up")))
    runner = Runner(config, model_config, meet(), observer)
    try:
        socket.send_multipart(encode(Message("ready")))
        while (message := _next_message(socket, rank_0_ended)) is not None:
            if message.kind == "weights":
                socket.send_multipart(encode(Message("done", {"error": change_weights(runner, message)})))
                continue
            plan = StepPlan.from_message(message)
            runner.execute(plan)
            runner.finish(plan)
    finally:
        runner.close()


def change_weights(runner: Runner, message: Message) -> str | None:
    """Check or load what ``message`` names; what is wrong with it, or None. The same on every rank."""
    act = runner.load_weights if message["apply"] else runner.check_weights
    try:
        act(Path(message["folder"]), partial=message["partial"])
    except CheckpointError as error:
        return str(error)
    except OSError as error:
        return f"{message['folder']} cannot be read: {error}"
    return None


def _next_message(socket: "zmq.Socket[bytes]", rank_0_ended: "zmq.Socket[bytes] | None") -> Message | None:
    """The next plan; None when rank 0 says close or is no more."""
    poller = zmq.Poller()
    poller.register(socket, zmq.POLLIN)
    parent = multiprocessing.parent_process()
    if parent is not None:
        poller.register(parent.sentinel, zmq.POLLIN)
    if rank_0_ended is not None:
        poller.register(rank_0_ended, zmq.POLLIN)
    if socket not in dict(poller.poll()):
        return None
    message = decode(socket.recv_multipart())
    return None if message.kind == "close" else message


def _rank_0_lives() -> bool:
    parent = multiprocessing.parent_process()
    return parent is None or parent.is_alive()


def _end(process: BaseProcess, deadline: float) -> None:
    process.join(max(0.0, deadline - time.monotonic()))
    if process.is_alive():
        process.kill()
        process.join()
    process.close()


def _address(folder: Path) -> str:
    return f"ipc://{folder / 'plans'}"


def identity(rank: int) -> bytes:
    """What rank 0 addresses a rank's messages by."""
    return f"rank-{rank}".encode()
