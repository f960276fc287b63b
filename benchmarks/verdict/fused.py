"""Fused: a transformers model whose q, k, v and gate, up projections run as one linear layer each, named as in vLLM."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn


def fuse(model: Any) -> Any:
    """Replace the projections of ``model`` by ``qkv_proj`` and ``gate_up_proj``, in place; return the model."""
    for module in list(model.modules()):
        for name, parts in (("qkv_proj", ("q_proj", "k_proj", "v_proj")), ("gate_up_proj", ("gate_proj", "up_proj"))):
            if all(isinstance(getattr(module, part, None), nn.Linear) for part in parts):
                _fuse(module, name, parts)
    return model


def _fuse(module: Any, name: str, parts: Sequence[str]) -> None:
    linears = [getattr(module, part) for part in parts]
    first, widths = linears[0], [linear.out_features for linear in linears]
    whole = nn.Linear(first.in_features, sum(widths), bias=first.bias is not None, dtype=first.weight.dtype)
    whole.weight.data = torch.cat([linear.weight.data for linear in linears])
    if first.bias is not None:
        whole.bias.data = torch.cat([linear.bias.data for linear in linears])
    computed: dict[int, tuple[Tensor, ...]] = {}
    setattr(module, name, whole)
    for index, part in enumerate(parts):
        delattr(module, part)  # a plain function under the old name for forward: no module, hence no site
        object.__setattr__(module, part, _part(whole, widths, index, computed))


def _part(whole: nn.Linear, widths: list[int], index: int, computed: dict[int, tuple[Tensor, ...]]) -> Any:
    """Return the function that replaces one part; the function of part 0 computes all parts."""

    def call(hidden: Tensor) -> Tensor:
        if index == 0:
            computed[0] = whole(hidden).split(widths, dim=-1)
        return computed[0][index]

    return call
