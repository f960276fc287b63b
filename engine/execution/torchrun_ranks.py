"""Ranks that torchrun, or anything that sets its variables, has started: how they meet, and how rank 0 sees them.

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say where a process stands, LOCAL_RANK which GPU is its own. Plans travel
over ZMQ as between spawned ranks; rank 0's address goes through torch's store. Nothing is authenticated: on more
than one machine the network must be trusted.
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
from tapscope.engine.distributed.heartbeat import Pulse, pulse_in
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.distributed.watchdog import stack_in, tell_stack
from tapscope.engine.execution.rank_env import Place
from tapscope.engine.execution.rank_worker import obey
from tapscope.engine.execution.resolved_settings import device_of
from tapscope.engine.execution.spawned_ranks import Ranks
from tapscope.engine.execution.worker_processes import identity
from tapscope.engine.hf_config.model_config import ModelConfig
from tapscope.engine.params.engine_config import EngineConfig

_log = logging.getLogger(__name__)
_ENDED = "has ended; see what its launcher says"


class ExternalRanks(Ranks):
    """The other ranks of an engine whose processes somebody else started."""

    def __init__(
        self, config: EngineConfig, model_config: ModelConfig, observer: ObserverFactory | None, pulse: Pulse
    ) -> None:
        self._place = Place.read(config)
        self._pids: dict[int, int | None] = {}
        self._sentinels: dict[int, int] = {}
        super().__init__(config, model_config, observer, pulse)
        self._ended = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)

    def _bind(self) -> None:
        self._port = self._socket.bind_to_random_port(f"tcp://{_resolved(self._place.hostname)}")

    @property
    def peers(self) -> range:
        """The other ranks."""
        return range(1, self._config.tp)

    @property
    def pids(self) -> dict[int, int | None]:
        """Process ids of those that are watched."""
        return self._pids

    @property
    def sentinels(self) -> list[int]:
        """Descriptors that become readable when a process of this machine has ended."""
        return list(self._sentinels.values())

    def connect(self) -> TensorParallel:
        """Tell the others where plans come from, join them, watch those of this machine; raises RankLostError."""
        store = self._place.store(self._config)
        for rank in self.peers:
            Pulse.create(pulse_in(self.folder, rank))
        store.set("folder", str(self.folder) if self._place.is_one_machine else "")
        store.set("plans", f"tcp://{_resolved(self._place.hostname)}:{self._port}")
        device = device_of(self._config, self._place.local_rank)
        self.await_all("up")
        try:
            tp = self._place.meet(store, self._config, device)
        except RankLostError as error:
            self.explain(error)
        pids = {rank: int(store.get(_pid_key(rank))) for rank in self.peers}
        self._sentinels = {rank: sentinel for rank, pid in pids.items() if (sentinel := _sentinel_of(pid)) is not None}
        self._pids = {rank: pid or None for rank, pid in pids.items()}
        self.watch(self._config.rank_timeout_s, self._pulse)
        tp.watch(self.sentinels)
        tp.pulse = self._pulse
        return tp

    def _on_hung(self, number: int, said: str) -> None:
        # The launcher may end this process before it can raise.
        _log.error("rank %d of %d %s", number, self._config.tp, said)
        super()._on_hung(number, said)

    def _dead(self) -> list[int]:
        readable = connection.wait(self.sentinels, 0)
        return sorted({*self._hung, *(rank for rank, sentinel in self._sentinels.items() if sentinel in readable)})

    def _how_ended(self, number: int) -> str:
        return self._hung.get(number, _ENDED)

    def check(self) -> None:
        """Raise RankLostError when a rank has failed or ended, or its connection was lost."""
        super().check()
        if self._ended.poll(0):
            self.explain(None)

    def _raise(self, cause: RankLostError | None) -> NoReturn:
        if not self._own_failures() and not self._silent() and self._ended.poll(0):  # one of another machine
            raise RankLostError(f"one of the ranks 1 to {self._config.tp - 1} {_ENDED}") from cause
        super()._raise(cause)

    def close(self) -> None:
        """Tell the ranks to end; their launcher waits for them."""
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._ended.close(linger=0)
            self._socket.linger = 1000
        super().close()
        while self._sentinels:
            os.close(self._sentinels.popitem()[1])


def obey_if_launched(config: EngineConfig, model_config: ModelConfig, observer: ObserverFactory | None) -> None:
    """On rank 0 nothing; on the others all work until rank 0 closes, then SystemExit.

    Raises ConfigError, RankLostError; what else goes wrong is told to rank 0 and raised.
    """
    place = Place.read(config)
    if place.rank == 0:
        return
    torch.set_num_threads(1)
    store = place.store(config)
    try:
        folder = _shared_folder(store, place.rank)
        address = store.get("plans").decode()
    except RuntimeError as error:
        raise RankLostError(f"rank {place.rank} did not hear of rank 0 in {config.rank_timeout_s} s") from error
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 1000
        socket.identity = identity(place.rank)
        ended = socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        socket.connect(address)
        try:
            device = device_of(config, place.local_rank)
            obey(partial(_meet, place, store, config, device, folder), config, model_config, observer, socket, ended)
        except BaseException:
            socket.send_multipart(encode(Message("failed", {"traceback": traceback.format_exc()})))
            raise
        finally:
            socket.disable_monitor()
            ended.close(linger=0)
    raise SystemExit(0)


def _shared_folder(store: Any, rank: int) -> Path | None:
    """Where rank 0 watches this process's pulse; None where they share no files."""
    text = store.get("folder").decode()
    folder = Path(text) if text and pulse_in(Path(text), rank).exists() else None
    store.set(_pid_key(rank), str(0 if folder is None else os.getpid()))
    if folder is not None:
        tell_stack(stack_in(folder, rank))
    return folder


def _meet(place: Place, store: Any, config: EngineConfig, device: torch.device, folder: Path | None) -> TensorParallel:
    tp = place.meet(store, config, device)
    if folder is not None:
        tp.pulse = Pulse(pulse_in(folder, place.rank))
    return tp


def _pid_key(rank: int) -> str:
    return f"pid-{rank}"


def _sentinel_of(pid: int) -> int | None:
    """A descriptor that becomes readable when the process has ended; None where the system has no such thing."""
    try:
        return os.pidfd_open(pid) if pid else None
    except (AttributeError, OSError):
        return None


def _resolved(hostname: str) -> str:
    return sockets.gethostbyname(hostname)
