"""Rank manifest: build the join message of a rank; the first rank's manifest becomes that of the run."""

import os
import platform
import socket
import sys
from collections.abc import Mapping
from typing import Any

import torch

from tapscope._version import __version__
from tapscope.core.observe import RankInfo
from tapscope.core.wire import Message
from tapscope.dumper.config import DumperConfig
from tapscope.dumper.control.access_guard import token_of
from tapscope.dumper.taps.taps import Tap


def join_message(info: RankInfo, config: DumperConfig, taps: list[Tap], unmatched: Mapping[str, str]) -> Message:
    """Build the ``join`` message; ``unmatched`` are the rules that match no site of this rank's model."""
    settings = config.to_json()
    opening: dict[str, Any] = {
        "world_size": info.world_size,
        "mesh": dict(info.mesh),
        "coords": dict(info.coords),
        "pid": os.getpid(),
        "host": socket.gethostname(),
    }
    if info.own_steps:
        opening["own_steps"] = list(info.own_steps)
    fields = {"rank": info.rank, "opening": opening, "manifest": _manifest(info, config)}
    return Message("join", fields | {"modules": modules(taps), "config": settings, "unmatched": dict(unmatched)})


def modules(taps: list[Tap]) -> list[Any]:
    """Return [path, class, known ports] for every module with a tap."""
    by_path: dict[str, list[Any]] = {}
    for tap in taps:
        path = f"{tap.model}/{tap.site_path}" if tap.model else tap.site_path
        by_path.setdefault(path, [path, tap.module_class, []])[2].extend(tap.known_ports())
    return list(by_path.values())


def _manifest(info: RankInfo, config: DumperConfig) -> dict[str, Any]:
    kept = {"kv_cache_dtype": info.kv_cache_dtype} if info.kv_cache_dtype else {}
    return {
        "tapscope": __version__,
        "framework": info.framework,
        "model": info.model,
        "dtype": info.dtype,
        "model_config": dict(info.model_config),
        "mesh": dict(info.mesh),
        "world_size": info.world_size,
        "command": _without(token_of(config.control_token)),
        "seeds": {"torch": torch.initial_seed()},
        "config": config.to_json(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        **({"own_steps": list(info.own_steps)} if info.own_steps else {}),
    } | kept


def _without(token: str | None) -> list[str]:
    """Return the command line with ``token`` replaced by ``...``."""
    return [word.replace(token, "...") if token else word for word in sys.argv]
