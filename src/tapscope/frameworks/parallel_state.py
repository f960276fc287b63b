"""Process layout from a Megatron-style ``parallel_state`` module with one getter function per axis."""

import sys
from collections.abc import Mapping
from typing import Any

from tapscope.core.framework_plugin import ProcessLayout

AXES = {
    "tp": "tensor_model_parallel",
    "pp": "pipeline_model_parallel",
    "dp": "data_parallel",
    "cp": "context_parallel",
    "ep": "expert_model_parallel",
}
"""Axis -> name used in ``get_<...>_rank`` and ``get_<...>_world_size``."""


def layout_of(module: str, axes: Mapping[str, str] = AXES) -> ProcessLayout | None:
    """Return the layout, or None if the module is not imported or its groups do not exist yet; Megatron then returns
    0."""
    state = sys.modules.get(module)
    mesh, coords = {}, {}
    for axis, name in axes.items():
        size, coordinate = (call(state, f"get_{name}_{what}") for what in ("world_size", "rank"))
        if size and coordinate is not None:
            mesh[axis], coords[axis] = int(size), int(coordinate)
    return ProcessLayout(mesh=mesh, coords=coords) if mesh else None


def call(state: Any, function: str) -> Any:
    """Call a function of the module; returns None if it is missing or raises, as it does without groups."""
    try:
        return getattr(state, function)()
    except Exception:  # noqa: BLE001 - missing groups raise many kinds of errors
        return None
