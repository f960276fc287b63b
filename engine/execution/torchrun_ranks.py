"""TorchrunRanks: ranks started by torchrun, or by a launcher that sets the same variables.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT give the rank and the rendezvous, LOCAL_RANK the GPU. Plans are sent over
ZMQ as between spawned ranks; rank 0 publishes its address in torch's store. Nothing is authenticated: with more than
one machine the network must be trusted.
"""

import logging
import os
import socket as sockets
import traceback
from functools import partial
from multiprocessing import connection
from pathlib import Path
from typing import Any, NoReturn

import torch
import zmq

from tapscope.core.errors import RankLostError
from tapscope.core.observe import ObserverFactory
from tapscope.core.wire import Message, encode
from tapscope.engine.distributed.heartbeat import Heartbeat, heartbeat_path
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.distributed.watchdog import enable_stack_dumps, stack_path
from tapscope.engine.distributed.worker_processes import worker_identity
from tapscope.engine.execution.rank_env import RankEnv
from tapscope.engine.execution.rank_worker import worker_loop
from tapscope.engine.execution.resolved_settings import resolve_device
from tapscope.engine.execution.spawned_ranks import SpawnedRanks
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.params.engine_config import EngineConfig

_log = logging.getLogger(__name__)
_ENDED = "has ended; see the output of its launcher"


class TorchrunRanks(SpawnedRanks):
    """The other ranks of an engine whose processes were started by a launcher."""

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, observer: ObserverFactory | None, heartbeat: Heartbeat
    ) -> None:
        self._env = RankEnv.read(config)
        self._pids: dict[int, int | None] = {}
        self._sentinels: dict[int, int] = {}
        super().__init__(config, model_config, observer, heartbeat)
        self._ended = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def _bind(self) -> None:
        self._port = self._socket.bind_to_random_port(f"tcp://{_resolved(self._env.hostname)}")

    @property
    def peers(self) -> range:
        """The other ranks."""
        return range(1, self._config.tp)

    @property
    def pids(self) -> dict[int, int | None]:
        """Process ids of the watched ranks."""
        return self._pids

    @property
    def sentinels(self) -> list[int]:
        """File descriptors that become readable when a process on this machine has ended."""
        return list(self._sentinels.values())

    def connect(self) -> TensorParallel:
        """Publish rank 0's address, join the process group and watch ranks on this machine; raises RankLostError."""
        store = self._env.store(self._config)
        for rank in self.peers:
            Heartbeat.create(heartbeat_path(self.folder, rank))
        store.set("folder", str(self.folder) if self._env.is_one_machine else "")
        store.set("plans", f"tcp://{_resolved(self._env.hostname)}:{self._port}")
        device = resolve_device(self._config, self._env.local_rank)
        self.wait_for_all("up")
        try:
            tp = self._env.connect(store, self._config, device)
        except RankLostError as error:
            self.raise_lost(error)
        pids = {rank: int(store.get(_pid_key(rank))) for rank in self.peers}
        self._sentinels = {rank: sentinel for rank, pid in pids.items() if (sentinel := _sentinel_of(pid)) is not None}
        self._pids = {rank: pid or None for rank, pid in pids.items()}
        self.watch(self._config.rank_timeout_s, self._heartbeat)
        tp.watch(self.sentinels)
        tp.heartbeat = self._heartbeat
        return tp

    def _on_hung(self, number: int, diagnosis: str) -> None:
        # Log now: the launcher may end this process before the error is raised.
        _log.error("rank %d of %d %s", number, self._config.tp, diagnosis)
        super()._on_hung(number, diagnosis)

    def _ended_workers(self) -> list[int]:
        readable = connection.wait(self.sentinels, 0)
        return sorted({*self._hung, *(rank for rank, sentinel in self._sentinels.items() if sentinel in readable)})

    def _describe_end(self, number: int) -> str:
        return self._diagnosis(number) or _ENDED

    def check(self) -> None:
        """Raise RankLostError if a rank has failed or ended, or its connection was lost."""
        super().check()
        if self._ended.poll(0):
            self.raise_lost(None)

    def _raise(self, cause: RankLostError | None) -> NoReturn:
        if not self._own_failures() and not self._ended_silently() and self._ended.poll(0):  # a rank on another machine
            raise RankLostError(f"one of the ranks 1 to {self._config.tp - 1} {_ENDED}") from cause
        super()._raise(cause)

    def close(self) -> None:
        """Ask the ranks to end; their launcher waits for them."""
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._ended.close(linger=0)
            self._socket.linger = 1000
        super().close()
        while self._sentinels:
            os.close(self._sentinels.popitem()[1])


def run_worker_rank(config: EngineConfig, model_config: ModelConfig, observer: ObserverFactory | None) -> None:
    """Return immediately on rank 0; on other ranks run :func:`worker_loop` until rank 0 closes, then raise SystemExit.

    Raises ConfigError, RankLostError; other errors are reported to rank 0 and raised.
    """
    env = RankEnv.read(config)
    if env.rank == 0:
        return
    torch.set_num_threads(1)
    store = env.store(config)
    try:
        folder = _shared_folder(store, env.rank)
        address = store.get("plans").decode()
    except RuntimeError as error:
        raise RankLostError(f"rank {env.rank} got no address of rank 0 within {config.rank_timeout_s} s") from error
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 1000
        socket.identity = worker_identity(env.rank)
        ended = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(address)
        try:
            device = resolve_device(config, env.local_rank)
            worker_loop(
                partial(_connect, env, store, config, device, folder), config, model_config, observer, socket, ended
            )
        except BaseException:
            socket.send_multipart(encode(Message("failed", {"traceback": traceback.format_exc()})))
            raise
        finally:
            socket.disable_monitor()
            ended.close(linger=0)
    raise SystemExit(0)


def _shared_folder(store: Any, rank: int) -> Path | None:
    """Return the directory in which rank 0 watches this process's heartbeat; None without a shared file system."""
    text = store.get("folder").decode()
    folder = Path(text) if text and heartbeat_path(Path(text), rank).exists() else None
    store.set(_pid_key(rank), str(0 if folder is None else os.getpid()))
    if folder is not None:
        enable_stack_dumps(stack_path(folder, rank))
    return folder


def _connect(
    env: RankEnv, store: Any, config: EngineConfig, device: torch.device, folder: Path | None
) -> TensorParallel:
    tp = env.connect(store, config, device)
    if folder is not None:
        tp.heartbeat = Heartbeat(heartbeat_path(folder, env.rank))
    return tp


def _pid_key(rank: int) -> str:
    return f"pid-{rank}"


def _sentinel_of(pid: int) -> int | None:
    """Return a file descriptor that becomes readable when the process has ended; None if the system lacks pidfd."""
    try:
        return os.pidfd_open(pid) if pid else None
    except (AttributeError, OSError):
        return None


def _resolved(hostname: str) -> str:
    return sockets.gethostbyname(hostname)
