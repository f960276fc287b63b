"""Device meshes of DTensor parameters with their axis names, and the process group of DistributedDataParallel."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

_KNOWN: dict[Any, tuple[str, ...]] = {}
"""Inferred axis names of meshes without names."""


def axis_names(mesh: Any) -> tuple[str | None, ...]:
    """Return the axis names of a DeviceMesh; None for an axis without a name."""
    return tuple(mesh.mesh_dim_names or _KNOWN.get(mesh) or (None,) * mesh.ndim)


def meshes(models: Sequence[nn.Module]) -> Iterator[Any]:
    """Yield the distinct device meshes of the models' DTensor parameters."""
    seen: list[Any] = []
    for model in models:
        _name_fsdp(model)
        for parameter in model.parameters():
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None and mesh not in seen:
                seen.append(mesh)
                yield mesh


def replicas(models: Sequence[nn.Module]) -> tuple[int, int] | None:
    """Return (rank, size) within the process group of a DistributedDataParallel in ``models``; None without one."""
    if "torch.nn.parallel.distributed" not in sys.modules or not torch.distributed.is_available():
        return None
    for model in models:
        for module in model.modules():
            if isinstance(module, nn.parallel.DistributedDataParallel):
                group = module.process_group
                return torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    return None


def _name_fsdp(model: nn.Module) -> None:
    """Name the axis of the mesh that ``fully_shard`` creates by default ``dp``: an unnamed 1D mesh of all ranks."""
    if "torch.distributed.fsdp" not in sys.modules:
        return
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            for parameter in module.parameters():
                mesh = getattr(parameter, "device_mesh", None)
                if mesh is not None and mesh.mesh_dim_names is None and mesh.ndim == 1:
                    _KNOWN[mesh] = ("dp",)
            return
