"""Replicas: start and monitor the processes of DP replicas 1 and up; also their entry point.

Every replica is an engine with its own service and its own ranks. Clients connect to each replica directly.
"""

import multiprocessing
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

import zmq

from tapscope.core import errors
from tapscope.core.errors import RankLostError, TapscopeError
from tapscope.core.gc_control import freeze
from tapscope.core.observe import ObserverFactory
from tapscope.core.wire import Message, encode
from tapscope.engine.distributed.heartbeat import Heartbeat, heartbeat_path
from tapscope.engine.distributed.watchdog import enable_stack_dumps, stack_path
from tapscope.engine.distributed.worker_processes import (
    FINAL_MESSAGE_S,
    POLL_MS,
    WorkerProcesses,
    ignore_signals,
    remove_orphaned_folder,
    worker_address,
    worker_identity,
)
from tapscope.engine.execution.num_processes import check_num_processes
from tapscope.engine.params.engine_config import EngineConfig


class ReplicaLostError(RankLostError):
    """Replica ``dp_rank`` has exited or failed."""

    def __init__(self, dp_rank: int, text: str) -> None:
        super().__init__(text)
        self.dp_rank = dp_rank


class Replicas(WorkerProcesses):
    """Processes of DP replicas 1 and up of one server; empty if ``dp`` is 1."""

    are_daemons = False

    def __init__(self, config: EngineConfig, observer: ObserverFactory | None, max_waiting: int | None) -> None:
        super().__init__()
        self._config, self._dp, self._limit_s = config, config.dp, config.rank_timeout_s
        self._arguments = (config, observer, max_waiting, str(self.folder))

    @property
    def addresses(self) -> list[str]:
        """ZMQ addresses of the engines of all replicas; the first is served by this process."""
        return [engine_address(self.folder, number) for number in range(self._dp)]

    @property
    def sources(self) -> "list[int | zmq.Socket[bytes]]":
        """Sockets and file descriptors that become readable when a replica fails or exits; then call :meth:`check`."""
        return [self._socket, *self.sentinels]

    def spawn(self) -> None:
        """Start and watch the processes, which load in parallel. Raises ConfigError, UsageError."""
        if self._dp > 1:
            check_num_processes(self._config)
        self.start(replica_main, self._arguments, self._dp - 1, "replica")
        if self._dp > 1:
            self.watch(self._limit_s)

    def raise_lost(self, error: RankLostError | None) -> NoReturn:
        """Raise the error of the first lost replica: its own error if it failed to load, else ReplicaLostError."""
        deadline = time.monotonic() + FINAL_MESSAGE_S
        while not self._failures and not self._ended_silently() and time.monotonic() < deadline:
            self._receive(POLL_MS)
        if not self._failures:
            self._receive(2 * POLL_MS)  # the last message of the replica may still arrive
        if self._failures:
            number = min(self._failures)
            failure = self._failures[number]
            text = f"DP replica {number}: {failure['text']}"
            kind = getattr(errors, failure["error"])
            if (number, "ready") not in self._received and not issubclass(kind, RankLostError):
                raise kind(text)
            raise ReplicaLostError(number, text)
        number = self._ended_silently()[0]
        raise ReplicaLostError(number, f"DP replica {number} {self._describe_end(number)}")


def replica_main(
    dp_rank: int, config: EngineConfig, observer: ObserverFactory | None, max_waiting: int | None, folder: str
) -> None:
    """Load and serve a replica until closed: the entry point of a spawned process. Errors are reported to replica 0."""
    ignore_signals()
    enable_stack_dumps(stack_path(Path(folder), dp_rank))
    with zmq.Context() as context, context.socket(zmq.DEALER) as parent, context.socket(zmq.ROUTER) as clients:
        parent.linger = clients.linger = 1000
        parent.identity = worker_identity(dp_rank)
        parent.connect(worker_address(Path(folder)))
        clients.set_hwm(0)
        clients.bind(engine_address(Path(folder), dp_rank))
        try:
            heartbeat = Heartbeat(heartbeat_path(Path(folder), dp_rank))
            _serve(replace(config, dp_rank=dp_rank), observer, max_waiting, parent, clients, heartbeat)
        except Exception as error:  # noqa: BLE001  (reported to the parent, which raises it)
            _report(parent, error)
            raise SystemExit(1) from None
        finally:
            remove_orphaned_folder(Path(folder))


def _serve(
    config: EngineConfig,
    observer: ObserverFactory | None,
    max_waiting: int | None,
    parent: "zmq.Socket[bytes]",
    clients: "zmq.Socket[bytes]",
    heartbeat: Heartbeat,
) -> None:
    from tapscope.engine.engine import Engine
    from tapscope.engine.runners.engine_service import EngineService

    engine = Engine(config, observer, heartbeat)
    try:

        def give_up(error: RankLostError) -> None:
            _report(parent, error)
            service.stop()

        service = EngineService(engine, clients, max_waiting=max_waiting, on_failure=give_up)
        service.watch(parent, service.stop)  # the parent sends no message but close
        if (process := multiprocessing.parent_process()) is not None:
            service.watch(process.sentinel, service.stop)
        freeze()
        parent.send_multipart(encode(Message("ready")))
        service.run()
        if service.failure is not None:
            raise SystemExit(1)
    finally:
        engine.close()


def engine_address(folder: Path, dp_rank: int) -> str:
    """Return the ZMQ address of a replica's engine."""
    return f"ipc://{folder / f'dp-{dp_rank}'}"


def _report(parent: "zmq.Socket[bytes]", error: Exception) -> None:
    if isinstance(error, TapscopeError):
        failure = {"error": type(error).__name__, "text": str(error)}
    else:
        failure = {"error": "RankLostError", "text": f"failed:\n{traceback.format_exc().rstrip()}"}
    parent.send_multipart(encode(Message("failed", failure)))
