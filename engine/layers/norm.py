"""Normalisation layers, whole on every rank."""

from collections.abc import Iterator

import torch
from torch import Tensor

from tapscope.engine.layers.probe import WHOLE
from tapscope.engine.weights import Piece, Weighted, parameter

HEADS = "t num_heads[tp] d"
"""Dims of queries and keys that are normalised by head."""


class RMSNorm(Weighted):
    """x / rms(x) * weight over the last axis, arXiv:1910.07467; sums in float32 as transformers' LlamaRMSNorm."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, dims: str = WHOLE) -> None:
        super().__init__()
        self.weight = parameter(size, dtype=dtype)
        self.eps = eps
        self.tap_dims = {"in[hidden_states]": dims, "out": dims}

    def forward(self, hidden_states: Tensor) -> Tensor:
        """[..., size] -> [..., size], in the input's dtype."""
        return self.weight * _normalised(hidden_states, self.eps).to(hidden_states.dtype)

    def pieces(self, path: str) -> Iterator[Piece]:
        """One vector, whole on every rank."""
        yield Piece(f"{path}.weight", tuple(self.weight.shape), self.weight)


class GemmaRMSNorm(RMSNorm):
    """x / rms(x) * (1 + weight), in float32 to the end, as transformers' Gemma2RMSNorm."""

    def __init__(self, size: int, eps: float, dtype: torch.dtype, dims: str = WHOLE) -> None:
        super().__init__(size, eps, dtype, dims)
        self.tap_dims = {"in[x]": dims, "out": dims}

    def forward(self, x: Tensor) -> Tensor:
        """[..., size] -> [..., size], in the input's dtype."""
        return (_normalised(x, self.eps) * (1.0 + self.weight.float())).to(x.dtype)


def _normalised(states: Tensor, eps: float) -> Tensor:
    wide = states.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
