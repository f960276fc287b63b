"""Inferred sharding: the sharded axis of a plain tensor, derived from the placements of DTensor parameters.

Tensor parallelism over DTensor parameters (``torch``'s ``parallelize_module``, ``tp_plan`` of transformers) passes
local tensors from module to module. Their sharding is inferred as follows:

- A linear layer whose weight is sharded by rows (dim 0) outputs a shard of its features. One whose weight is sharded by
  columns (dim 1) receives a shard, if the width of the tensor is that of the local weight.
- A tensor object known to be a shard is a shard at every other port where it appears.
- A module without parameters and children that preserves the shape (an activation) preserves the sharding.
- Attention weights ``b h s k`` output by a module with both kinds of linear layers are sharded by heads.
"""

import math
import weakref
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from tapscope.dumper.records.dtensor_dims import MeshAxis, Placement
from tapscope.dumper.taps.module_tree import is_inside, members

_FEATURES = -1
_HEADS = 1


class _Linear(NamedTuple):
    """A linear layer with a sharded weight."""

    axis: str
    kind: str
    """The sharded side of the layer: ``out`` or ``in``."""
    width: int
    """Number of features of the local weight on that side."""


class InferredSharding:
    """The inferred sharding of one model; does not keep the model alive."""

    def __init__(self, linears: dict[str, _Linear], plain: frozenset[str], num_heads: int | None) -> None:
        self._linears = linears
        self._plain = plain
        self._num_heads = num_heads
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], Placement]] = {}
        self._serial = -1
        self._inputs: dict[str, tuple[torch.Size, Placement]] = {}

    def placed(self, path: str, kind: str, leaf: torch.Tensor, serial: int) -> Placement | None:
        """Return the placement of ``leaf`` at a port of the module at ``path``; None if unknown.

        ``kind`` is ``in`` or ``out``, ``serial`` the step. Tensors are only recognized within one step.
        """
        if serial != self._serial:
            self._serial = serial
            self._seen.clear()
            self._inputs.clear()
        placement = self._of_linear(path, kind, leaf) or self._of_tensor(leaf)
        if placement is None and kind == "out":
            placement = self._of_activation(path, leaf) or self._of_heads(path, leaf)
        if placement is not None:
            self._seen[id(leaf)] = weakref.ref(leaf), placement
            if kind == "in" and path in self._plain:
                self._inputs[path] = leaf.shape, placement
        return placement

    def _of_linear(self, path: str, kind: str, leaf: torch.Tensor) -> Placement | None:
        linear = self._linears.get(path)
        if linear is None or linear.kind != kind or not leaf.ndim or leaf.shape[_FEATURES] != linear.width:
            return None
        return (MeshAxis(linear.axis, "shard", _FEATURES),)

    def _of_tensor(self, leaf: torch.Tensor) -> Placement | None:
        seen, placement = self._seen.get(id(leaf), (None, None))
        return placement if seen is not None and seen() is leaf else None

    def _of_activation(self, path: str, leaf: torch.Tensor) -> Placement | None:
        shape, placement = self._inputs.get(path, (None, None))
        return placement if shape == leaf.shape else None

    def _of_heads(self, path: str, leaf: torch.Tensor) -> Placement | None:
        if self._num_heads is None or leaf.ndim != 4 or leaf.shape[2] > leaf.shape[3]:
            return None
        inside = [linear for name, linear in self._linears.items() if path and is_inside(name, path)]
        is_attention = {linear.kind for linear in inside} == {"in", "out"} and len({each.axis for each in inside}) == 1
        is_shard = is_attention and leaf.shape[_HEADS] < self._num_heads and not self._num_heads % leaf.shape[_HEADS]
        return (MeshAxis(inside[0].axis, "shard", _HEADS),) if is_shard else None


def sharding_of(model: nn.Module) -> InferredSharding | None:
    """Infer the sharding of ``model`` from its parameters' placements; None without sharded linear layers."""
    modules = members(model)
    linears = {path: linear for path, each in modules.items() if (linear := _linear(each.core)) is not None}
    if not linears:
        return None
    plain = [path for path, each in modules.items() if next(_held(each.core), None) is None]
    return InferredSharding(linears, frozenset(plain), _num_heads(model))


def axes_of(shape: Sequence[int], grid: Sequence[int]) -> str | None:
    """Return the axis names of a tensor with one feature vector per token of ``grid``; None for any other shape.

    ``b s h`` for the shape (*grid, h) with a two-axis ``grid``, ``t h`` for (tokens, h).
    """
    *tokens, _ = shape or (0,)
    if tokens == list(grid) and len(grid) == 2:
        return "b s h"
    return "t h" if len(tokens) == 1 and grid and tokens[0] == math.prod(grid) else None


def _held(module: nn.Module) -> Iterator[Any]:
    yield from module.children()
    yield from module.parameters(recurse=False)


def _linear(module: nn.Module) -> _Linear | None:
    weight: Any = next((each for name, each in module.named_parameters(recurse=False) if name == "weight"), None)
    if weight is None or weight.ndim != 2 or not (hasattr(module, "in_features") and hasattr(weight, "placements")):
        return None
    names, placements = weight.device_mesh.mesh_dim_names or (), weight.placements
    sharded = [(name, each.dim) for name, each in zip(names, placements, strict=False) if each.is_shard()]
    shape = weight._local_tensor.shape
    if len(sharded) != 1 or shape == weight.shape:  # sharded over several mesh axes, as FSDP over TP: some are gathered
        return None
    ((name, at),) = sharded
    return _Linear(name, "in" if at % 2 else "out", shape[at])


def _num_heads(model: nn.Module) -> int | None:
    config = getattr(model, "config", None)
    number = getattr(config, "num_attention_heads", None)
    return number if isinstance(number, int) else None
