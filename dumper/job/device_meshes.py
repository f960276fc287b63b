"""Meshes: the device meshes of DTensor parameters, and what their axes are called."""

import sys
from collections.abc import Iterator, Sequence
from typing import Any

from torch import nn

_KNOWN: dict[Any, tuple[str, ...]] = {}
"""What the axes of meshes without names are called."""


def axis_names(mesh: Any) -> tuple[str | None, ...]:
    """What the axes of a mesh are called; None for those that have no name."""
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


def _name_fsdp(model: nn.Module) -> None:
    """``fully_shard`` without a mesh makes one of all ranks, without a name: its axis is data parallel."""
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
