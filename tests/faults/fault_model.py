"""A model whose every value can be computed again from rank, step and site, bit for bit."""

from typing import Any

import numpy as np
import torch
from torch import nn

Array = np.ndarray[Any, np.dtype[np.float32]]


def first(rank: int, step: int, rows: int, width: int) -> Array:
    """The model's input: small whole numbers, which float32 holds exactly through all layers."""
    place = np.arange(rows * width, dtype=np.uint32) + np.uint32((rank * 7919 + step) * 40503)
    mixed = place * np.uint32(2654435761)
    return ((mixed >> np.uint32(12)) % np.uint32(1000)).astype(np.float32).reshape(rows, width)


def expected(rank: int, step: int, site: str, rows: int, width: int, layers: int) -> Array:
    """What the record of ``site`` must hold."""
    path, _, port = site.partition(":")
    number = int(path.removeprefix("layers.")) if path else 0
    depth = (number + (port == "out")) if path else (layers if port == "out" else 0)
    return first(rank, step, rows, width) + np.float32(depth * (depth + 1) // 2)


def sites(layers: int) -> set[str]:
    """Every site of the model."""
    paths = ["", *(f"layers.{number}" for number in range(layers))]
    return {f"{path}:{port}" for path in paths for port in ("in[x]", "out")}


class Layer(nn.Module):
    """Adds its number, counted from 1."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (self.number + 1)


class Chain(nn.Module):
    """Layers one after the other."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(number) for number in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def given(rank: int, step: int, rows: int, width: int) -> torch.Tensor:
    """The input as a tensor."""
    return torch.from_numpy(first(rank, step, rows, width))
