"""Device meshes of DTensor parameters, the names of their axes, and the group of a DistributedDataParallel."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

_KNOWN: dict[Any, tuple[str, ...]] = {}
"""Axis names of meshes that have none."""


def axis_names(mesh: Any) -> tuple[str | None, ...]:
    """The names of a mesh's axes; None for an axis without a name."""
    return tuple(mesh.mesh_dim_names or _KNOWN.get(mesh) or (None,) * mesh.ndim)


def meshes(models: Sequence[nn.Module]) -> Iterator[Any]:
    """The device meshes of the models' DTensor parameters, each once."""
    seen: list[Any] = []
    for model in models:
        _name_fsdp(model)
        for parameter in model.parameters():
            mesh = getattr(parameter, "device_mesh", None)
            if mesh is not None and mesh not in seen:
                seen.append(mesh)
                yield mesh


def replicas(models: Sequence[nn.Module]) -> tuple[int, int] | None:
    """(this process's coordinate, size) of the data-parallel group of a DistributedDataParallel; None without one."""
    if "torch.nn.parallel.distributed" not in sys.modules or not torch.distributed.is_available():
        return None
    for model in models:
        for module in model.modules():
            if isinstance(module, nn.parallel.DistributedDataParallel):
                group = module.process_group
                return torch.distributed.get_rank(group), torch.distributed.get_world_size(group)
    return None


def _name_fsdp(model: nn.Module) -> None:
    """``fully_shard`` without a mesh creates an unnamed one of all ranks: its axis is data parallel."""
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
