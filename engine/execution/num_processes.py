"""Limits on the number of rank processes of one machine."""

import os

from tapscope.core.errors import ConfigError
from tapscope.core.formatting import plural
from tapscope.engine.params.engine_config import EngineConfig

PER_CORE = 32
"""Maximum number of processes per core: far above any useful number, so that a typo does not exhaust the machine."""


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))


def check_num_processes(config: EngineConfig) -> None:
    """Raise ConfigError if the spawned ranks exceed :data:`PER_CORE` processes per core."""
    needed, cores = config.dp * config.tp, num_cores()
    if config.launch == "spawn" and needed > PER_CORE * cores:
        raise ConfigError(
            f"dp={config.dp}, tp={config.tp}: {needed:,} processes on {plural(cores, 'CPU core')}; at most "
            f"{PER_CORE} per core ({PER_CORE * cores:,}) can be started"
        )


def shared_cores(config: EngineConfig) -> str:
    """Return a warning if more spawned ranks compute on the CPU than it has cores; otherwise an empty string."""
    needed, cores = config.dp * config.tp, num_cores()
    if config.launch != "spawn" or needed <= cores:
        return ""
    return (
        f"dp={config.dp}, tp={config.tp}: {needed} processes share {plural(cores, 'CPU core')}; more processes than "
        "cores make steps slower, not faster"
    )
