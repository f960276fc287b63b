"""RankEnv: rank and rendezvous of a process started by a launcher such as torchrun."""

import itertools
import logging
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
_log = logging.getLogger(__name__)
_count = itertools.count()
"""Number of engines created by this process: all ranks create the same engines in the same order, each with its own
keys."""


@dataclass(frozen=True, slots=True)
class RankEnv:
    """Rank, world size and addresses of a launched process."""

    rank: int
    size: int
    local_rank: int
    host: str
    port: int
    hostname: str
    """Address of this machine for the other ranks."""
    is_one_machine: bool
    """Whether all ranks run on this machine."""

    @classmethod
    def read(cls, config: EngineConfig) -> "RankEnv":
        """Read the environment variables; raises ConfigError naming the variable at fault."""
        rank, size = _number("RANK"), _number("WORLD_SIZE")
        if size != config.tp or not 0 <= rank < size:
            raise ConfigError(f"launch='external': tp={config.tp} does not match RANK={rank}, WORLD_SIZE={size}")
        if config.rendezvous is not None:
            host, _, port = config.rendezvous.removeprefix("tcp://").rpartition(":")
        else:
            host, port = _variable("MASTER_ADDR"), str(_number("MASTER_PORT"))
        is_one_machine = os.environ.get("LOCAL_WORLD_SIZE", str(size)) == str(size)
        hostname = "127.0.0.1" if is_one_machine else host if rank == 0 else sockets.gethostname()
        return cls(rank, size, int(os.environ.get("LOCAL_RANK", rank)), host, int(port), hostname, is_one_machine)

    def store(self, config: EngineConfig) -> Any:
        """Create a key-value store for this engine; raises RankLostError if the ranks do not connect in time."""
        is_served = config.rendezvous is None and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        timeout = timedelta(seconds=config.rank_timeout_s)
        try:
            store = distributed.TCPStore(
                self.host, self.port, self.size, self.rank == 0 and not is_served, timeout, multi_tenant=True
            )
        except (RuntimeError, ValueError) as error:
            where = f"tcp://{self.host}:{self.port}"
            raise RankLostError(f"rank {self.rank} could not reach the other ranks at {where}: {error}") from error
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        return distributed.PrefixStore(f"tapscope/{attempt}/{next(_count)}/", store)

    def connect(self, store: Any, config: EngineConfig, device: torch.device) -> TensorParallel:
        """Join the process group; raises RankLostError."""
        limit = config.rank_timeout_s
        if config.custom_all_reduce:
            _log.warning(
                "custom_all_reduce has no effect with launch='external': it needs ranks that the engine starts"
            )
        # If rank 0 watches the other ranks, it detects a hung rank before the waiting ranks time out.
        collective_s = 2 * limit if self.is_one_machine else limit
        return TensorParallel.join(store, self.rank, self.size, limit, device, self.hostname, collective_s=collective_s)


def _variable(name: str) -> str:
    value = os.environ.get(name)
    if value is None:
        raise ConfigError(f"launch='external': {name} is not set; start the program with torchrun, or set it")
    return value


def _number(name: str) -> int:
    value = _variable(name)
    if not value.isdecimal():
        raise ConfigError(f"launch='external': {name}={value!r} must be an integer")
    return int(value)
