"""RankIdentity: this process's rank and mesh coordinates, determined again whenever a run is opened."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tapscope.core.observe import RankInfo
from tapscope.dumper.job.device_meshes import axis_names, meshes
from tapscope.dumper.job.hyperparameters import hyperparameters

_AXES = {
    "tp": "tensor_model_parallel",
    "pp": "pipeline_model_parallel",
    "dp": "data_parallel",
    "cp": "context_parallel",
    "ep": "expert_model_parallel",
}
_HOSTS = {
    "megatron.core.parallel_state": "megatron",
    "sglang.srt.distributed.parallel_state": "sglang",
    "vllm.distributed.parallel_state": "vllm",
}
"""Modules that know a rank's mesh coordinates, through get_<AXIS>_rank() and get_<AXIS>_world_size()."""


def rank_info(models: Sequence[nn.Module] = ()) -> RankInfo:
    """What torch.distributed, the launcher's variables, Megatron-style parallel_state modules and DTensors tell.

    Never uses a collective. Before groups are created, the launcher's ``RANK`` and ``WORLD_SIZE`` apply.
    """
    rank, world = launcher_rank()
    framework, mesh, coords = _from_host()
    if not mesh:
        mesh, coords = _from_meshes(models)
    model = models[0] if models else None
    name = dtype = ""
    if model is not None:
        parameter = next(model.parameters(), None)
        dtype = str(parameter.dtype).removeprefix("torch.") if parameter is not None else ""
        name = str(getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__)
        if type(model).__module__.startswith("transformers."):
            framework = framework or "transformers"
    return RankInfo(
        rank=rank,
        world_size=world,
        mesh=mesh,
        coords=coords,
        framework=framework or "torch",
        model=name,
        dtype=dtype,
        model_config=hyperparameters(model) if model is not None else {},
    )


class RankIdentity:
    """This process's rank: as given by the host, or determined here, again whenever groups are created."""

    def __init__(self, given: RankInfo | None, models: Callable[[], Sequence[nn.Module]]) -> None:
        self._given = given
        self._models = models
        self._stage: tuple[Any, ...] = ()
        self._last: RankInfo | None = None

    def resolve(self) -> RankInfo:
        """Determine it now."""
        self._stage = stage()
        self._last = self._given or rank_info(self._models())
        return self._last

    def refresh(self) -> RankInfo | None:
        """The new identity if it has changed since the last call, else None; cheap when no groups were created."""
        if self._given is not None or stage() == self._stage:
            return None
        before = self._last
        return None if self.resolve() == before else self._last


def launcher_rank(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """(rank, world size) from torch.distributed once initialised, else from the launcher's environment."""
    if groups_exist():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    try:
        rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1
    return (rank, world) if 0 <= rank < world else (0, 1)


def groups_exist() -> bool:
    """Whether torch.distributed is initialised."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def stage() -> tuple[Any, ...]:
    """What an identity depends on; when it changes, determine it again."""
    return groups_exist(), *(name for name in _HOSTS if name in sys.modules)


def _from_host() -> tuple[str, dict[str, int], dict[str, int]]:
    """(framework, mesh, coords) of the first loaded host module whose groups exist."""
    for name, framework in _HOSTS.items():
        host = sys.modules.get(name)
        if host is None:
            continue
        mesh, coords = {}, {}
        for axis, long in _AXES.items():
            size, coordinate = (_ask(host, f"get_{long}_{what}") for what in ("world_size", "rank"))
            if size and coordinate is not None:  # before its groups exist, Megatron returns 0
                mesh[axis], coords[axis] = size, coordinate
        if mesh:
            return framework, mesh, coords
    return "", {}, {}


def _ask(host: Any, function: str) -> int | None:
    try:
        return int(getattr(host, function)())
    except Exception:  # noqa: BLE001 - missing groups raise many kinds of errors
        return None


def _from_meshes(models: Sequence[nn.Module]) -> tuple[dict[str, int], dict[str, int]]:
    mesh: dict[str, int] = {}
    coords: dict[str, int] = {}
    for found in meshes(models):
        here = found.get_coordinate()
        for name, size, coordinate in zip(axis_names(found), found.shape, here or (), strict=False):
            if name is None:
                continue
            mesh.setdefault(name, int(size))
            coords.setdefault(name, int(coordinate))
    return mesh, coords
