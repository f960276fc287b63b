"""Place: where a process that somebody else started stands among the ranks, and how it meets them."""

import itertools
import os
import socket as sockets
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from tapscope.core.errors import ConfigError, RankLostError
from tapscope.engine.distributed.tensor_parallel import TensorParallel
from tapscope.engine.params.engine_config import EngineConfig

distributed: Any = torch.distributed
_count = itertools.count()
"""Engines made by this process: all ranks make the same ones in the same order, and each has keys of its own."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a launched process stands."""

    rank: int
    size: int
    local_rank: int
    host: str
    port: int
    hostname: str
    """What the other ranks know this process's machine by."""
    is_one_machine: bool
    """Whether all ranks run on it."""

    @classmethod
    def read(cls, config: EngineConfig) -> "Place":
        """From the environment; raises ConfigError naming the variable."""
        rank, size = _number("RANK"), _number("WORLD_SIZE")
        if size != config.tp or not 0 <= rank < size:
            raise ConfigError(f"launch='external': tp={config.tp}, but RANK={rank}, WORLD_SIZE={size}; make them equal")
        if config.rendezvous is not None:
            host, _, port = config.rendezvous.removeprefix("tcp://").rpartition(":")
        else:
            host, port = _variable("MASTER_ADDR"), str(_number("MASTER_PORT"))
        is_one_machine = os.environ.get("LOCAL_WORLD_SIZE", str(size)) == str(size)
        hostname = "127.0.0.1" if is_one_machine else host if rank == 0 else sockets.gethostname()
        return cls(rank, size, int(os.environ.get("LOCAL_RANK", rank)), host, int(port), hostname, is_one_machine)

    def store(self, config: EngineConfig) -> Any:
        """A store of this engine alone; raises RankLostError when the ranks do not meet within the time."""
        is_served = config.rendezvous is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        timeout = timedelta(seconds=config.rank_timeout_s)
        try:
            store = distributed.TCPStore(
                self.host, self.port, self.size, self.rank == 0 and not is_served, timeout, multi_tenant=True
            )
        except (RuntimeError, ValueError) as error:
            where = f"tcp://{self.host}:{self.port}"
            raise RankLostError(f"rank {self.rank} could not meet the others at {where}: {error}") from error
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return distributed.PrefixStore(f"tapscope/{attempt}/{next(_count)}/", store)

    def meet(self, store: Any, config: EngineConfig, device: torch.device) -> TensorParallel:
        """Join the collectives; raises RankLostError."""
        limit = config.rank_timeout_s
        # Where rank 0 watches the others, it finds who hangs before those who wait for him give up.
        collective_s = 2 * limit if self.is_one_machine else limit
        return TensorParallel.join(store, self.rank, self.size, limit, device, self.hostname, collective_s=collective_s)


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if value is None:
        raise ConfigError(f"launch='external': {name} is not set; start the program by torchrun, or set it")
    return value


def _number(name: str) -> int:
    value = _variable(name)
    if not value.isdecimal():
        raise ConfigError(f"launch='external': {name}={value!r} must be a whole number")
    return int(value)
