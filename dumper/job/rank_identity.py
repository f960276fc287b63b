"""RankIdentity: determine the rank and mesh coordinates of this process whenever a run is opened."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from tapscope.core.framework_plugin import ProcessLayout
from tapscope.core.observe import RankInfo
from tapscope.dumper.job import pipeline_chunks
from tapscope.dumper.job.device_meshes import axis_names, meshes, replicas
from tapscope.dumper.job.framework_plugins import registry
from tapscope.dumper.job.hyperparameters import hyperparameters


def rank_info(models: Sequence[nn.Module] = ()) -> RankInfo:
    """Collect rank information from torch.distributed, launcher variables, framework plugins and DTensor meshes.

    Never calls a collective. Before process groups are created, the launcher's ``RANK`` and ``WORLD_SIZE`` apply.
    """
    rank, world = launcher_rank()
    model = models[0] if models else None
    framework, layout = _from_plugins(model)
    if layout is None:
        mesh, coords = _from_meshes(models)
        layout = ProcessLayout(mesh=mesh, coords=coords)
    name = dtype = ""
    if model is not None:
        parameter = next(model.parameters(), None)
        dtype = str(parameter.dtype).removeprefix("torch.") if parameter is not None else ""
        name = str(getattr(getattr(model, "config", None), "_name_or_path", "") or type(model).__name__)
    return RankInfo(
        rank=rank,
        world_size=world,
        mesh=layout.mesh,
        coords=layout.coords,
        own_steps=layout.own_steps,
        framework=framework or "torch",
        model=name,
        dtype=dtype,
        model_config=hyperparameters(model) if model is not None else {},
    )


class RankIdentity:
    """Rank of this process: given by the host, or detected, and detected again when process groups are created."""

    def __init__(self, given: RankInfo | None, models: Callable[[], Sequence[nn.Module]]) -> None:
        self._given = given
        self._models = models
        self._stage: tuple[Any, ...] = ()
        self._last: RankInfo | None = None

    def resolve(self) -> RankInfo:
        """Determine the rank information now."""
        self._stage = stage()
        self._last = self._given or rank_info(self._models())
        return self._last

    def refresh(self) -> RankInfo | None:
        """Return the rank information if it has changed since the last call, else None.

        Cheap as long as no process groups are created.
        """
        if self._given is not None or stage() == self._stage:
            return None
        before = self._last
        return None if self.resolve() == before else self._last


def launcher_rank(environ: Mapping[str, str] = os.environ) -> tuple[int, int]:
    """Return (rank, world size) from torch.distributed once initialized, else from the launcher's environment."""
    if groups_exist():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    try:
        rank, world = int(environ["RANK"]), int(environ["WORLD_SIZE"])
    except (KeyError, ValueError):
        return 0, 1
    return (rank, world) if 0 <= rank < world else (0, 1)


def groups_exist() -> bool:
    """Return whether torch.distributed is initialized."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def stage() -> tuple[Any, ...]:
    """Return the inputs of :func:`rank_info`; if they change, it must be called again."""
    return groups_exist(), *registry.loaded


def _from_plugins(model: nn.Module | None) -> tuple[str, ProcessLayout | None]:
    """Return (framework, layout), preferably from the plugin of the model's framework.

    If that plugin has no layout, the layout is that of the first plugin whose process groups exist.
    """
    owner = registry.owner_of(model) if model is not None else None
    plugins = sorted(registry.active(), key=lambda plugin: plugin is not owner)
    for plugin in plugins:
        layout = registry.ask(plugin, "layout", None)
        if layout is not None and layout.mesh:
            return (owner or plugin).name, layout
    return (owner.name if owner is not None else ""), None


def _from_meshes(models: Sequence[nn.Module]) -> tuple[dict[str, int], dict[str, int]]:
    mesh: dict[str, int] = {}
    coords: dict[str, int] = {}
    for device_mesh in meshes(models):
        here = device_mesh.get_coordinate()
        for name, size, coordinate in zip(axis_names(device_mesh), device_mesh.shape, here or (), strict=False):
            if name is None:
                continue
            mesh.setdefault(name, int(size))
            coords.setdefault(name, int(coordinate))
    if "dp" not in mesh and (place := replicas(models)) is not None:
        coords["dp"], mesh["dp"] = place
    if "pp" not in mesh and (place := pipeline_chunks.place_of(models)) is not None:
        mesh["pp"], coords["pp"] = place
    return mesh, coords
