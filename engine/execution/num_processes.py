"""How many processes of ranks one machine can run."""

import os

from tapscope.core.errors import ConfigError
from tapscope.core.formatting import plural
from tapscope.engine.params.engine_config import EngineConfig

PER_CORE = 32
"""Most processes per core: a bound far above any useful number, so that a typo does not exhaust the machine."""


def num_cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def check_num_processes(config: EngineConfig) -> None:
    """Raise ConfigError if the spawned ranks are more than :data:`PER_CORE` processes per core."""
    needed, cores = config.dp * config.tp, num_cores()
    if config.launch == "spawn" and needed > PER_CORE * cores:
        raise ConfigError(
            f"dp={config.dp}, tp={config.tp}: {needed:,} processes on {plural(cores, 'CPU core')}; at most "
            f"{PER_CORE} per core ({PER_CORE * cores:,}) can be started"
        )


def shared_cores(config: EngineConfig) -> str:
    """A warning if spawned ranks that compute on the CPU are more than its cores; else empty."""
    needed, cores = config.dp * config.tp, num_cores()
    if config.launch != "spawn" or needed <= cores:
        return ""
    return (
        f"dp={config.dp}, tp={config.tp}: {needed} processes share {plural(cores, 'CPU core')}; more processes than "
        "cores make steps slower, not faster"
    )
